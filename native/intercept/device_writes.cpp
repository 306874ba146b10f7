#include "device_writes.h"

#include <atomic>

#include "gate.h"
#include "watch.h"

namespace flowgpu::device_writes {

namespace {

constexpr uint32_t kUnderWayMs = 300; // a step of a large model

std::atomic<bool> is_begun{false};
std::atomic<bool> knows_all{false}; // of the copies since then

pinned::Range range_of(const flowgpu_write& write) {
    const uint64_t bytes =
        (write.slices - 1) * write.slice + (write.rows - 1) * write.pitch + write.bytes;
    return pinned::range_of(reinterpret_cast<const void*>(write.address), bytes, 0);
}

} // namespace

void begin() {
    pinned::begin_to_keep();
    is_begun = true;
    knows_all = gate::mode() == FLOWGPU_GATE_OPEN && watch::begin(watch::What::host) &&
                gate::watch_open(watch::note, kUnderWayMs);
}

void end() {
    if (is_begun.exchange(false) && gate::mode() == FLOWGPU_GATE_WATCH)
        gate::open();
}

bool begun() {
    return is_begun;
}

std::vector<pinned::Range> noted() {
    std::vector<flowgpu_write> writes;
    if (!knows_all || watch::noted(&writes).missed)
        return {pinned::all_memory()};
    std::vector<pinned::Range> ranges = pinned::since_then();
    for (const flowgpu_write& write : writes)
        ranges.push_back(range_of(write));
    return pinned::merged(std::move(ranges));
}

} // namespace flowgpu::device_writes
