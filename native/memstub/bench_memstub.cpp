// Nanoseconds that the stub adds to an event of PyTorch's allocator, how they grow with the live
// blocks and with threads, and what they are when the program has used the caches in between.
//   bench_memstub PATH_OF_THE_STUB     prints one line of JSON
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include <dlfcn.h>

#include "cold.h"

namespace {

struct Device {
    int8_t type;
    int8_t index;
};
using Report = void (*)(void*, int64_t, size_t, size_t, Device);
constexpr uint64_t kWindow = 0x200000000000;
constexpr unsigned kRounds = 40;
constexpr unsigned kEvents = 1 << 16;                // a round
constexpr unsigned kPhaseKib = 256, kStepKib = 8192; // what a program uses between two events

// Each event frees a block of the working set or gives it out again, in an order that no prefetcher
// knows. `thread` keeps working sets apart. The best round counts: others share the machine.
double ns_per_event(Report report, unsigned live, unsigned thread) {
    std::mt19937_64 random(thread);
    Device device = {1, static_cast<int8_t>(thread)};
    std::vector<void*> blocks(live);
    for (unsigned i = 0; i < live; i++) {
        uint64_t offset = (uint64_t{thread} << 36) + (random() % (1ull << 26)) * 512;
        blocks[i] = reinterpret_cast<void*>(kWindow + offset);
        report(blocks[i], 512, 0, 0, device);
    }
    std::vector<uint32_t> order(kEvents / 2);
    for (auto& index : order)
        index = static_cast<uint32_t>(random() % live);
    double best = 1e9;
    for (unsigned round = 0; round < kRounds; round++) {
        auto start = std::chrono::steady_clock::now();
        for (uint32_t index : order) {
            report(blocks[index], -512, 0, 0, device);
            report(blocks[index], 512, 0, 0, device);
        }
        std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
        best = std::min(best, spent.count() / kEvents);
    }
    for (void* block : blocks)
        report(block, -512, 0, 0, device);
    return best;
}

double ns_with_threads(Report report, unsigned threads) {
    std::vector<std::thread> running;
    std::vector<double> results(threads);
    for (unsigned thread = 0; thread < threads; thread++)
        running.emplace_back([&results, report, thread] {
            results[thread] = ns_per_event(report, 4'000, thread + 1);
        });
    for (auto& thread : running)
        thread.join();
    return *std::max_element(results.begin(), results.end());
}

using flowgpu::Cold;

// Gives `passing` blocks out and takes them back.
Cold cold_event(Report report, unsigned kib, unsigned passing) {
    std::minstd_rand random(7);
    std::vector<void*> blocks(passing);
    for (auto& block : blocks)
        block = reinterpret_cast<void*>(kWindow + (random() % (1u << 22)) * 512ull);
    struct Event {
        void* block;
        int64_t bytes;
    };
    return flowgpu::cold_events(
        kib, 2 * passing,
        [&](unsigned event) {
            return event < passing ? Event{blocks[event], 4096}
                                   : Event{blocks[2 * passing - 1 - event], -4096};
        },
        [&](Event event) { report(event.block, event.bytes, 0, 0, Device{1, 0}); });
}

__attribute__((noinline)) void nothing(void*, int64_t, size_t, size_t, Device) {
    asm volatile("");
}

Cold ns_when_cold(Report report, unsigned kib, unsigned passing) {
    Cold all = cold_event(report, kib, passing), clock = cold_event(nothing, kib, passing);
    return {all.median - clock.median, all.mean - clock.mean};
}

} // namespace

int main(int count, char** arguments) {
    void* stub = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    void* symbol =
        stub ? dlsym(stub, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE") : nullptr;
    if (!symbol) {
        fprintf(stderr, "usage: bench_memstub PATH_OF_THE_STUB\n");
        return 2;
    }
    auto report = reinterpret_cast<Report>(symbol);
    double few = ns_per_event(report, 4'000, 0);
    double many = ns_per_event(report, 60'000, 0);
    double two = ns_with_threads(report, 2);
    Cold cold = ns_when_cold(report, kPhaseKib, 1024),
         coldest = ns_when_cold(report, kStepKib, 128);
    printf("{\"live_4000\": %.1f, \"live_60000\": %.1f, \"two_threads\": %.1f, "
           "\"cold\": %.1f, \"cold_mean\": %.1f, \"coldest\": %.1f, \"coldest_mean\": %.1f}\n",
           few, many, two, cold.median, cold.mean, coldest.median, coldest.mean);
    return 0;
}
