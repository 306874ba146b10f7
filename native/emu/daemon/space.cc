#include "space.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

using Ranges = std::map<uint64_t, uint64_t>;

bool overlaps(const Ranges& ranges, uint64_t begin, uint64_t end) {
    const auto next = ranges.lower_bound(begin);
    if (next != ranges.end() && next->first < end) {
        return true;
    }
    return next != ranges.begin() && std::prev(next)->second > begin;
}

bool contains(const Ranges& ranges, uint64_t address) {
    const auto next = ranges.upper_bound(address);
    return next != ranges.begin() && std::prev(next)->second > address;
}

} // namespace

const Mapping* View::find(uint64_t address) const {
    auto next = std::upper_bound(maps.begin(), maps.end(), address,
                                 [](uint64_t a, const Mapping& m) { return a < m.begin; });
    if (next == maps.begin()) {
        return nullptr;
    }
    --next;
    return address < next->end ? &*next : nullptr;
}

bool View::resolve(uint64_t address, uint64_t size, uint32_t device_bit, bool write,
                   std::vector<Segment>* out) const {
    bool first = true;
    while (size > 0) {
        const Mapping* map = find(address);
        if (map == nullptr || ((write ? map->writers : map->readers) & device_bit) == 0 ||
            (!first && map->kind != MapKind::kVmm)) {
            return false;
        }
        const uint64_t here = std::min(size, map->end - address);
        if (here < size && map->kind != MapKind::kVmm) {
            return false;
        }
        out->push_back({map->host() + (address - map->begin), here});
        address += here;
        size -= here;
        first = false;
    }
    return true;
}

void Space::add_internal(uint64_t begin, uint64_t size) {
    internal_all[begin] = begin + size;
    give_internal(begin, size);
}

uint64_t Space::take_internal(uint64_t size) {
    for (auto range = internal_free.begin(); range != internal_free.end(); ++range) {
        const uint64_t begin = range->first;
        const uint64_t end = range->second;
        if (end - begin >= size) {
            internal_free.erase(range);
            if (end - begin > size) {
                internal_free[begin + size] = end;
            }
            return begin;
        }
    }
    return 0;
}

void Space::give_internal(uint64_t begin, uint64_t size) {
    auto at = internal_free.emplace(begin, begin + size).first;
    const auto next = std::next(at);
    if (next != internal_free.end() && next->first == at->second) {
        at->second = next->second;
        internal_free.erase(next);
    }
    if (at != internal_free.begin() && std::prev(at)->second == at->first) {
        std::prev(at)->second = at->second;
        internal_free.erase(at);
    }
}

bool Space::reserve(uint64_t begin, uint64_t size) {
    if (overlaps(reservations, begin, begin + size)) {
        return false;
    }
    reservations[begin] = begin + size;
    return true;
}

CUresult Space::unreserve(uint64_t begin, uint64_t size) {
    const auto found = reservations.find(begin);
    if (found == reservations.end() || found->second != begin + size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (any(begin, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    reservations.erase(found);
    return CUDA_SUCCESS;
}

bool Space::inside_reservation(uint64_t begin, uint64_t size) const {
    const auto around = reservation_from(begin);
    return around != reservations.end() && around->second >= begin + size && begin + size > begin;
}

std::map<uint64_t, uint64_t>::const_iterator Space::reservation_from(uint64_t address) const {
    const auto next = reservations.upper_bound(address);
    return next == reservations.begin() ? reservations.end() : std::prev(next);
}

bool Space::any(uint64_t begin, uint64_t size) const {
    const auto next = maps.lower_bound(begin);
    return (next != maps.end() && next->first < begin + size) ||
           (next != maps.begin() && std::prev(next)->second.end > begin);
}

bool Space::map(Mapping mapping) {
    if (any(mapping.begin, mapping.end - mapping.begin)) {
        return false;
    }
    maps.emplace(mapping.begin, std::move(mapping));
    changed();
    return true;
}

void Space::unmap(uint64_t begin) {
    maps.erase(begin);
    changed();
}

const Mapping* Space::at(uint64_t address) const {
    const auto next = maps.upper_bound(address);
    if (next == maps.begin()) {
        return nullptr;
    }
    const Mapping& map = std::prev(next)->second;
    return address < map.end ? &map : nullptr;
}

bool Space::is_device_address(uint64_t address) const {
    return contains(reservations, address) || contains(internal_all, address);
}

bool Space::is_managed(uint64_t address) const {
    const Mapping* map = at(address);
    return map != nullptr && map->kind == MapKind::kManaged;
}

std::vector<Mapping*> Space::exactly(uint64_t begin, uint64_t size) {
    std::vector<Mapping*> found;
    uint64_t at = begin;
    for (auto next = maps.find(begin); next != maps.end() && at < begin + size; ++next) {
        if (next->first != at || next->second.kind != MapKind::kVmm) {
            return {};
        }
        found.push_back(&next->second);
        at = next->second.end;
    }
    return at == begin + size ? found : std::vector<Mapping*>();
}

std::vector<Mapping*> Space::all() {
    std::vector<Mapping*> out;
    for (auto& [begin, map] : maps) {
        out.push_back(&map);
    }
    return out;
}

// The old picture goes at once: what was freed must not be counted until the next one is taken.
void Space::changed() {
    std::lock_guard<std::mutex> lock(view_mutex_);
    generation_.fetch_add(1, std::memory_order_acq_rel);
    view_ = std::make_shared<View>();
}

std::shared_ptr<const View> Space::view() {
    std::lock_guard<std::mutex> lock(view_mutex_);
    const uint64_t now = generation();
    if (view_->generation != now) {
        auto fresh = std::make_shared<View>();
        fresh->generation = now;
        fresh->maps.reserve(maps.size());
        for (const auto& [begin, map] : maps) {
            fresh->maps.push_back(map);
        }
        view_ = std::move(fresh);
    }
    return view_;
}

bool KernelMemory::find(uint64_t address, Range* range) {
    if (views_.empty() || views_.back()->generation != space_->generation()) {
        std::lock_guard<std::mutex> lock(*guard_);
        views_.push_back(space_->view());
    }
    const Mapping* map = views_.back()->find(address);
    if (map == nullptr || (map->readers & bit_) == 0) {
        return false;
    }
    *range = {map->begin, map->end, map->host(), (map->writers & bit_) != 0};
    return true;
}

} // namespace flowgpu::emu
