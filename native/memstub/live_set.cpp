#include "live_set.h"

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
constexpr uint64_t kAhead = 32; // events
constexpr uint64_t kDevice = (1u << FLOWGPU_LIVE_DEVICE_BITS) - 1;
constexpr auto kRelaxed = std::memory_order_relaxed;

uint64_t home_of(uint64_t address) {
    // Blocks are aligned to 64 bytes at least; Knuth's multiplicative hash spreads the rest.
    return (address >> 6) * 0x9e3779b97f4a7c15ull >> (64 - FLOWGPU_LIVE_SLOT_BITS);
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

void LiveSet::Lock::wait(uint32_t* word) {
    unsigned spins = 0;
    do {
        while (__atomic_load_n(word, __ATOMIC_RELAXED))
            if (++spins % kSpins == 0)
                sched_yield(); // the holder may want this core
    } while (__atomic_exchange_n(word, 1u, __ATOMIC_ACQUIRE));
}

void LiveSet::open(void* memory) {
    header_.pointers[kMemory] = as_word(memory);
    header_.version = FLOWGPU_LIVE_VERSION;
    __atomic_store_n(&header_.magic, uint32_t{FLOWGPU_LIVE_MAGIC}, __ATOMIC_RELEASE);
}

uint64_t LiveSet::find(uint64_t address, uint64_t* free) {
    *free = kNone;
    uint64_t home = home_of(address);
    for (uint64_t step = 0; step < kLongestProbe; step++) {
        uint64_t index = (home + step) & kMask;
        uint64_t there = slots()[index].address.load(kRelaxed);
        if (there == 0) {
            if (*free == kNone)
                *free = index;
            return kNone;
        }
        if (there == address)
            return index;
        if (there == FLOWGPU_LIVE_SLOT_DEAD && *free == kNone)
            *free = index;
        longest_probe_ = std::max(longest_probe_, step + 1);
    }
    return kNone;
}

void LiveSet::apply_add(uint64_t address, uint64_t word) {
    uint64_t bytes = word >> FLOWGPU_LIVE_EVENT_BITS;
    uint64_t size = bytes << FLOWGPU_LIVE_DEVICE_BITS | (word & kDevice);
    uint64_t free = kNone;
    uint64_t index = find(address, &free);
    if (index != kNone) {
        uint64_t ended = slots()[index].size.load(kRelaxed);
        count(ended & kDevice, -static_cast<int64_t>(ended >> FLOWGPU_LIVE_DEVICE_BITS));
        slots()[index].size.store(size, kRelaxed);
    } else if (free != kNone) {
        slots()[free].size.store(size, kRelaxed);
        slots()[free].address.store(address, std::memory_order_release);
    } else {
        store(&header_.overflow, 1u);
        return;
    }
    auto mark = [](Words map) {
        return [map](uint64_t word, uint64_t bits) {
            uint64_t before = map[word].load(kRelaxed);
            if ((before & bits) != bits)
                map[word].store(before | bits, kRelaxed);
        };
    };
    for_each_word(address, bytes, mark(at<std::atomic<uint64_t>>(FLOWGPU_LIVE_SEEN_AT)));
    if (word & FLOWGPU_LIVE_EVENT_CAPTURING)
        for_each_word(address, bytes, mark(at<std::atomic<uint64_t>>(FLOWGPU_LIVE_WHOLE_AT)));
}

void LiveSet::apply_remove(uint64_t address, uint64_t word) {
    uint64_t free = kNone;
    uint64_t index = find(address, &free);
    uint64_t size = index == kNone ? 0 : slots()[index].size.load(kRelaxed);
    uint64_t bytes = word >> FLOWGPU_LIVE_EVENT_BITS;
    if (size != (bytes << FLOWGPU_LIVE_DEVICE_BITS | (word & kDevice))) {
        count(word & kDevice, static_cast<int64_t>(bytes));
        count(size & kDevice, -static_cast<int64_t>(size >> FLOWGPU_LIVE_DEVICE_BITS));
    }
    if (index == kNone)
        return;
    // A dead slot keeps the probes of others going over it. At the end of a cluster none does, so
    // there it becomes empty, with the dead ones before it: clusters stay as short as the live
    // blocks make them.
    if (slots()[(index + 1) & kMask].address.load(kRelaxed) != 0) {
        slots()[index].address.store(FLOWGPU_LIVE_SLOT_DEAD, kRelaxed);
        return;
    }
    do {
        slots()[index].address.store(0, kRelaxed);
        index = (index - 1) & kMask;
    } while (slots()[index].address.load(kRelaxed) == FLOWGPU_LIVE_SLOT_DEAD);
}

void LiveSet::apply() {
    // A core waits for many lines in the time of one: those of the slots that soon will be needed
    // are asked for ahead, with their neighbours, which are looked at where a cluster ends.
    auto ask = [this](uint64_t number) {
        uint64_t home = home_of(event(number)->address);
        __builtin_prefetch(&slots()[(home - 1) & kMask], 1);
        __builtin_prefetch(&slots()[(home + 1) & kMask], 1);
    };
    uint64_t from = header_.applied;
    for (uint64_t number = from; number < std::min(from + kAhead, header_.logged); number++)
        ask(number);
    for (uint64_t number = from; number < header_.logged && !header_.overflow; number++) {
        ask(number + kAhead); // at the end older ones, which does no harm
        uint64_t address = event(number)->address, word = event(number)->word;
        if (word & FLOWGPU_LIVE_EVENT_FREED)
            apply_remove(address, word);
        else
            apply_add(address, word);
    }
    __atomic_store_n(&header_.applied, header_.logged, __ATOMIC_RELEASE);
    // The next event writes over the log only after this.
    std::atomic_thread_fence(std::memory_order_release);
}

void LiveSet::remove(uint64_t address) {
    Lock lock(&header_.writing);
    log(address, FLOWGPU_LIVE_NO_DEVICE | FLOWGPU_LIVE_EVENT_FREED, FLOWGPU_LIVE_NO_DEVICE, 0);
    apply();
}

void LiveSet::forget(uint64_t address, uint64_t bytes) {
    Lock lock(&header_.writing);
    apply();
    for_each_word(address, bytes, [this](uint64_t word, uint64_t bits) {
        for (uint64_t offset : {FLOWGPU_LIVE_SEEN_AT, FLOWGPU_LIVE_WHOLE_AT}) {
            Words map = at<std::atomic<uint64_t>>(offset);
            uint64_t before = map[word].load(kRelaxed);
            if (before & bits)
                map[word].store(before & ~bits, kRelaxed);
        }
    });
}

} // namespace flowgpu::memstub
