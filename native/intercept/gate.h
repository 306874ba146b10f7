// The gate: every call that submits work or changes objects passes it; a checkpoint closes it.
//
// Fast path: one store to the thread's own record and one load of the gate word. The closer pays:
// it sets the word, runs a membarrier on all threads of the process, and then reads every record. A
// thread that finds the gate closed leaves the driver (its record says so) and sleeps on a futex
// until the gate opens.
#ifndef FLOWGPU_INTERCEPT_GATE_H
#define FLOWGPU_INTERCEPT_GATE_H

#include <atomic>
#include <cstdint>

#include "page.h"
#include "quiet.h"

namespace flowgpu::gate {

extern __thread ThreadRecord* own_record __attribute__((tls_model("initial-exec")));

// In line: the wrappers are so many that the compiler would call it instead.
#define FG_INLINE __attribute__((always_inline)) inline

FG_INLINE bool is_closed() {
    return flowgpu_page.closed.load(std::memory_order_relaxed) != 0;
}

FG_INLINE uint64_t this_thread() {
    return reinterpret_cast<uint64_t>(__builtin_thread_pointer());
}

FG_INLINE ThreadRecord* record_at(uint64_t thread) {
    return &flowgpu_page.records[thread * 0x9e3779b97f4a7c15 >> (64 - kRecordBits)]; // Knuth's hash
}

FG_INLINE ThreadRecord* find_record() {
    ThreadRecord* record = record_at(this_thread());
    if (__builtin_expect(record->thread.load(std::memory_order_relaxed) != this_thread(), 0))
        FG_QUIETLY(flowgpu_gate_find, record);
    return record;
}

// What `inside` was before.
FG_INLINE uint32_t go_in(ThreadRecord* record) {
    const uint32_t before = record->inside.load(std::memory_order_relaxed);
    record->inside.store(before + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (__builtin_expect(is_closed(), 0) && before == 0)
        FG_QUIETLY(flowgpu_gate_park, record);
    return before;
}

class Guard {
  public:
    FG_INLINE Guard() : record_(find_record()), before_(go_in(record_)) {}
    FG_INLINE ~Guard() { record_->inside.store(before_, std::memory_order_release); }
    FG_INLINE ThreadRecord* record() const { return record_; }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

  private:
    ThreadRecord* record_;
    uint32_t before_;
};

#undef FG_INLINE

// A Guard's two ends, where they are not in one scope.
uint32_t enter();
void leave(uint32_t before);
// The calling thread is in exit(), on its way to the driver's handlers: it waits for an open gate,
// which cannot be closed any more from then on.
void begin_exit();
bool exiting();
// Closes the gate and waits until no thread is in the driver. False: some thread did not leave
// within timeout_ms, the program is in exit(), or the kernel has no membarrier; the gate is open
// again.
bool close(uint32_t timeout_ms);
void open();
// The calling thread is one of ours, which works behind the closed gate: it never waits there.
void exempt();
// Threads that have called the driver and live.
uint32_t thread_count();
// In the child of a fork: the parent's other threads are gone, and nobody will open the gate.
void reset_after_fork();

} // namespace flowgpu::gate

#endif
