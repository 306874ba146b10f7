// For benchmarks: what something costs where the program has used the caches and the TLB since it
// was done last.
#ifndef FLOWGPU_COMMON_COLD_H
#define FLOWGPU_COMMON_COLD_H

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <sys/mman.h>

namespace flowgpu {

// Code all over so many bytes: a function in each line, which returns.
class ColdCode {
  public:
    explicit ColdCode(size_t bytes) : bytes_(bytes) {
        const int mode = PROT_READ | PROT_WRITE | PROT_EXEC;
        lines_ = static_cast<char*>(mmap(nullptr, bytes, mode, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (lines_ == MAP_FAILED) {
            perror("memory for code");
            exit(2);
        }
        memset(lines_, 0xc3, bytes); // ret
    }
    void run(size_t at) const { reinterpret_cast<void (*)()>(lines_ + at % bytes_ / 64 * 64)(); }

  private:
    size_t bytes_;
    char* lines_;
};

struct Cold {
    double median, mean; // nanoseconds, with what the clock takes
};

// Does event(argument(0)) to event(argument(count - 1)), and before each reads as many lines as
// `kib` hold, all over 64 MiB, and runs code in half as many, all over 16 MiB, as a program does.
// The best of four rounds counts: others share the machine.
template <typename Argument, typename Event>
Cold cold_events(unsigned kib, unsigned count, Argument&& argument, Event&& event) {
    constexpr size_t kArea = 64 << 20;
    static std::vector<char> area(kArea, 1);
    static const ColdCode code(16 << 20);
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
            for (unsigned line = 0; line < kib * 8; line++)
                code.run(random() * 64ull);
            const auto with = argument(i);
            auto start = Clock::now();
            event(with);
            // A lock of the program's does the same: it waits until every write has its cache line.
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
