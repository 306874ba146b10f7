// How long the steps of something took: "cuInit 102.4 ms, contexts 130.9 ms".
#ifndef FLOWGPU_COMMON_LAPS_H
#define FLOWGPU_COMMON_LAPS_H

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>

namespace flowgpu {

// No allocation.
class Laps {
  public:
    // Adds the time since the last call to `step`, a literal. Steps beyond the table are "rest".
    void add(const char* step) {
        const Clock::time_point now = Clock::now();
        size_t at = 0;
        while (at < count_ && strcmp(rows_[at].step, step) != 0)
            at++;
        if (at == kMost)
            rows_[--at].step = "rest";
        else if (at == count_)
            rows_[count_++] = {step, {}};
        rows_[at].spent += now - last_;
        last_ = now;
    }

    // Those that took half a millisecond and more, as many as fit, in the order in which they
    // began.
    void tell(char* text, size_t bytes) const {
        size_t length = 0;
        for (size_t i = 0; i < count_; i++) {
            const double ms = std::chrono::duration<double, std::milli>(rows_[i].spent).count();
            if (ms < 0.5)
                continue;
            const auto added =
                static_cast<size_t>(snprintf(text + length, bytes - length, "%s%s %.1f ms",
                                             length ? ", " : "", rows_[i].step, ms));
            if (added >= bytes - length)
                break;
            length += added;
        }
        text[length] = 0;
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr size_t kMost = 24;
    struct Row {
        const char* step;
        Clock::duration spent;
    };
    Row rows_[kMost] = {};
    size_t count_ = 0;
    Clock::time_point last_ = Clock::now();
};

} // namespace flowgpu

#endif
