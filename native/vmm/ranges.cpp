#include "ranges.h"

namespace flowgpu {

Ranges::Ranges(uint64_t base, uint64_t bytes)
    : base_(base), bytes_(bytes), free_bytes_(bytes), free_{{base, bytes}} {}

uint64_t Ranges::claim(uint64_t bytes) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        if (it->second < bytes)
            continue;
        uint64_t address = it->first;
        uint64_t rest = it->second - bytes;
        free_.erase(it);
        if (rest)
            free_[address + bytes] = rest;
        free_bytes_ -= bytes;
        return address;
    }
    return 0;
}

bool Ranges::release(uint64_t address, uint64_t bytes) {
    if (!bytes || address < base_ || address + bytes > base_ + bytes_)
        return false;
    auto next = free_.lower_bound(address);
    if (next != free_.end() && next->first < address + bytes)
        return false;
    bool join_next = next != free_.end() && next->first == address + bytes;
    uint64_t end = join_next ? next->first + next->second : address + bytes;
    uint64_t start = address;
    if (next != free_.begin()) {
        auto previous = std::prev(next);
        uint64_t previous_end = previous->first + previous->second;
        if (previous_end > address)
            return false;
        if (previous_end == address) {
            start = previous->first;
            free_.erase(previous);
        }
    }
    if (join_next)
        free_.erase(next);
    free_[start] = end - start;
    free_bytes_ += bytes;
    return true;
}

} // namespace flowgpu
