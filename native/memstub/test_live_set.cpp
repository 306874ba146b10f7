// Property tests of the live set against a map, with a reader beside the writers. Run by ctest;
// prints the seed of a failing sequence.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/mman.h>

#include "live_set.h"

namespace {

using flowgpu::memstub::LiveSet;

unsigned current_seed = 0;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: seed %u: %s\n", __FILE__, __LINE__, current_seed, #condition); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

constexpr uint64_t kLog = FLOWGPU_LIVE_LOG_EVENTS;
constexpr uint64_t kSlots = 1ull << FLOWGPU_LIVE_SLOT_BITS;
constexpr uint64_t kWindow = 0x200000000000;
// A writer lets others run so often: one that has a core to itself keeps the lock from the rest.
constexpr unsigned kTurns = 64;
constexpr uint64_t kGranule = 1ull << FLOWGPU_LIVE_GRANULE_BITS;

struct Shared {
    Shared() {
        memory = mmap(nullptr, FLOWGPU_LIVE_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(memory != MAP_FAILED);
        set = new (memory) LiveSet;
        set->open(memory);
    }
    ~Shared() { munmap(memory, FLOWGPU_LIVE_BYTES); }
    const flowgpu_live_header& header() const {
        return *static_cast<const flowgpu_live_header*>(memory);
    }
    // The events that the slots and the bitmaps may not have yet: live.h, step 1.
    std::vector<flowgpu_live_event> log() const {
        uint64_t logged = __atomic_load_n(&header().logged, __ATOMIC_ACQUIRE);
        auto* places = reinterpret_cast<const flowgpu_live_event*>(static_cast<char*>(memory) +
                                                                   FLOWGPU_LIVE_LOG_AT);
        flowgpu_live_event read[kLog];
        for (uint64_t i = 0; i < kLog; i++) {
            read[i].address = __atomic_load_n(&places[i].address, __ATOMIC_RELAXED);
            read[i].word = __atomic_load_n(&places[i].word, __ATOMIC_RELAXED);
        }
        std::atomic_thread_fence(std::memory_order_acquire);
        std::vector<flowgpu_live_event> found;
        for (uint64_t n = __atomic_load_n(&header().applied, __ATOMIC_ACQUIRE); n < logged; n++)
            found.push_back(read[n % kLog]);
        CHECK(found.size() <= kLog);
        return found;
    }
    // As the coordinator reads, without a lock; of the blocks that are not in the log those of the
    // first slots.
    std::map<uint64_t, uint64_t> blocks(uint64_t slots_read = kSlots) const {
        auto events = log();
        auto* slots = reinterpret_cast<const flowgpu_live_slot*>(static_cast<char*>(memory) +
                                                                 FLOWGPU_LIVE_SLOTS_AT);
        std::map<uint64_t, uint64_t> found;
        for (uint64_t i = 0; i < slots_read; i++) {
            uint64_t address = __atomic_load_n(&slots[i].address, __ATOMIC_RELAXED);
            if (address > FLOWGPU_LIVE_SLOT_DEAD)
                found[address] = __atomic_load_n(&slots[i].size, __ATOMIC_RELAXED);
        }
        for (auto [address, word] : events) {
            if (word & FLOWGPU_LIVE_EVENT_FREED)
                found.erase(address);
            else
                found[address] =
                    word >> FLOWGPU_LIVE_EVENT_BITS << FLOWGPU_LIVE_DEVICE_BITS | (word & 255);
        }
        return found;
    }
    int64_t live_bytes() const {
        int64_t sum = 0;
        for (int64_t bytes : header().device_bytes)
            sum += bytes;
        return sum;
    }
    bool bit(uint64_t at, uint64_t address) const {
        auto* words = reinterpret_cast<const uint64_t*>(static_cast<char*>(memory) + at);
        uint64_t granule = address >> FLOWGPU_LIVE_GRANULE_BITS;
        return words[granule / 64] >> (granule % 64) & 1;
    }
    bool seen(uint64_t address) const {
        return bit(FLOWGPU_LIVE_SEEN_AT, address) || logged(address, 0);
    }
    bool whole(uint64_t address) const {
        return bit(FLOWGPU_LIVE_WHOLE_AT, address) || logged(address, FLOWGPU_LIVE_EVENT_CAPTURING);
    }
    // True if applying the log will set a bit for the granule.
    bool logged(uint64_t address, uint64_t what) const {
        uint64_t granule = address >> FLOWGPU_LIVE_GRANULE_BITS;
        for (auto [start, word] : log()) {
            uint64_t last = start + (word >> FLOWGPU_LIVE_EVENT_BITS) - 1;
            if (!(word & FLOWGPU_LIVE_EVENT_FREED) && (word & what) == what &&
                start >> FLOWGPU_LIVE_GRANULE_BITS <= granule &&
                granule <= last >> FLOWGPU_LIVE_GRANULE_BITS)
                return true;
        }
        return false;
    }

    void* memory;
    LiveSet* set;
};

uint64_t word(uint64_t bytes, unsigned device) {
    return bytes << FLOWGPU_LIVE_DEVICE_BITS | device;
}

// Each way in which an allocator ends a block, with looks at any place of the log.
void test_against_a_map(unsigned seed, unsigned live, unsigned steps) {
    current_seed = seed;
    std::mt19937_64 random(seed);
    Shared shared;
    std::map<uint64_t, uint64_t> model;
    std::vector<uint64_t> addresses;
    auto bytes_of = [&](uint64_t address) { return model[address] >> FLOWGPU_LIVE_DEVICE_BITS; };
    for (unsigned step = 0; step < steps; step++) {
        if (addresses.empty() || (addresses.size() < live && random() % 8 != 0)) {
            uint64_t address = kWindow + (random() % (1ull << 24)) * 512;
            uint64_t bytes = 1 + random() % (8 << 20);
            unsigned device = random() % 80;
            unsigned counted = std::min<unsigned>(device, FLOWGPU_LIVE_NO_DEVICE);
            if (model.count(address) == 0) // else its block has ended without a word
                addresses.push_back(address);
            shared.set->add(address, bytes, device);
            model[address] = word(bytes, counted);
        } else {
            uint64_t index = random() % addresses.size();
            uint64_t address = addresses[index];
            if (random() % 256 == 0)
                shared.set->remove(address);
            else
                shared.set->remove(address, bytes_of(address), model[address] & 255);
            model.erase(address);
            addresses[index] = addresses.back();
            addresses.pop_back();
        }
        if (step % (steps / 16 + 1) != 0)
            continue;
        CHECK(shared.blocks() == model);
        shared.set->remove(kWindow + 1); // never given out, and what was odd is made up for
        CHECK(shared.blocks() == model);
        std::map<unsigned, int64_t> sums;
        for (auto [address, size] : model)
            sums[size & 255] += static_cast<int64_t>(size >> FLOWGPU_LIVE_DEVICE_BITS);
        for (unsigned device = 0; device < FLOWGPU_LIVE_DEVICES; device++)
            CHECK(shared.header().device_bytes[device] == sums[device]);
    }
    CHECK(shared.blocks() == model && !shared.header().overflow);
    for (uint64_t address : addresses)
        shared.set->remove(address, bytes_of(address), model[address] & 255);
    CHECK(shared.blocks().empty() && shared.live_bytes() == 0);
}

// What allocators do without a word changes the blocks at once, and the sums when it is applied.
void test_odd_events_are_made_up_for() {
    Shared shared;
    shared.set->add(kWindow, 4096, 1);
    shared.set->add(kWindow, 512, 2);          // the first has ended
    shared.set->remove(kWindow + 512, 100, 3); // never given out
    shared.set->add(kWindow + 1024, 64, 1);    // taken back with other bytes
    shared.set->remove(kWindow + 1024, 60, 4); // and from another device
    shared.set->remove(kWindow + 2048);        // applies the log
    std::map<uint64_t, uint64_t> expected = {{kWindow, word(512, 2)}};
    CHECK(shared.blocks() == expected && shared.log().empty());
    for (unsigned device = 0; device < FLOWGPU_LIVE_DEVICES; device++)
        CHECK(shared.header().device_bytes[device] == (device == 2 ? 512 : 0));
    // The same with a reader that has only the log.
    shared.set->add(kWindow, 77, 5);
    shared.set->remove(kWindow + 512, 100, 3);
    shared.set->remove(kWindow, 77, 5);
    shared.set->add(kWindow + 4096, 1, 0);
    CHECK(shared.log().size() == 4);
    expected = {{kWindow + 4096, word(1, 0)}};
    CHECK(shared.blocks() == expected);
    CHECK(shared.header().logged == 10 && shared.header().applied == 6);
}

// The log holds an event until the table has it, wherever the writer stands.
void test_the_log_is_applied_when_full() {
    Shared shared;
    for (uint64_t n = 0; n < 5 * kLog; n++) {
        if (n % 131 == 0 || (n + 2) % kLog < 4) { // a look takes a millisecond
            CHECK(shared.log().size() == n % kLog && shared.blocks().size() == n);
            CHECK(shared.live_bytes() == static_cast<int64_t>(n * 512));
        }
        shared.set->add(kWindow + n * 512, 512, 0);
    }
    CHECK(shared.log().empty() && shared.blocks().size() == 5 * kLog);
}

// New addresses all the time, as programs with shapes that change have them: dead slots must not
// pile up.
void test_probes_stay_short(unsigned seed) {
    current_seed = seed;
    std::mt19937_64 random(seed);
    Shared shared;
    std::vector<uint64_t> addresses(50'000);
    for (unsigned step = 0; step < 4'000'000; step++) {
        uint64_t& address = addresses[random() % addresses.size()];
        if (address)
            shared.set->remove(address, 512, 0);
        address = kWindow + (random() % (1ull << 28)) * 512;
        shared.set->add(address, 512, 0);
    }
    CHECK(!shared.header().overflow);
    CHECK(shared.set->longest_probe() > 0 && shared.set->longest_probe() < 64);
}

void test_overflow_is_said(unsigned seed) {
    current_seed = seed;
    std::mt19937_64 random(seed);
    Shared shared;
    uint64_t added = 0;
    for (; !shared.header().overflow && added <= kSlots; added++)
        shared.set->add(kWindow + (random() % (1ull << 28)) * 512, 1, 0);
    CHECK(shared.header().overflow);
    CHECK(added > kSlots * 3 / 4);
}

void test_bits() {
    Shared shared;
    shared.set->add(kWindow + 3 * kGranule - 1, 2, 0);
    CHECK(!shared.seen(kWindow + kGranule) && shared.seen(kWindow + 2 * kGranule) &&
          shared.seen(kWindow + 3 * kGranule) && !shared.seen(kWindow + 4 * kGranule));
    CHECK(!shared.whole(kWindow + 2 * kGranule));
    shared.set->set_capturing(true);
    shared.set->add(kWindow + 100 * kGranule, 200 * kGranule, 0);
    for (uint64_t granule = 0; granule < 400; granule++) {
        bool inside = granule >= 100 && granule < 300;
        CHECK(shared.whole(kWindow + granule * kGranule) == inside);
        CHECK(shared.seen(kWindow + granule * kGranule) ==
              (inside || granule == 2 || granule == 3));
    }
    // A block that is taken back leaves its bits: what it had may be given out again.
    shared.set->remove(kWindow + 100 * kGranule, 200 * kGranule, 0);
    CHECK(shared.seen(kWindow + 200 * kGranule) && shared.log().size() == 3);
    // What the log has of memory that comes anew must not set its bits later.
    shared.set->forget(kWindow + 150 * kGranule, 10 * kGranule + 1);
    for (uint64_t granule = 100; granule < 300; granule++) {
        bool kept = granule < 150 || granule > 160;
        CHECK(shared.seen(kWindow + granule * kGranule) == kept);
        CHECK(shared.whole(kWindow + granule * kGranule) == kept);
    }
    shared.set->remove(kWindow + 1); // applies what there is
    CHECK(!shared.seen(kWindow + 155 * kGranule));
    // Addresses that no bitmap reaches change nothing; those at its end do.
    uint64_t end = 1ull << FLOWGPU_LIVE_ADDRESS_BITS;
    shared.set->add(end, 1, 0);
    shared.set->add(end - 512, 4096, 0);
    shared.set->remove(kWindow + 1);
    CHECK(shared.whole(end - 1));
    shared.set->forget(0, ~0ull);
    CHECK(!shared.whole(end - 1) && !shared.seen(kWindow + 2 * kGranule));
}

// Blocks that live throughout are in every pass of a reader, whatever other threads do around them.
void test_a_reader_never_misses_a_block() {
    Shared shared;
    std::set<uint64_t> kept;
    std::mt19937_64 random(7);
    while (kept.size() < 20'000) {
        uint64_t address = kWindow + (random() % (1ull << 22)) * 1024;
        if (kept.insert(address).second)
            shared.set->add(address, address % 4099 + 1, 1);
    }
    std::atomic<bool> stop{false};
    std::vector<std::thread> writers;
    for (unsigned thread = 0; thread < 2; thread++)
        writers.emplace_back([&shared, &stop, thread] {
            std::mt19937_64 own(thread);
            std::vector<uint64_t> mine(5'000);
            for (unsigned turn = 0; !stop.load(); turn++) {
                if (turn % kTurns == 0)
                    sched_yield();
                uint64_t& address = mine[own() % mine.size()];
                if (address)
                    shared.set->remove(address, 77, 2 + thread);
                // Odd multiples of 512, each thread in an area of its own.
                address =
                    kWindow + ((own() % (1ull << 20)) * 2 + 1 + (uint64_t{thread} << 22)) * 512;
                shared.set->add(address, 77, 2 + thread);
            }
            for (uint64_t address : mine)
                if (address)
                    shared.set->remove(address, 77, 2 + thread);
        });
    // Some come and go between two looks, so that the log has them at any of its places.
    auto take_back = [&shared](uint64_t address) {
        shared.set->remove(address, address % 4099 + 1, 1);
    };
    for (unsigned pass = 0; pass < 50; pass++) {
        for (unsigned i = 0; i < 100; i++) {
            uint64_t address = *std::next(kept.begin(), static_cast<long>(random() % kept.size()));
            take_back(address);
            shared.set->add(address, address % 4099 + 1, 1);
        }
        auto found = shared.blocks();
        for (uint64_t address : kept) {
            auto it = found.find(address);
            CHECK(it != found.end() && it->second == word(address % 4099 + 1, 1));
        }
    }
    stop.store(true);
    for (auto& writer : writers)
        writer.join();
    CHECK(shared.blocks().size() == kept.size());
    shared.set->remove(kWindow + 1); // some came again at an address of their own
    CHECK(!shared.header().device_bytes[2] && !shared.header().device_bytes[3]);
}

// The same where a look is so short that the writer is in the middle of applying the log in many.
void test_a_block_is_in_the_log_until_it_is_in_the_table() {
    constexpr uint64_t kFew = 64;
    Shared shared;
    uint64_t address = kWindow;
    for (;; address += 512) { // one of the first slots
        shared.set->add(address, 512, 1);
        shared.set->remove(kWindow + 1);
        if (shared.blocks(kFew / 2).count(address))
            break;
        shared.set->remove(address, 512, 1);
    }
    std::atomic<bool> stop{false};
    std::thread writer([&shared, &stop] {
        for (uint64_t n = 0; !stop.load(); n++) {
            if (n % kTurns == 0)
                sched_yield();
            uint64_t own = kWindow + ((1ull << 30) + n / 2 % 4096) * 512;
            if (n % 2)
                shared.set->remove(own, 512, 2);
            else
                shared.set->add(own, 512, 2);
        }
    });
    for (unsigned pass = 0; pass < 8'000; pass++) {
        shared.set->remove(address, 512, 1);
        shared.set->add(address, 512, 1);
        for (unsigned look = 0; look < 4; look++)
            CHECK(shared.blocks(kFew).count(address));
    }
    stop.store(true);
    writer.join();
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 4; seed++)
        test_against_a_map(seed, 200 * seed * seed * seed, 200'000);
    test_odd_events_are_made_up_for();
    test_the_log_is_applied_when_full();
    test_probes_stay_short(1);
    test_overflow_is_said(1);
    test_bits();
    test_a_reader_never_misses_a_block();
    test_a_block_is_in_the_log_until_it_is_in_the_table();
    return 0;
}
