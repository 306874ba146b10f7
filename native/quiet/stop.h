// Threads of processes, held by ptrace.
//
// Rules of this program, which stops and changes someone else's process:
// * A thread is seized, never attached (no signal is sent), and without EXITKILL: when this program
//   dies, at any moment, the kernel lets every thread go on.
// * Nothing runs in the process except one system call at a time, on one thread, between a frame
//   from which that thread could return by itself (inject.h).
// * A page is judged and dropped while every thread that can write it is held.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace quiet {

using Clock = std::chrono::steady_clock;

// The whole run is given up; every thread is released.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One process is left as it is; the others go on.
struct Skip : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// All threads of some processes, from hold() until the object ends.
class Held {
  public:
    explicit Held(Clock::time_point deadline) : deadline_(deadline) {}
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    // Returns when every thread of the process stands still. A process that is gone has none.
    void hold(pid_t pid);
    std::vector<pid_t> threads(pid_t pid) const;
    // True when a process that is not held uses the same memory.
    bool shares_memory(pid_t pid, const std::vector<pid_t>& held) const;
    void forget(pid_t tid) { stopped_.erase(tid); }

  private:
    void seize(pid_t pid, pid_t tid, std::vector<pid_t>& begun);
    void await(pid_t tid);

    Clock::time_point deadline_;
    std::set<pid_t> stopped_;
};

// waitpid for one thread until the deadline; false: it is gone. Throws Failure when it is late.
bool wait_stop(pid_t tid, int& status, Clock::time_point deadline);

// What a ptrace stop is: a stop asked for or a group stop, a stop at a system call, or a signal.
bool is_event_stop(int status);
bool is_syscall_stop(int status);

std::string read_file(const std::string& path);
std::vector<pid_t> list_threads(pid_t pid);

} // namespace quiet
