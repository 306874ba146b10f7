// Tells if a tracer holds all threads of the program, and the same one all the time: who holds
// them may be killed. Nothing here allocates.
#ifndef FLOWGPU_INTERCEPT_HELD_H
#define FLOWGPU_INTERCEPT_HELD_H

#include <cstdlib>
#include <cstring>

#include "proc.h"

namespace flowgpu {

class Held {
  public:
    Held() : begin_(look()) {}

    // Threads that the driver has begun since count for nothing.
    bool all() const { return begin_.traced || !begin_.others; }
    // No thread was let go: one that was would not be traced any more, and whoever traces it then
    // is another.
    bool still() const {
        const Count now = look();
        return now.tracer == begin_.tracer && now.traced == begin_.traced;
    }

  private:
    struct Count {
        int tracer = 0, traced = 0, others = 0;
    };

    // Ours are not held, which are known by their names.
    static Count look() {
        Count count;
        proc::each_number("/proc/self/task", [&](const char* name, int) {
            char path[64];
            snprintf(path, sizeof path, "/proc/self/task/%d/status", atoi(name));
            bool ours = false;
            int tracer = 0;
            proc::each_line(path, [&](const char* line) {
                ours |= strcmp(line, "Name:\tflowgpu") == 0 ||
                        strcmp(line, "Name:\tflowgpu-managed") == 0;
                if (strncmp(line, "TracerPid:", 10) == 0)
                    tracer = atoi(line + 10);
            });
            if (ours)
                return;
            if (tracer) {
                count.tracer = tracer;
                count.traced++;
            } else {
                count.others++;
            }
        });
        return count;
    }

    const Count begin_;
};

} // namespace flowgpu

#endif
