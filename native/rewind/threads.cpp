#include "threads.h"

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "imports.h"
#include "proc.h"

namespace flowgpu::rewind::threads {

namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;
constexpr long kRoundNs = 1'000'000; // between two looks

enum Order : int { kStop, kGoOn, kEnd };
enum State : int { kNew, kAsked, kBusy, kStopped };

struct Seat {
    pid_t tid;
    DriverThread* known; // null: only by its name
    std::atomic<int> state;
    char name[16];
};

Seat seats[kMaxThreads];
std::atomic<size_t> seat_count{0};
std::atomic<int> order{kGoOn}; // a futex
int signal_used;
struct sigaction programs_actions[_NSIG];

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void doze() {
    timespec t = {0, kRoundNs};
    nanosleep(&t, nullptr);
}

pid_t thread_id() {
    return static_cast<pid_t>(syscall(SYS_gettid));
}

long futex(int operation, int value) {
    return syscall(SYS_futex, reinterpret_cast<int*>(&order), operation | FUTEX_PRIVATE_FLAG, value,
                   nullptr, nullptr, 0);
}

// True if the interrupted thread waits in the kernel for something outside. Such a thread holds no
// lock of libc's (of malloc, of the loader), which would never be free again. A thread that waits
// for a lock is not at rest.
bool at_rest(const ucontext_t& at) {
    constexpr uint8_t kSyscall[] = {0x0f, 0x05};
    const greg_t* registers = at.uc_mcontext.gregs;
    auto* pc = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
    if (memcmp(pc - sizeof kSyscall, kSyscall, sizeof kSyscall) == 0)
        return registers[REG_RAX] == -EINTR;
    // A call that will be made again: the processor has noted where it was to return to.
    bool again = memcmp(pc, kSyscall, sizeof kSyscall) == 0 &&
                 registers[REG_RCX] == registers[REG_RIP] + static_cast<greg_t>(sizeof kSyscall);
    bool lock =
        registers[REG_RAX] == SYS_futex && (registers[REG_RSI] & FUTEX_CMD_MASK) == FUTEX_WAIT;
    return again && !lock;
}

Seat* seat_of(pid_t tid) {
    for (size_t i = 0; i < seat_count; i++)
        if (seats[i].tid == tid)
            return &seats[i];
    return nullptr;
}

// In the thread's own context again: leaves the driver's function and returns to libc.
[[noreturn]] void go_home() {
    __builtin_longjmp(seat_of(thread_id())->known->home, 1);
}

void on_signal(int signal, siginfo_t* info, void* context) {
    int error = errno;
    Seat* seat = seat_of(thread_id());
    if (!seat) { // meant for the program
        const struct sigaction& action = programs_actions[signal];
        if (action.sa_flags & SA_SIGINFO)
            action.sa_sigaction(signal, info, context);
        else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
            action.sa_handler(signal);
        errno = error;
        return;
    }
    auto& at = *static_cast<ucontext_t*>(context);
    bool rests = at_rest(at);
    if (order == kStop)
        seat->state = rests ? kStopped : kBusy;
    while (rests && order == kStop)
        futex(FUTEX_WAIT, kStop);
    if (rests)
        seat->state = kBusy; // let_go() waits for it: the next order is not for this round
    if (rests && order == kEnd) {
        if (!seat->known)
            syscall(SYS_exit, 0);
        // Below what the interrupted function may use without saying so, and as after a call.
        greg_t* registers = at.uc_mcontext.gregs;
        registers[REG_RSP] = ((registers[REG_RSP] - 128) & ~15ll) - 8;
        registers[REG_RIP] = reinterpret_cast<greg_t>(go_home);
    }
    errno = error;
}

// The first line of a file in the folder of a thread; empty when the thread is gone.
void read_of(pid_t tid, const char* file, char* to, size_t bytes) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", tid, file);
    proc::File in(path);
    size_t got = in.fd() < 0 ? 0 : in.read_some(to, bytes - 1);
    to[got] = 0;
    to[strcspn(to, "\n")] = 0;
}

bool alive(pid_t tid) {
    return syscall(SYS_tgkill, getpid(), tid, 0) == 0;
}

// Adds the driver's threads that have no seat yet. Where they cannot be seen when they start, they
// are those named "cuda..." in a process that is not. Else such a name alone means nothing certain,
// so it stops us. Null, or what is wrong.
const char* find_threads(Seat** culprit, size_t* added) {
    static Seat stranger;
    const char* wrong = nullptr;
    *added = 0;
    char own[16];
    read_of(getpid(), "comm", own, sizeof own);
    bool seen = imports::sees_threads();
    bool read = proc::each_number("/proc/self/task", [&](const char* number, int) {
        pid_t tid = atoi(number);
        if (wrong || tid == getpid() || seat_of(tid))
            return;
        DriverThread* known = nullptr;
        for (size_t i = 0; i < kMaxThreads; i++)
            if (imports::threads()[i].tid == tid)
                known = &imports::threads()[i];
        char name[16];
        read_of(tid, "comm", name, sizeof name);
        if (!known && (strncmp(name, "cuda", 4) != 0 || strcmp(name, own) == 0))
            return;
        Seat* seat = seat_count < kMaxThreads ? &seats[seat_count] : &stranger;
        seat->tid = tid;
        seat->known = known;
        seat->state = kNew;
        memcpy(seat->name, name, sizeof name);
        *culprit = seat;
        if (seat == &stranger)
            wrong = "is one too many";
        else if (!known && seen)
            wrong = "is named like one of the driver's, but the driver did not start it";
        else
            seat_count++, ++*added;
    });
    if (!read)
        wrong = "cannot be looked for";
    return wrong;
}

// The highest real-time signal that every driver thread takes; one that the program does not use,
// if there is one. 0 if there is none.
int choose_signal() {
    uint64_t blocked = 0;
    for (size_t i = 0; i < seat_count; i++)
        blocked |= proc::blocked_signals(seats[i].tid);
    int used = 0;
    for (int signal = SIGRTMAX; signal >= SIGRTMIN; signal--) {
        struct sigaction action;
        if (blocked >> (signal - 1) & 1 || sigaction(signal, nullptr, &action) != 0)
            continue;
        if (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL)
            return signal;
        used = used ? used : signal;
    }
    return used;
}

void take_signal() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigfillset(&action.sa_mask);
    sigaction(signal_used, &action, &programs_actions[signal_used]);
}

// Our handler stays, without effect, where a thread has yet to take the signal.
void give_signal_back() {
    bool pending = false;
    for (size_t i = 0; i < seat_count; i++)
        pending |= seats[i].state == kAsked && alive(seats[i].tid);
    if (signal_used && !pending)
        sigaction(signal_used, &programs_actions[signal_used], nullptr);
}

void give(Order what) {
    order = what;
    futex(FUTEX_WAKE, INT_MAX);
}

bool starting() {
    for (size_t i = 0; i < kMaxThreads; i++)
        if (imports::threads()[i].tid == DriverThread::kStarting)
            return true;
    return false;
}

// The first of those not yet asked that does not take the signal; one that is stopped takes none.
Seat* deaf() {
    int signal = signal_used ? signal_used : SIGRTMAX;
    for (size_t i = 0; i < seat_count; i++)
        if (seats[i].state == kNew && proc::blocked_signals(seats[i].tid) >> (signal - 1) & 1)
            return &seats[i];
    return nullptr;
}

// Asks every thread that does not rest. The first one, or null when all do.
Seat* ask_restless() {
    Seat* restless = nullptr;
    for (size_t i = 0; i < seat_count; i++) {
        Seat& seat = seats[i];
        int state = seat.state;
        if (state == kStopped || !alive(seat.tid))
            continue;
        restless = restless ? restless : &seat;
        if (state == kAsked)
            continue;
        // The thread's own word is never written over: it would be taken for one not heard yet.
        if (seat.state.compare_exchange_strong(state, kAsked))
            syscall(SYS_tgkill, getpid(), seat.tid, signal_used);
    }
    return restless;
}

void name(const Seat* seat, const char* what, char* detail, size_t bytes) {
    if (seat)
        snprintf(detail, bytes, "thread %d (%s) %s", seat->tid, seat->name, what);
    else
        snprintf(detail, bytes, "a thread of the driver's %s", what);
}

} // namespace

bool stop(char* detail, size_t bytes) {
    const int64_t begun = now_ns();
    seat_count = 0;
    signal_used = 0;
    order = kStop;
    for (;; doze()) {
        const int64_t waited = now_ns() - begun;
        Seat* culprit = nullptr;
        size_t added = 0;
        const char* wrong = find_threads(&culprit, &added);
        if (!wrong && seat_count && !signal_used && (signal_used = choose_signal()) != 0)
            take_signal();
        if (!wrong && ((culprit = deaf()) || (seat_count && !signal_used)))
            wrong = "blocks the signal that would end it";
        // A thread that ends looks like a stranger's for a while, and one that was let go deaf.
        if (wrong && waited < kPatienceNs)
            continue;
        if (!wrong) {
            culprit = ask_restless();
            if (!culprit && !added && !starting())
                return true;
            wrong = waited > kPatienceNs ? "does not come to rest" : nullptr;
        }
        if (wrong) {
            name(culprit, wrong, detail, bytes);
            let_go();
            return false;
        }
    }
}

void let_go() {
    const int64_t begun = now_ns();
    give(kGoOn);
    for (size_t i = 0; i < seat_count; i++)
        while (seats[i].state == kStopped && alive(seats[i].tid) && now_ns() - begun < kPatienceNs)
            doze();
    give_signal_back();
}

bool end(char* detail, size_t bytes) {
    const int64_t begun = now_ns();
    give(kEnd);
    for (size_t i = 0; i < seat_count; i++)
        while (alive(seats[i].tid)) {
            if (now_ns() - begun > kPatienceNs) {
                name(&seats[i], "does not end", detail, bytes);
                return false;
            }
            doze();
        }
    give_signal_back();
    return true;
}

} // namespace flowgpu::rewind::threads
