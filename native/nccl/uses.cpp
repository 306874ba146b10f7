#include "uses.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "page.h"
#include "table.h"

namespace flowgpu::nccl {

namespace {

constexpr uint32_t kUses = 16384;
// Bits of a key, from the lowest: octave, with, type, kind, row and one.
constexpr int kWithAt = 6, kTypeAt = 31, kKindAt = 36, kRowAt = 40;

struct Entry {
    std::atomic<uint64_t> key;
    std::atomic<uint64_t> least, most;
};
Entry table[kUses];
pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

Entry* make(uint64_t key) {
    Locked locked(changing);
    Entry* made = find_or_free(table, key);
    if (made && made->key != key) { // else another thread has made it
        made->least = ~0ull;
        made->most = 0;
        made->key.store(key, std::memory_order_release);
    }
    return made;
}

bool is_of(const Entry& entry, uint32_t row) {
    const uint64_t key = entry.key;
    return key != kGone && key >> kRowAt == uint64_t{row} + 1;
}

int bits(uint64_t key, int from, int to) {
    return static_cast<int>(key >> from & ((1ull << (to - from)) - 1));
}

} // namespace

void note(uint32_t row, const Collective& collective) {
    auto [kind, type, with, count] = collective;
    if (row == kNoRow || count == 0)
        return;
    if (kind >= kAlltoAll) // they connect pairs of ranks, whatever the size
        count = 1;
    else if (with > kLastOperation)
        with = kLastOperation + 1;
    const auto octave = static_cast<uint64_t>(63 - __builtin_clzll(count));
    const uint64_t key = (uint64_t{row} + 1) << kRowAt | uint64_t{kind} << kKindAt |
                         static_cast<uint64_t>(type) << kTypeAt |
                         static_cast<uint64_t>(with) << kWithAt | octave;
    Entry* entry = find(table, key);
    if (!entry)
        entry = make(key);
    if (!entry) {
        header().forgotten = 1;
        return;
    }
    uint64_t before = entry->least;
    while (count < before && !entry->least.compare_exchange_weak(before, count)) {
    }
    before = entry->most;
    while (count > before && !entry->most.compare_exchange_weak(before, count)) {
    }
}

uint32_t uses_of(uint32_t row, Use* out, uint32_t room) {
    uint32_t found = 0;
    for (const Entry& entry : table) {
        if (!is_of(entry, row))
            continue;
        const uint64_t key = entry.key;
        if (found < room)
            out[found] = {static_cast<Kind>(bits(key, kKindAt, kRowAt)),
                          bits(key, kTypeAt, kKindAt), bits(key, kWithAt, kTypeAt), entry.least,
                          entry.most};
        found++;
    }
    std::sort(out, out + std::min(found, room), [](const Use& a, const Use& b) {
        return std::tie(a.kind, a.type, a.with, a.least) <
               std::tie(b.kind, b.type, b.with, b.least);
    });
    return found;
}

void forget_uses(uint32_t row) {
    for (Entry& entry : table)
        if (is_of(entry, row))
            entry.key = kGone;
}

void forget_all_uses() {
    pthread_mutex_init(&changing, nullptr);
    for (Entry& entry : table)
        entry.key = 0;
}

} // namespace flowgpu::nccl
