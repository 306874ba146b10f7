#include "reservations.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>

#include "recorded.h"
#include "registry.h"
#include "task.h"

namespace flowgpu::replay {

namespace {

constexpr uint64_t kPiece = 32 << 20;
constexpr uint64_t kGranularity = 2 << 20;
// Covers of small reservations, where neither the system nor the driver places anything.
constexpr uint64_t kCovers = 0x1c0000000000, kCoverBytes = 512 << 20;
constexpr Kinds kCover = only(MemoryKind::cover);

// The first gap in a cover; 0: there is none.
CUdeviceptr gap_for(size_t size, size_t alignment) {
    const AddressMap& map = address_map();
    auto aligned = [alignment](uint64_t at) {
        return (at + alignment - 1) / alignment * alignment;
    };
    for (const Region& cover : map.all(kCover)) {
        uint64_t at = aligned(cover.address);
        for (const Region& taken : map.all(kReserved, cover.address, cover.bytes)) {
            if (at + size <= taken.address)
                return at;
            at = aligned(taken.address + taken.bytes);
        }
        if (at + size <= cover.address + cover.bytes)
            return at;
    }
    return 0;
}

// A new cover, behind all others if that can be had. False: the driver gives no such addresses.
bool add_cover() {
    AddressMap& map = address_map();
    uint64_t wish = kCovers;
    for (const Region& cover : map.all(kCover, kCovers))
        wish = std::max(wish, cover.address + cover.bytes);
    CUdeviceptr got = 0;
    if (FG_DRIVER(cuMemAddressReserve)(&got, kCoverBytes, 0, wish, 0) != CUDA_SUCCESS)
        return false;
    map.put(Region{got, kCoverBytes, MemoryKind::cover});
    return true;
}

// 0: the driver gives no such addresses.
CUdeviceptr place_in_cover(size_t size, size_t alignment) {
    alignment = std::max<size_t>(alignment, kGranularity);
    const CUdeviceptr at = gap_for(size, alignment);
    return at || !add_cover() ? at : gap_for(size, alignment);
}

// Its own wish is enough: it is large, or lies in a range that the driver has again by itself.
bool is_granted(const rewind::Range& range) {
    return (range.start % kPiece == 0 && range.bytes >= kPiece) || rewind::is_placed(range);
}

} // namespace

Reservations::Reservations() {
    AddressMap& map = address_map();
    std::set<uint64_t> covered;
    for (const Region& cover : map.all(kCover))
        for (const Region& reserved : map.all(kReserved, cover.address, cover.bytes))
            covered.insert(reserved.address);
    map.remove_all(kCover);
    uint64_t begin = 0, end = 0; // of the pieces that the last wish takes
    for (const Region& reserved : map.all(kReserved)) {
        const rewind::Range part = {static_cast<uintptr_t>(reserved.address), reserved.bytes};
        if (!covered.count(reserved.address) && rewind::is_placed(part)) {
            waiting_[part.start] = Wish{part.bytes, {part}};
            continue;
        }
        if (part.start >= end)
            begin = part.start / kPiece * kPiece;
        end = std::max<uint64_t>(end, (part.start + part.bytes + kPiece - 1) / kPiece * kPiece);
        Wish& wish = waiting_[begin];
        wish.bytes = end - begin;
        wish.parts.push_back(part);
    }
    for (auto& [address, wish] : waiting_) {
        const bool one = wish.parts.size() == 1 && !covered.count(wish.parts.front().start);
        if (one && is_granted(wish.parts.front()))
            wish.bytes = wish.parts.front().bytes;
        else
            map.put(Region{address, wish.bytes, MemoryKind::cover});
    }
}

bool Reservations::make(bool at_last, FirstFailure& fail) {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
        const CUdeviceptr address = it->first;
        Wish& wish = it->second;
        wish.parts.erase(std::remove_if(wish.parts.begin(), wish.parts.end(),
                                        [at_last](const rewind::Range& part) {
                                            return rewind::make_way(part, at_last);
                                        }),
                         wish.parts.end());
        if (!wish.parts.empty()) {
            ++it;
            continue;
        }
        CUdeviceptr got = 0;
        CUresult result = FG_DRIVER(cuMemAddressReserve)(&got, wish.bytes, 0, address, 0);
        if (result != CUDA_SUCCESS)
            return fail("reserving device addresses", result);
        if (got != address) {
            FG_DRIVER(cuMemAddressFree)(got, wish.bytes);
            char what[128];
            snprintf(what, sizeof what,
                     "%zu KiB of device addresses at %#llx could not be had again but at %#llx",
                     wish.bytes >> 10, static_cast<unsigned long long>(address),
                     static_cast<unsigned long long>(got));
            return fail(what);
        }
        it = waiting_.erase(it);
    }
    return true;
}

namespace recorded {

CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags) {
    CUresult result = FG_DRIVER(cuMemAddressReserve)(ptr, size, alignment, addr, flags);
    if (result != CUDA_SUCCESS)
        return result;
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (size < kPiece && *ptr != addr && alignment <= kPiece)
        if (const CUdeviceptr at = place_in_cover(size, alignment)) {
            FG_DRIVER(cuMemAddressFree)(*ptr, size);
            *ptr = at;
        }
    address_map().put(Region{*ptr, size, MemoryKind::reservation});
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    std::lock_guard<std::mutex> lock(registry().mutex); // a cover ends with its last reservation
    AddressMap& map = address_map();
    Region reservation; // forgotten until the driver refuses, as another thread may get it at once
    const bool known = map.remove(ptr, only(MemoryKind::reservation), &reservation);
    Region cover = reservation;
    CUresult result = CUDA_SUCCESS;
    if (!known || !map.find(ptr, kCover, &cover))
        result = FG_DRIVER(cuMemAddressFree)(ptr, size);
    else if (size != reservation.bytes || !map.all(only(MemoryKind::mapping), ptr, size).empty())
        result = CUDA_ERROR_INVALID_VALUE; // as the driver says of one that it has alone
    else if (map.all(kReserved, cover.address, cover.bytes).empty() &&
             map.remove(cover.address, kCover))
        result = FG_DRIVER(cuMemAddressFree)(cover.address, cover.bytes);
    if (known && result != CUDA_SUCCESS) {
        if (cover.kind == MemoryKind::cover)
            map.put(cover);
        map.put(reservation);
    }
    return result;
}

} // namespace recorded

} // namespace flowgpu::replay
