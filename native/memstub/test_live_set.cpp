// Property tests of the live set against a map, with a reader beside the writers. Run by ctest;
// prints the seed of a failing sequence.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

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

constexpr uint64_t kSlots = 1ull << FLOWGPU_LIVE_SLOT_BITS;
constexpr uint64_t kWindow = 0x200000000000;
constexpr uint64_t kGranule = 1ull << FLOWGPU_LIVE_GRANULE_BITS;

struct Shared {
    Shared() {
        memory = mmap(nullptr, FLOWGPU_LIVE_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(memory != MAP_FAILED);
        set = new LiveSet(memory);
    }
    ~Shared() {
        delete set;
        munmap(memory, FLOWGPU_LIVE_BYTES);
    }
    const flowgpu_live_header& header() const {
        return *static_cast<const flowgpu_live_header*>(memory);
    }
    // As the coordinator reads: one pass, no lock.
    std::map<uint64_t, uint64_t> blocks() const {
        auto* slots = reinterpret_cast<const flowgpu_live_slot*>(static_cast<char*>(memory) +
                                                                 FLOWGPU_LIVE_SLOTS_AT);
        std::map<uint64_t, uint64_t> found;
        for (uint64_t i = 0; i < kSlots; i++) {
            uint64_t address = __atomic_load_n(&slots[i].address, __ATOMIC_RELAXED);
            if (address > FLOWGPU_LIVE_SLOT_DEAD)
                found[address] = __atomic_load_n(&slots[i].size, __ATOMIC_RELAXED);
        }
        return found;
    }
    bool bit(uint64_t at, uint64_t address) const {
        auto* words = reinterpret_cast<const uint64_t*>(static_cast<char*>(memory) + at);
        uint64_t granule = address >> FLOWGPU_LIVE_GRANULE_BITS;
        return words[granule / 64] >> (granule % 64) & 1;
    }
    bool seen(uint64_t address) const { return bit(FLOWGPU_LIVE_SEEN_AT, address); }
    bool whole(uint64_t address) const { return bit(FLOWGPU_LIVE_WHOLE_AT, address); }

    void* memory;
    LiveSet* set;
};

uint64_t word(uint64_t bytes, unsigned device) {
    return bytes << FLOWGPU_LIVE_DEVICE_BITS | device;
}

void test_against_a_map(unsigned seed, unsigned live, unsigned steps) {
    current_seed = seed;
    std::mt19937_64 random(seed);
    Shared shared;
    std::map<uint64_t, uint64_t> model;
    std::vector<uint64_t> addresses;
    uint64_t events = 0;
    for (unsigned step = 0; step < steps; step++) {
        if (addresses.empty() || (addresses.size() < live && random() % 8 != 0)) {
            uint64_t address = kWindow + (random() % (1ull << 24)) * 512;
            uint64_t bytes = 1 + random() % (8 << 20);
            unsigned device = random() % 80;
            unsigned counted = std::min<unsigned>(device, FLOWGPU_LIVE_NO_DEVICE);
            shared.set->add(address, bytes, device, false);
            if (model.count(address) == 0)
                addresses.push_back(address);
            model[address] = word(bytes, counted);
        } else {
            uint64_t at = random() % addresses.size();
            shared.set->remove(addresses[at]);
            model.erase(addresses[at]);
            addresses[at] = addresses.back();
            addresses.pop_back();
        }
        events++;
        if (step % 4096 == 0)
            shared.set->remove(kWindow + 1); // never given out
    }
    CHECK(shared.blocks() == model);
    CHECK(shared.header().blocks == model.size() && shared.header().events == events);
    std::map<unsigned, uint64_t> sums;
    for (auto [address, size] : model)
        sums[size & 255] += size >> FLOWGPU_LIVE_DEVICE_BITS;
    for (unsigned device = 0; device < FLOWGPU_LIVE_DEVICES; device++)
        CHECK(shared.header().device_bytes[device] == sums[device]);
    CHECK(!shared.header().overflow);
    for (uint64_t address : addresses)
        shared.set->remove(address);
    CHECK(shared.blocks().empty() && shared.header().blocks == 0);
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
            shared.set->remove(address);
        address = kWindow + (random() % (1ull << 28)) * 512;
        shared.set->add(address, 512, 0, false);
    }
    CHECK(!shared.header().overflow);
    CHECK(shared.set->longest_probe() < 64);
}

void test_overflow_is_said(unsigned seed) {
    current_seed = seed;
    std::mt19937_64 random(seed);
    Shared shared;
    uint64_t added = 0;
    for (; !shared.header().overflow && added <= kSlots; added++)
        shared.set->add(kWindow + (random() % (1ull << 28)) * 512, 1, 0, false);
    CHECK(shared.header().overflow);
    CHECK(added > kSlots * 3 / 4);
}

void test_bits() {
    Shared shared;
    shared.set->add(kWindow + 3 * kGranule - 1, 2, 0, false);
    CHECK(!shared.seen(kWindow + kGranule) && shared.seen(kWindow + 2 * kGranule) &&
          shared.seen(kWindow + 3 * kGranule) && !shared.seen(kWindow + 4 * kGranule));
    CHECK(!shared.whole(kWindow + 2 * kGranule));
    shared.set->add(kWindow + 100 * kGranule, 200 * kGranule, 0, true);
    for (uint64_t granule = 0; granule < 400; granule++) {
        bool inside = granule >= 100 && granule < 300;
        CHECK(shared.whole(kWindow + granule * kGranule) == inside);
        CHECK(shared.seen(kWindow + granule * kGranule) ==
              (inside || granule == 2 || granule == 3));
    }
    // A block that is taken back leaves its bits: what it had may be given out again.
    shared.set->remove(kWindow + 100 * kGranule);
    CHECK(shared.seen(kWindow + 200 * kGranule));
    shared.set->forget(kWindow + 150 * kGranule, 10 * kGranule + 1);
    for (uint64_t granule = 100; granule < 300; granule++) {
        bool kept = granule < 150 || granule > 160;
        CHECK(shared.seen(kWindow + granule * kGranule) == kept);
        CHECK(shared.whole(kWindow + granule * kGranule) == kept);
    }
    // Addresses that no bitmap reaches change nothing; those at its end do.
    uint64_t end = 1ull << FLOWGPU_LIVE_ADDRESS_BITS;
    shared.set->add(end, 1, 0, true);
    shared.set->add(end - 512, 4096, 0, true);
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
            shared.set->add(address, address % 4099 + 1, 1, false);
    }
    std::atomic<bool> stop{false};
    std::vector<std::thread> writers;
    for (unsigned thread = 0; thread < 2; thread++)
        writers.emplace_back([&shared, &stop, thread] {
            std::mt19937_64 own(thread);
            std::vector<uint64_t> mine(5'000);
            while (!stop.load()) {
                uint64_t& address = mine[own() % mine.size()];
                if (address)
                    shared.set->remove(address);
                // Odd multiples of 512, each thread in an area of its own.
                address =
                    kWindow + ((own() % (1ull << 20)) * 2 + 1 + (uint64_t{thread} << 22)) * 512;
                shared.set->add(address, 77, 2 + thread, false);
            }
            for (uint64_t address : mine)
                if (address)
                    shared.set->remove(address);
        });
    for (unsigned pass = 0; pass < 50; pass++) {
        auto found = shared.blocks();
        for (uint64_t address : kept) {
            auto it = found.find(address);
            CHECK(it != found.end() && it->second == word(address % 4099 + 1, 1));
        }
    }
    stop.store(true);
    for (auto& writer : writers)
        writer.join();
    CHECK(shared.header().blocks == kept.size() && shared.blocks().size() == kept.size());
    CHECK(!shared.header().device_bytes[2] && !shared.header().device_bytes[3]);
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 4; seed++)
        test_against_a_map(seed, 200 * seed * seed * seed, 200'000);
    test_probes_stay_short(1);
    test_overflow_is_said(1);
    test_bits();
    test_a_reader_never_misses_a_block();
    return 0;
}
