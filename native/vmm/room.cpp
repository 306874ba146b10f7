// The room: a little memory of each device that is there for the driver's own checkpoint, which on
// a completely full GPU fails and leaves a process that cannot be checkpointed any more
// (docs/design/hardware-notes.md). It is in nobody's way while it is held, and free when it is
// needed.
#include "memory.h"

#include <algorithm>

namespace flowgpu {

namespace {

// Driver 580 on an H200 needs no more than the least of these.
constexpr uint64_t kLeastRoom = 4ull << 20;
constexpr uint64_t kMostRoom = 32ull << 20;
constexpr uint64_t kRoomShare = 512;
// Where the least would be more than a few hundredths of what the program may have.
constexpr uint64_t kSmallestDevice = 128ull << 20;

} // namespace

uint64_t Memory::room_for(uint64_t total, uint64_t granularity) {
    if (total < kSmallestDevice)
        return 0;
    return round_up(std::clamp(total / kRoomShare, kLeastRoom, kMostRoom), granularity);
}

void Memory::fill_room(int device, Room& room) {
    if (room.bytes)
        return;
    CUmemAllocationProp prop = properties(device);
    size_t granularity = 0, total = 0;
    if (driver_.total(&total, device) != CUDA_SUCCESS ||
        driver_.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) !=
            CUDA_SUCCESS)
        return;
    uint64_t bytes = room_for(total, granularity);
    if (bytes && driver_.create(&room.handle, bytes, &prop, 0) == CUDA_SUCCESS)
        room.bytes = bytes;
}

// Tried once: a program on a full GPU must not pay for another try at each allocation.
void Memory::make_room(int device) {
    auto [it, first] = rooms_.try_emplace(device);
    if (first)
        fill_room(device, it->second);
}

void Memory::empty_room(Room& room) {
    if (room.bytes)
        driver_.release(room.handle);
    room = Room();
}

void Memory::drop_unused_rooms() {
    for (auto it = rooms_.begin(); it != rooms_.end();) {
        auto current = it++;
        if (std::any_of(blocks_.begin(), blocks_.end(), [current](const auto& entry) {
                return entry.second->device == current->first;
            }))
            continue;
        empty_room(current->second);
        rooms_.erase(current);
    }
}

void Memory::refill_rooms() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, room] : rooms_)
        fill_room(device, room);
}

uint64_t Memory::room_bytes(int device) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = rooms_.find(device);
    return it == rooms_.end() ? 0 : it->second.bytes;
}

} // namespace flowgpu
