#include "live_set.h"

#include <algorithm>

#include <sched.h>

namespace flowgpu::memstub {

namespace {

constexpr uint64_t kSlots = 1ull << FLOWGPU_LIVE_SLOT_BITS;
constexpr uint64_t kMask = kSlots - 1;
constexpr uint64_t kNone = ~0ull;
// A block that is further from its home than this finds no slot: an event must stay cheap. Reached
// only when four fifths of the slots are taken.
constexpr uint64_t kLongestProbe = 256;
constexpr unsigned kSpins = 64;
constexpr auto kRelaxed = std::memory_order_relaxed;

uint64_t home_of(uint64_t address) {
    // Blocks are aligned to 64 bytes at least; Knuth's multiplicative hash spreads the rest.
    return (address >> 6) * 0x9e3779b97f4a7c15ull >> (64 - FLOWGPU_LIVE_SLOT_BITS);
}

template <typename T> void store(T* to, T value) {
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
}

// Calls action(word, bits) for each word of a bitmap that [address, address + bytes) has bits in.
template <typename Action>
void for_each_word(uint64_t address, uint64_t bytes, const Action& action) {
    constexpr uint64_t kEnd = 1ull << FLOWGPU_LIVE_ADDRESS_BITS;
    if (!bytes || address >= kEnd)
        return;
    uint64_t first = address >> FLOWGPU_LIVE_GRANULE_BITS;
    uint64_t last = (address + std::min(bytes, kEnd - address) - 1) >> FLOWGPU_LIVE_GRANULE_BITS;
    for (uint64_t word = first / 64; word <= last / 64; word++) {
        uint64_t from = word == first / 64 ? first % 64 : 0;
        uint64_t to = word == last / 64 ? last % 64 : 63;
        action(word, (~0ull >> (63 - (to - from))) << from);
    }
}

} // namespace

LiveSet::Lock::Lock(std::atomic<bool>& word) : word_(word) {
    unsigned spins = 0;
    while (word_.exchange(true, std::memory_order_acquire)) {
        while (word_.load(kRelaxed))
            if (++spins % kSpins == 0)
                sched_yield(); // the holder may want this core
    }
}

LiveSet::LiveSet(void* memory)
    : header_(static_cast<flowgpu_live_header*>(memory)),
      slots_(reinterpret_cast<Slot*>(static_cast<char*>(memory) + FLOWGPU_LIVE_SLOTS_AT)),
      seen_(reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(memory) +
                                                     FLOWGPU_LIVE_SEEN_AT)),
      whole_(reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(memory) +
                                                      FLOWGPU_LIVE_WHOLE_AT)) {
    header_->version = FLOWGPU_LIVE_VERSION;
    header_->magic = FLOWGPU_LIVE_MAGIC;
}

uint64_t LiveSet::find(uint64_t address, uint64_t* free) {
    *free = kNone;
    uint64_t home = home_of(address);
    for (uint64_t step = 0; step < kLongestProbe; step++) {
        uint64_t index = (home + step) & kMask;
        uint64_t there = slots_[index].address.load(kRelaxed);
        if (there == address)
            return index;
        if (there == 0) {
            if (*free == kNone)
                *free = index;
            return kNone;
        }
        if (there == FLOWGPU_LIVE_SLOT_DEAD && *free == kNone)
            *free = index;
        longest_probe_ = std::max(longest_probe_, step + 1);
    }
    return kNone;
}

void LiveSet::count(uint64_t size, bool added) {
    uint64_t device = size & ((1u << FLOWGPU_LIVE_DEVICE_BITS) - 1);
    uint64_t bytes = size >> FLOWGPU_LIVE_DEVICE_BITS;
    uint64_t* sum = &header_->device_bytes[device];
    store(sum, added ? *sum + bytes : *sum - bytes);
    store(&header_->blocks, added ? header_->blocks + 1 : header_->blocks - 1);
}

void LiveSet::add(uint64_t address, uint64_t bytes, unsigned device, bool capturing) {
    uint64_t size =
        bytes << FLOWGPU_LIVE_DEVICE_BITS | std::min<unsigned>(device, FLOWGPU_LIVE_NO_DEVICE);
    Lock lock(lock_);
    if (header_->overflow)
        return;
    uint64_t free = kNone;
    uint64_t index = find(address, &free);
    if (index != kNone) {
        count(slots_[index].size.load(kRelaxed), false);
        slots_[index].size.store(size, kRelaxed);
    } else if (free != kNone) {
        slots_[free].size.store(size, kRelaxed);
        slots_[free].address.store(address, std::memory_order_release);
    } else {
        store(&header_->overflow, 1u);
        return;
    }
    count(size, true);
    store(&header_->events, header_->events + 1);
    auto mark = [](std::atomic<uint64_t>* map) {
        return [map](uint64_t word, uint64_t bits) {
            uint64_t before = map[word].load(kRelaxed);
            if ((before & bits) != bits)
                map[word].store(before | bits, kRelaxed);
        };
    };
    for_each_word(address, bytes, mark(seen_));
    if (capturing)
        for_each_word(address, bytes, mark(whole_));
}

void LiveSet::remove(uint64_t address) {
    Lock lock(lock_);
    if (header_->overflow)
        return;
    uint64_t free = kNone;
    uint64_t index = find(address, &free);
    if (index == kNone)
        return;
    count(slots_[index].size.load(kRelaxed), false);
    store(&header_->events, header_->events + 1);
    // A dead slot keeps the probes of others going over it. At the end of a cluster none does, so
    // there it becomes empty, with the dead ones before it: clusters stay as short as the live
    // blocks make them.
    if (slots_[(index + 1) & kMask].address.load(kRelaxed) != 0) {
        slots_[index].address.store(FLOWGPU_LIVE_SLOT_DEAD, kRelaxed);
        return;
    }
    do {
        slots_[index].address.store(0, kRelaxed);
        index = (index - 1) & kMask;
    } while (slots_[index].address.load(kRelaxed) == FLOWGPU_LIVE_SLOT_DEAD);
}

void LiveSet::forget(uint64_t address, uint64_t bytes) {
    Lock lock(lock_);
    for_each_word(address, bytes, [this](uint64_t word, uint64_t bits) {
        for (auto* map : {seen_, whole_}) {
            uint64_t before = map[word].load(kRelaxed);
            if (before & bits)
                map[word].store(before & ~bits, kRelaxed);
        }
    });
}

} // namespace flowgpu::memstub
