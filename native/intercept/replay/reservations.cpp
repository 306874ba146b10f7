#include "reservations.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "proc.h"
#include "recorded.h"
#include "registry.h"
#include "task.h"

namespace flowgpu::replay {

namespace {

constexpr uint64_t kPiece = 32 << 20;
constexpr uint64_t kGranularity = 2 << 20;
// Covers of small reservations, where neither the system nor the driver places anything.
constexpr uint64_t kCovers = 0x1c0000000000, kCoverBytes = 512 << 20, kAllCovers = 2ull << 40;
constexpr Kinds kCover = only(MemoryKind::cover);

// The driver looks for room in gaps of its own ranges before it follows a wish. So what it gives
// elsewhere is held, and it is asked again, until it has no such gap. Else *got is its last choice.
CUresult reserve_at(CUdeviceptr wish, size_t bytes, CUdeviceptr* got) {
    constexpr size_t kMostGaps = 1024;
    std::vector<std::pair<CUdeviceptr, size_t>> held;
    CUresult result = CUDA_SUCCESS;
    for (;;) {
        result = FG_DRIVER(cuMemAddressReserve)(got, bytes, 0, wish, 0);
        if (result != CUDA_SUCCESS || *got == wish || held.size() == kMostGaps)
            break;
        size_t before = bytes; // of the gap, where the wish lies in it
        if (*got < wish && wish < *got + bytes) {
            before = wish - *got;
            FG_DRIVER(cuMemAddressFree)(*got, bytes);
            result = FG_DRIVER(cuMemAddressReserve)(got, before, 0, *got, 0);
            if (result != CUDA_SUCCESS)
                break;
        }
        held.emplace_back(*got, before);
    }
    for (const auto& [address, size] : held)
        FG_DRIVER(cuMemAddressFree)(address, size);
    return result;
}

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
    for (const Region& cover : map.all(kCover, kCovers, kAllCovers))
        wish = std::max(wish, cover.address + cover.bytes);
    CUdeviceptr got = 0;
    if (reserve_at(wish, kCoverBytes, &got) != CUDA_SUCCESS)
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
        CUresult result = reserve_at(address, wish.bytes, &got);
        if (result != CUDA_SUCCESS)
            return fail("reserving device addresses", result);
        if (got != address) {
            FG_DRIVER(cuMemAddressFree)(got, wish.bytes);
            char what[256];
            int length =
                snprintf(what, sizeof what,
                         "%zu KiB of device addresses at %#llx could not be had again but at %#llx",
                         wish.bytes >> 10, static_cast<unsigned long long>(address),
                         static_cast<unsigned long long>(got));
            proc::each_mapping([&](const proc::Mapping& one) {
                if (one.start < address + wish.bytes && address < one.end && length >= 0 &&
                    static_cast<size_t>(length) < sizeof what)
                    length += snprintf(what + length, sizeof what - static_cast<size_t>(length),
                                       "; %#lx to %#lx is mapped %s %s", one.start, one.end,
                                       one.mode, one.name);
            });
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
