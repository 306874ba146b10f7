// Nanoseconds that the stub adds to an event of PyTorch's allocator, and how they grow with the
// live blocks and with threads.
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

namespace {

struct Device {
    int8_t type;
    int8_t index;
};
using Report = void (*)(void*, int64_t, size_t, size_t, Device);
constexpr uint64_t kWindow = 0x200000000000;
constexpr unsigned kRounds = 40;
constexpr unsigned kEvents = 1 << 16; // a round

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
    printf("{\"live_4000\": %.1f, \"live_60000\": %.1f, \"two_threads\": %.1f}\n", few, many,
           ns_with_threads(report, 2));
    return 0;
}
