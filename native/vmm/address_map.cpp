#include "address_map.h"

#include <algorithm>

namespace flowgpu {

namespace {

constexpr bool facts_are_in_order() {
    for (size_t i = 0; i < kMemoryKinds; i++)
        if (kKindFacts[i].kind != static_cast<MemoryKind>(i))
            return false;
    return true;
}
static_assert(facts_are_in_order());

size_t number_of(MemoryKind kind) {
    return static_cast<size_t>(kind);
}

bool contains(const Region& region, uint64_t address) {
    return address - region.address < region.bytes;
}

} // namespace

// Only whoever has the lock writes, so plain stores do.
void AddressMap::count(MemoryKind kind, uint64_t number, uint64_t bytes) {
    const size_t i = number_of(kind);
    counts_[i] += number;
    bytes_[i].store(bytes_[i].load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
    const Kinds others = present_.load(std::memory_order_relaxed) & ~only(kind);
    present_.store(counts_[i] ? others | only(kind) : others, std::memory_order_relaxed);
}

AddressMap::Ranges::iterator AddressMap::forget(Ranges& layer, Ranges::iterator at) {
    const Region& region = at->second;
    count(region.kind, ~uint64_t{0}, -region.bytes);
    const bool remembered = region.kind == MemoryKind::allocation;
    at = layer.erase(at);
    if (remembered) // by threads, with the version of then: a new one comes after the removal
        version_.fetch_add(1, std::memory_order_release);
    return at;
}

void AddressMap::put(const Region& region) {
    if (!region.bytes)
        return;
    std::lock_guard<std::mutex> lock(mutex_);
    Ranges& layer = layers_[static_cast<size_t>(facts_of(region.kind).layer)];
    auto at = layer.upper_bound(region.address);
    if (at != layer.begin() && contains(std::prev(at)->second, region.address))
        --at;
    while (at != layer.end() && at->first < region.address + region.bytes)
        at = forget(layer, at);
    layer.emplace_hint(at, region.address, region);
    count(region.kind, 1, region.bytes);
    if (only(region.kind) & kShared) {
        lowest_.store(std::min(lowest_.load(), region.address));
        highest_.store(std::max(highest_.load(), region.address + region.bytes));
    }
}

bool AddressMap::remove(uint64_t address, Kinds kinds, Region* removed) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = kLayers; i-- > 0;) {
        const auto at = layers_[i].find(address);
        if (at == layers_[i].end() || !(kinds & only(at->second.kind)))
            continue;
        if (removed)
            *removed = at->second;
        forget(layers_[i], at);
        return true;
    }
    return false;
}

void AddressMap::remove_all(Kinds kinds) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Ranges& layer : layers_)
        for (auto at = layer.begin(); at != layer.end();)
            at = kinds & only(at->second.kind) ? forget(layer, at) : std::next(at);
}

const Region* AddressMap::find_locked(uint64_t address, Kinds kinds) const {
    for (size_t i = kLayers; i-- > 0;) {
        const auto after = layers_[i].upper_bound(address);
        if (after == layers_[i].begin())
            continue;
        const Region& region = std::prev(after)->second;
        if (contains(region, address) && kinds & only(region.kind))
            return &region;
    }
    return nullptr;
}

bool AddressMap::find(uint64_t address, Kinds kinds, Region* found) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Region* region = find_locked(address, kinds);
    if (region)
        *found = *region;
    return region != nullptr;
}

bool AddressMap::starts_at(uint64_t address, Kinds kinds, Region* found) const {
    Region region;
    const bool starts = find(address, kinds, &region) && region.address == address;
    if (starts && found)
        *found = region;
    return starts;
}

bool AddressMap::in_window(uint64_t address) const {
    Region window;
    return may_be_in_window(address) && find(address, kShared, &window);
}

std::vector<Region> AddressMap::all(Kinds kinds, uint64_t address, uint64_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Region> found;
    for (const Ranges& layer : layers_)
        for (auto at = layer.lower_bound(address); at != layer.end() && at->first - address < bytes;
             ++at)
            if (kinds & only(at->second.kind))
                found.push_back(at->second);
    return found;
}

uint64_t AddressMap::bytes(Kinds kinds) const {
    uint64_t sum = 0;
    for (; kinds; kinds &= kinds - 1)
        sum += bytes_[__builtin_ctz(kinds)].load(std::memory_order_relaxed);
    return sum;
}

} // namespace flowgpu
