// The stack of current contexts of each thread: the driver forgets it with everything else, and
// only the thread itself can set it again.
#ifndef FLOWGPU_INTERCEPT_REPLAY_THREADS_H
#define FLOWGPU_INTERCEPT_REPLAY_THREADS_H

#include <atomic>
#include <cstdint>
#include <vector>

#include "driver.h"
#include "gate.h"

namespace flowgpu::replay {

struct ThreadState {
    std::vector<CUcontext> contexts; // the program's handles, the current one last
    CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    uint32_t generation = 0;   // of the driver that knows this
    CUcontext ended = nullptr; // the driver's, in place of those on the stack that had ended before
};

extern __thread ThreadState* own_thread __attribute__((tls_model("initial-exec")));

// The calling thread's; null when there is no memory for it.
__attribute__((cold)) ThreadState* make_thread();

inline ThreadState* this_thread() {
    return __builtin_expect(own_thread != nullptr, 1) ? own_thread : make_thread();
}

// Behind the gate: gives a driver that was made anew what it had of the calling thread.
__attribute__((always_inline)) inline void catch_up(gate::ThreadRecord* record) {
    const uint32_t now = flowgpu_page.generation.load(std::memory_order_relaxed);
    if (__builtin_expect(record->generation.load(std::memory_order_relaxed) != now, 0))
        FG_QUIETLY(flowgpu_replay_catch_up, record);
}

// On every way into the driver. Functions that only ask pass no gate above us; while the driver is
// away they have to wait too.
class Entry {
  public:
    __attribute__((always_inline)) Entry() { catch_up(guard_.record()); }

  private:
    gate::Guard guard_;
};

// The thread's current context may be another one from now on.
inline void forget_current() {
    gate::ThreadRecord* record = gate::find_record();
    record->on_device.store(0, std::memory_order_relaxed);
    record->in_context.store(0, std::memory_order_relaxed);
}
// True if the record knows the thread's current context: then nobody has to ask the driver for it.
inline bool knows_current(const gate::ThreadRecord* record) {
    return __builtin_expect(record->in_context.load(std::memory_order_relaxed) ==
                                flowgpu_page.contexts.load(std::memory_order_relaxed),
                            1);
}
// Around a call of which nobody knows whether it leaves the thread's context current: what was
// known before is known again if the driver says that it does.
struct KnownCurrent {
    uint32_t on_device, in_context; // of the record
};
KnownCurrent doubt_current();
void confirm_current(const KnownCurrent& known);
// The thread's, to note there what the driver has just said of it. Null: a record of several
// threads, or exit(), in which the driver may end at any time.
inline gate::ThreadRecord* knowing_record() {
    gate::ThreadRecord* record = gate::find_record();
    return record->used.load(std::memory_order_relaxed) && !gate::exiting() ? record : nullptr;
}
// The driver has just said that it is the thread's current one; `contexts` is of before that.
void know_current(CUcontext context, uint32_t contexts);

CUcontext current_context();
void now_current(CUcontext context); // cuCtxSetCurrent
void now_pushed(CUcontext context);
void now_popped();

} // namespace flowgpu::replay

#endif
