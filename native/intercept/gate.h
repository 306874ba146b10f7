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

namespace flowgpu::gate {

struct ThreadRecord {
    std::atomic<uint32_t> inside{0}; // 1 while the thread is in the driver
    uint32_t depth =
        0; // the driver calls back into the program (context-local destructors), which calls us
    std::atomic<uint32_t> used{0};
    ThreadRecord* next = nullptr;
};

extern std::atomic<uint32_t> closed; // flowgpu_gate_state; also the futex word
extern __thread ThreadRecord* own_record __attribute__((tls_model("initial-exec")));

ThreadRecord* make_record();
void park(ThreadRecord* record);

class Guard {
  public:
    Guard() : record_(own_record ? own_record : make_record()) {
        if (record_->depth++)
            return;
        record_->inside.store(1, std::memory_order_relaxed);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (__builtin_expect(closed.load(std::memory_order_relaxed) != 0, 0))
            park(record_);
    }
    ~Guard() {
        if (--record_->depth == 0)
            record_->inside.store(0, std::memory_order_release);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

  private:
    ThreadRecord* record_;
};

// Closes the gate and waits until no thread is in the driver. False: some thread did not leave
// within timeout_ms, or the kernel has no membarrier; the gate is open again.
bool close(uint32_t timeout_ms);
void open();
// Threads that have called the driver and live.
uint32_t thread_count();
// In the child of a fork: the parent's other threads are gone, and nobody will open the gate.
void reset_after_fork();

} // namespace flowgpu::gate

#endif
