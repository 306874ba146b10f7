// System calls that a held thread makes for us.
#pragma once

#include "stop.h"

#include <sys/user.h>

#include <cstdint>

namespace quiet {

// Addresses of instructions that the process has already; nothing is written into its code.
struct Gadgets {
    uint64_t syscall_ret = 0; // syscall; ret
    uint64_t sigreturn = 0;   // mov $15, %eax; syscall
};

// One thread of a process, made ready to call. The thread must be held.
//
// While an Injector lives, the thread's stack holds, below the red zone, a signal frame with the
// thread's whole state, and its registers point at `syscall; ret` with that frame on top: if this
// program dies the thread makes one harmless call, returns into rt_sigreturn, and is where it was.
// The real arguments are put in only at the entry of the call.
class Injector {
  public:
    // Throws Skip when no thread can be used.
    Injector(pid_t pid, const std::vector<pid_t>& threads, const Gadgets& gadgets, Held& held,
             Clock::time_point deadline);
    ~Injector();
    Injector(const Injector&) = delete;
    Injector& operator=(const Injector&) = delete;

    // Result of the call as the kernel gives it. Throws Skip when the thread is gone.
    long madvise(uint64_t address, uint64_t bytes, int advice);

  private:
    bool usable(pid_t tid);
    void write_frame();
    void step();
    void settle();

    pid_t pid_, tid_ = 0;
    Gadgets gadgets_;
    Held& held_;
    Clock::time_point deadline_;
    user_regs_struct saved_ = {}, ready_ = {};
    uint64_t mask_ = 0;
    bool stop_again_ = false; // a SIGSTOP came meanwhile
    bool gone_ = false;
};

// Throws Skip when the process lacks one.
Gadgets find_gadgets(pid_t pid);

} // namespace quiet
