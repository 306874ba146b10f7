// For benchmarks: what something costs where the program has used the caches and the TLB since it
// was done last.
#ifndef FLOWGPU_COMMON_COLD_H
#define FLOWGPU_COMMON_COLD_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <vector>

namespace flowgpu {

struct Cold {
    double median, mean; // nanoseconds, with what the clock takes
};

// Does event(argument(0)) to event(argument(count - 1)), and before each reads as many lines as
// `kib` hold, all over 64 MiB, as a program does. The best of four rounds counts: others share the
// machine.
template <typename Argument, typename Event>
Cold cold_events(unsigned kib, unsigned count, Argument&& argument, Event&& event) {
    constexpr size_t kArea = 64 << 20;
    static std::vector<char> area(kArea, 1);
    using Clock = std::chrono::steady_clock;
    std::minstd_rand random(7);
    volatile char sink = 0;
    std::atomic<unsigned> lock{0};
    Cold best = {1e9, 1e9};
    for (unsigned round = 0; round < 4; round++) {
        std::vector<double> spent(count);
        double sum = 0;
        for (unsigned i = 0; i < count; i++) {
            for (unsigned line = 0; line < kib * 16; line++)
                sink = sink + area[random() * 64ull % kArea];
            const auto with = argument(i);
            auto start = Clock::now();
            event(with);
            // As a lock of the program's does, which waits until all that was written has its line.
            lock.fetch_add(1);
            spent[i] = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
            sum += spent[i];
        }
        std::sort(spent.begin(), spent.end());
        best.median = std::min(best.median, spent[count / 2]);
        best.mean = std::min(best.mean, sum / count);
    }
    return best;
}

} // namespace flowgpu

#endif
