#include "addresses.h"

#include <algorithm>
#include <atomic>

#include "gate.h"
#include "task.h"

namespace flowgpu::addresses {

namespace {

constexpr unsigned kGranuleBits = 21;
constexpr uint64_t kGranule = 1ull << kGranuleBits;
// A remembered granule is one word: a version, and the granule's number in 48 bits of address.
constexpr unsigned kNumberBits = 48 - kGranuleBits;

std::atomic<uint64_t> version{1};
// No window that has memory reaches outside these: what is neither needs no lock to be known.
std::atomic<uint64_t> lowest{~uint64_t{0}}, highest{0};

} // namespace

Place place_of(uint64_t address) {
    if (address < lowest.load(std::memory_order_relaxed) ||
        address >= highest.load(std::memory_order_relaxed))
        return Place::outside;
    uint64_t granule = address >> kGranuleBits;
    uint64_t now = version.load(std::memory_order_acquire); // before the tables are asked
    uint64_t word = now << kNumberBits | granule;
    auto& remembered = gate::find_record()->granules[granule % gate::kGranules];
    if (remembered.load(std::memory_order_relaxed) == word && granule >> kNumberBits == 0)
        return Place::allocated;
    const Memory& memory = task().memory;
    Allocation found;
    if (!memory.find(address, &found))
        return memory.in_window(address) ? Place::unused : Place::outside;
    uint64_t start = granule << kGranuleBits;
    if (found.address <= start && start + kGranule <= found.address + found.bytes)
        remembered.store(word, std::memory_order_relaxed);
    return Place::allocated;
}

void given(uint64_t address, uint64_t bytes) {
    uint64_t start = address - std::min(address, kWindowBytes);
    uint64_t end = address + bytes + kWindowBytes;
    uint64_t before = lowest.load(std::memory_order_relaxed);
    while (start < before && !lowest.compare_exchange_weak(before, start)) {
    }
    before = highest.load(std::memory_order_relaxed);
    while (end > before && !highest.compare_exchange_weak(before, end)) {
    }
}

void taken() {
    version.fetch_add(1, std::memory_order_release);
}

} // namespace flowgpu::addresses
