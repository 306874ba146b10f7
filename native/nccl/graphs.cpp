#include "graphs.h"
#include "table.h"

namespace flowgpu::nccl {

namespace {

constexpr uint32_t kGraphs = 2048;

struct Entry {
    const void* graph; // null: free
    Unit unit;
};
Entry entries[kGraphs]; // memory of those that were ever used alone
uint32_t used = 0;
pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

// The page has the number of graphs with operations.
class Changing {
  public:
    explicit Changing(const Entry& entry) : entry_(entry), before_(counts()) {}
    ~Changing() {
        if (const int more = counts() - before_)
            __atomic_fetch_add(&header().graphs, static_cast<uint32_t>(more), __ATOMIC_SEQ_CST);
    }
    Changing(const Changing&) = delete;
    Changing& operator=(const Changing&) = delete;

  private:
    int counts() const { return entry_.graph && entry_.unit.used ? 1 : 0; }

    const Entry& entry_;
    int before_;
};

Entry* find(const void* graph) {
    for (uint32_t i = 0; i < used; i++)
        if (entries[i].graph == graph)
            return &entries[i];
    return nullptr;
}

// Null, and `overflow`, where all are taken.
Entry* find_or_make(const void* graph) {
    if (Entry* known = find(graph))
        return known;
    Entry* free = find(nullptr);
    if (!free && used < kGraphs)
        free = &entries[used++];
    if (!free) {
        header().overflow = 1;
        return nullptr;
    }
    free->graph = graph;
    free->unit.used = 0;
    return free;
}

} // namespace

void capture(const void* graph, uint32_t row) {
    Locked locked(changing);
    if (Entry* entry = find_or_make(graph)) {
        const Changing changing_one(*entry);
        entry->unit.add(row);
    }
    __atomic_store_n(&header().captured, 1, __ATOMIC_SEQ_CST);
}

void become(const void* graph, const void* other) {
    Locked locked(changing);
    const Entry* from = find(other);
    if (!from) {
        if (Entry* before = find(graph)) {
            const Changing changing_one(*before);
            before->graph = nullptr;
        }
        return;
    }
    const Unit unit = from->unit;
    if (Entry* entry = find_or_make(graph)) {
        const Changing changing_one(*entry);
        entry->unit = unit;
    }
}

void take(const void* graph, const void* other) {
    Locked locked(changing);
    const Entry* from = find(other);
    if (!from)
        return;
    const Unit unit = from->unit;
    Entry* entry = find_or_make(graph);
    if (!entry)
        return;
    const Changing changing_one(*entry);
    for (uint32_t i = 0; i < unit.used; i++)
        for (uint32_t k = 0; k < unit.wants[i].count; k++)
            entry->unit.add(unit.wants[i].row);
}

void end(const void* graph) {
    Locked locked(changing);
    if (Entry* entry = graph ? find(graph) : nullptr) {
        const Changing changing_one(*entry);
        entry->graph = nullptr;
    }
}

void forget_captured(uint32_t row) {
    if (!header().captured)
        return;
    Locked locked(changing);
    for (uint32_t i = 0; i < used; i++) {
        Unit& unit = entries[i].unit;
        const Changing changing_one(entries[i]);
        for (uint32_t k = 0; k < unit.used; k++)
            if (unit.wants[k].row == row)
                unit.wants[k--] = unit.wants[--unit.used];
    }
}

bool launch_of(const void* graph, Unit* unit) {
    Locked locked(changing);
    const Entry* entry = graph ? find(graph) : nullptr;
    if (entry)
        *unit = entry->unit;
    return entry != nullptr;
}

} // namespace flowgpu::nccl
