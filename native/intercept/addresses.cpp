#include "addresses.h"

#include <atomic>

#include "gate.h"
#include "task.h"

namespace flowgpu::addresses {

namespace {

constexpr unsigned kGranuleBits = 21;
constexpr uint64_t kGranule = 1ull << kGranuleBits;
// A remembered granule is one word: a version, and the granule's number in 48 bits of address.
constexpr unsigned kNumberBits = 48 - kGranuleBits;

} // namespace

Place place_of(uint64_t address) {
    const AddressMap& map = task().memory.map();
    if (!map.may_be_in_window(address))
        return Place::outside;
    uint64_t granule = address >> kGranuleBits;
    uint64_t word = map.version() << kNumberBits | granule; // before the map is asked
    auto& remembered = gate::find_record()->granules[granule % gate::kGranules];
    if (remembered.load(std::memory_order_relaxed) == word && granule >> kNumberBits == 0)
        return Place::allocated;
    Region found;
    if (!map.find(address, only(MemoryKind::allocation, MemoryKind::window), &found))
        return Place::outside;
    if (found.kind == MemoryKind::window)
        return Place::unused;
    uint64_t start = granule << kGranuleBits;
    if (found.address <= start && start + kGranule <= found.address + found.bytes)
        remembered.store(word, std::memory_order_relaxed);
    return Place::allocated;
}

} // namespace flowgpu::addresses
