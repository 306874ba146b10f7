#include "issuing.h"

#include <atomic>

namespace flowgpu::nccl {

namespace {

constexpr int kRelaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED

std::atomic<const uint32_t*> captures{nullptr};

// Given by the system when a thread first needs it.
thread_local Group own_group;

// NCCL puts like collectives of a group together, and chooses a way by the size of all.
void note_together(Group& group) {
    for (uint32_t i = 0; i < group.kept; i++) {
        Collective all = group.operations[i].what;
        for (uint32_t k = i + 1; all.count && k < group.kept; k++) {
            Kept& other = group.operations[k];
            if (other.row != group.operations[i].row || !other.what.is_like(all))
                continue;
            all.count += other.what.count;
            other.what.count = 0;
        }
        note(group.operations[i].row, all);
    }
}

} // namespace

__thread unsigned depth __attribute__((tls_model("initial-exec")));
__thread uint32_t group_depth __attribute__((tls_model("initial-exec")));

Group& group_of_thread() {
    return own_group;
}

void note_captures(const uint32_t* under_way) {
    captures = under_way;
}

const void* captured_into(void* stream) {
    using Info = int (*)(void*, int*, uint64_t*, void**, const void**, size_t*);
    const uint32_t* under_way = captures.load(std::memory_order_relaxed);
    if (!under_way || !__atomic_load_n(under_way, __ATOMIC_RELAXED))
        return nullptr;
    static const auto info =
        reinterpret_cast<Info>(dlsym(RTLD_DEFAULT, "cuStreamGetCaptureInfo_v2"));
    int status = 0;
    uint64_t id = 0;
    void* graph = nullptr;
    constexpr int kActive = 1;
    if (!info || info(stream, &status, &id, &graph, nullptr, nullptr) != 0 || status != kActive)
        return nullptr;
    return graph;
}

const Coming* coming_as(void* comm) {
    const Group& group = group_of_thread();
    for (uint32_t i = 0; comm && group_depth && i < group.comings; i++)
        if (*group.coming[i].handle == comm)
            return &group.coming[i];
    return nullptr;
}

Result issue_kept(Group& group) {
    Result first = kSuccess;
    for (uint32_t i = 0; i < group.kept; i++) {
        const Kept& one = group.operations[i];
        const auto issue = [&one] { return one.issue(one.closure); };
        const Result result = one.graph ? captured(one.graph, one.row, issue) : issue();
        if (!good(result) && good(first))
            first = result;
    }
    if (good(first))
        note_together(group);
    return first;
}

void clear(Group& group) {
    free(group.operations);
    group.operations = nullptr;
    group.comings = group.endings = group.kept = group.room = group.unit.used = 0;
}

void arrived(const Coming& one, Result result) {
    if (!one.place)
        return;
    if (!good(result) || !*one.handle)
        return forget(one.place);
    if (result == kSuccess && !one.place->how.context)
        note_device(*one.place, *one.handle);
    *one.handle = bind(one.place, *one.handle);
    settle(one.place, result == kSuccess);
}

Coming coming(uint64_t key, int ranks, int rank, void** handle) {
    Coming one;
    one.place = reserve(make_row(key, static_cast<uint32_t>(ranks), static_cast<uint32_t>(rank),
                                 FLOWGPU_NCCL_NO_RANK, FLOWGPU_NCCL_NO_RANK));
    one.handle = handle;
    return one;
}

AsNccl::AsNccl() : mode_(kRelaxed) {
    depth++;
    drive("cuThreadExchangeStreamCaptureMode", &mode_);
}

AsNccl::~AsNccl() {
    drive("cuThreadExchangeStreamCaptureMode", &mode_);
    depth--;
}

} // namespace flowgpu::nccl
