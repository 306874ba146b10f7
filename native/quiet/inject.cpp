#include "inject.h"

#include <elf.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <ucontext.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string_view>

namespace quiet {
namespace {

constexpr uint64_t kRedZone = 128;
constexpr uint64_t kScanBytes = 8 << 20; // of one mapping
constexpr auto kGrace = std::chrono::milliseconds(200);
constexpr uint64_t k64BitCode = 0x33;
// Kernel's own results of an interrupted call, which no program sees.
constexpr long kRestartSys = -512, kRestartNoIntr = -513, kRestartNoHand = -514,
               kRestartBlock = -516;

// The kernel's frame of a signal (arch/x86/include/uapi/asm/sigcontext.h, asm/ucontext.h).
struct Frame {
    uint64_t restorer;
    uint64_t flags, link;
    uint64_t stack_base;
    int32_t stack_flags, stack_pad;
    uint64_t stack_bytes;
    uint64_t r8, r9, r10, r11, r12, r13, r14, r15;
    uint64_t rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, eflags;
    uint16_t cs, gs, fs, ss;
    uint64_t err, trapno, oldmask, cr2;
    uint64_t fpstate;
    uint64_t reserved[8];
    uint64_t mask;
};
static_assert(offsetof(Frame, mask) == 8 + 40 + 256, "struct sigcontext has 256 bytes");

constexpr uint64_t kHasXstate = 1, kHasSs = 2, kStrictSs = 4;
// An alternative stack with flags that do not exist is refused, so that the thread's own stays.
constexpr int32_t kNoStack = 0x7fffffff;
constexpr uint32_t kXstateMagic1 = 0x46505853, kXstateMagic2 = 0x46505845;
constexpr size_t kSoftwareBytes = 464;

bool poke(pid_t pid, uint64_t address, const void* data, size_t bytes) {
    iovec local = {const_cast<void*>(data), bytes};
    iovec remote = {reinterpret_cast<void*>(address), bytes};
    return process_vm_writev(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

bool peek(pid_t pid, uint64_t address, void* data, size_t bytes) {
    iovec local = {data, bytes};
    iovec remote = {reinterpret_cast<void*>(address), bytes};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
}

// True when the thread may be inside a restartable sequence: other code run on it would end the
// sequence without its abort handler. A thread in a system call cannot be.
bool in_sequence(pid_t pid, pid_t tid) {
    struct {
        uint64_t address;
        uint32_t bytes, signature, flags, pad;
    } rseq = {};
    constexpr auto kGetRseq = static_cast<__ptrace_request>(0x420f);
    if (ptrace(kGetRseq, tid, sizeof rseq, &rseq) < 0)
        return true;
    uint64_t sequence = 1;
    return rseq.address && (!peek(pid, rseq.address + 8, &sequence, sizeof sequence) || sequence);
}

// Registers with which the program goes on when the kernel does not restart the call for it.
void leave_call(Frame& frame, const user_regs_struct& regs) {
    long result = static_cast<long>(regs.rax);
    if (static_cast<long>(regs.orig_rax) < 0)
        return;
    if (result == kRestartSys || result == kRestartNoIntr || result == kRestartNoHand) {
        frame.rax = regs.orig_rax;
        frame.rip = regs.rip - 2;
    } else if (result == kRestartBlock) {
        frame.rax = static_cast<uint64_t>(-EINTR);
    }
}

} // namespace

Gadgets find_gadgets(pid_t pid) {
    Gadgets found;
    const std::string_view call("\x0f\x05\xc3", 3), back("\xb8\x0f\x00\x00\x00\x0f\x05", 7),
        back_long("\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05", 9);
    std::string maps = read_file("/proc/" + std::to_string(pid) + "/maps");
    for (const char* wanted : {"libc.", "libc-", "musl", "/"}) {
        std::istringstream lines(maps);
        for (std::string line; std::getline(lines, line);) {
            uint64_t low, high;
            char flags[5];
            bool read = sscanf(line.c_str(), "%lx-%lx %4s", &low, &high, flags) == 3;
            if (!read || strcmp(flags, "r-xp") != 0 || line.find(wanted) == std::string::npos)
                continue;
            std::string code(std::min(high - low, kScanBytes), '\0');
            if (!peek(pid, low, code.data(), code.size()))
                continue;
            size_t at = code.find(call);
            if (at != std::string::npos)
                found.syscall_ret = low + at;
            at = code.find(back_long);
            if (at == std::string::npos)
                at = code.find(back);
            if (at != std::string::npos)
                found.sigreturn = low + at;
            if (found.syscall_ret && found.sigreturn)
                return found;
        }
    }
    throw Skip("its code has no system call to borrow");
}

Injector::Injector(pid_t pid, const std::vector<pid_t>& threads, const Gadgets& gadgets, Held& held,
                   Clock::time_point deadline)
    : pid_(pid), gadgets_(gadgets), held_(held), deadline_(deadline) {
    for (pid_t tid : threads)
        if (usable(tid)) {
            tid_ = tid;
            break;
        }
    if (!tid_)
        throw Skip("no thread of it can make a call");
    write_frame();
    // In this order: from here on the frame restores registers and mask, whatever happens to us.
    ptrace(PTRACE_SETREGS, tid_, nullptr, &ready_);
    uint64_t all = ~0ull;
    ptrace(PTRACE_SETSIGMASK, tid_, sizeof all, &all);
}

bool Injector::usable(pid_t tid) {
    bool read = ptrace(PTRACE_GETREGS, tid, nullptr, &saved_) == 0 &&
                ptrace(PTRACE_GETSIGMASK, tid, sizeof mask_, &mask_) == 0;
    if (!read || saved_.cs != k64BitCode)
        return false;
    return static_cast<long>(saved_.orig_rax) >= 0 || !in_sequence(pid_, tid);
}

void Injector::write_frame() {
    alignas(64) unsigned char xstate[64 << 10];
    iovec vector = {xstate, sizeof xstate - 64};
    if (ptrace(PTRACE_GETREGSET, tid_, NT_X86_XSTATE, &vector) != 0)
        throw Skip("its vector registers cannot be read");
    const auto bytes = static_cast<uint32_t>(vector.iov_len);
    struct {
        uint32_t magic, extended;
        uint64_t features;
        uint32_t bytes, pad[7];
    } software = {kXstateMagic1, bytes + 4, 0, bytes, {}};
    memcpy(&software.features, xstate + kSoftwareBytes, sizeof software.features);
    memcpy(xstate + kSoftwareBytes, &software, sizeof software);
    memcpy(xstate + bytes, &kXstateMagic2, sizeof kXstateMagic2);

    uint64_t top = saved_.rsp - kRedZone;
    uint64_t xstate_at = (top - bytes - sizeof kXstateMagic2) & ~63ull;
    uint64_t frame_at = (xstate_at - sizeof(Frame)) & ~15ull;
    const user_regs_struct& r = saved_;
    Frame frame = {};
    frame.restorer = gadgets_.sigreturn;
    frame.flags = kHasXstate | kHasSs | kStrictSs;
    frame.stack_flags = kNoStack;
    frame.r8 = r.r8, frame.r9 = r.r9, frame.r10 = r.r10, frame.r11 = r.r11;
    frame.r12 = r.r12, frame.r13 = r.r13, frame.r14 = r.r14, frame.r15 = r.r15;
    frame.rdi = r.rdi, frame.rsi = r.rsi, frame.rbp = r.rbp, frame.rbx = r.rbx;
    frame.rdx = r.rdx, frame.rax = r.rax, frame.rcx = r.rcx, frame.rsp = r.rsp;
    frame.rip = r.rip, frame.eflags = r.eflags;
    frame.cs = static_cast<uint16_t>(r.cs), frame.ss = static_cast<uint16_t>(r.ss);
    frame.fpstate = xstate_at;
    frame.mask = mask_;
    leave_call(frame, saved_);
    if (!poke(pid_, xstate_at, xstate, bytes + sizeof kXstateMagic2) ||
        !poke(pid_, frame_at, &frame, sizeof frame))
        throw Skip("the stack of its thread has no room");
    ready_ = saved_;
    ready_.rip = gadgets_.syscall_ret;
    ready_.rsp = frame_at;
    ready_.rax = SYS_getpid;
    ready_.orig_rax = ~0ull;
}

// To the next entry or exit of the call.
void Injector::step() {
    for (;;) {
        int status;
        if (ptrace(PTRACE_SYSCALL, tid_, nullptr, nullptr) != 0 ||
            !wait_stop(tid_, status, deadline_)) {
            gone_ = true;
            held_.forget(tid_);
            throw Skip("it was killed");
        }
        if (is_syscall_stop(status))
            return;
        // All other signals are blocked; this one cannot be. It is sent again at the end.
        stop_again_ |= !is_event_stop(status) && WSTOPSIG(status) == SIGSTOP;
    }
}

long Injector::madvise(uint64_t address, uint64_t bytes, int advice) {
    ptrace(PTRACE_SETREGS, tid_, nullptr, &ready_);
    step();
    user_regs_struct regs = ready_;
    regs.orig_rax = SYS_madvise;
    regs.rax = static_cast<uint64_t>(-ENOSYS); // what the kernel shows at the entry of a call
    regs.rdi = address;
    regs.rsi = bytes;
    regs.rdx = static_cast<uint64_t>(advice);
    regs.rip = gadgets_.syscall_ret + 2;
    ptrace(PTRACE_SETREGS, tid_, nullptr, &regs);
    step();
    ptrace(PTRACE_GETREGS, tid_, nullptr, &regs);
    ptrace(PTRACE_SETREGS, tid_, nullptr, &ready_);
    return static_cast<long>(regs.rax);
}

// To a stop from which the kernel restarts the interrupted call; a stop at a call's exit is none.
void Injector::settle() {
    deadline_ = std::max(deadline_, Clock::now() + kGrace); // also after a run that took too long
    ptrace(PTRACE_INTERRUPT, tid_, nullptr, nullptr);
    for (int status = 0; !is_event_stop(status);) {
        if (ptrace(PTRACE_CONT, tid_, nullptr, nullptr) != 0 ||
            !wait_stop(tid_, status, deadline_)) {
            gone_ = true;
            held_.forget(tid_);
            return;
        }
        stop_again_ |= !is_event_stop(status) && WSTOPSIG(status) == SIGSTOP;
    }
    ptrace(PTRACE_SETSIGMASK, tid_, sizeof mask_, &mask_);
    ptrace(PTRACE_SETREGS, tid_, nullptr, &saved_);
}

Injector::~Injector() {
    try {
        if (!gone_)
            settle();
    } catch (const Failure&) {
        gone_ = true; // it goes on by its frame when this program ends
    }
    if (stop_again_)
        kill(pid_, SIGSTOP);
}

} // namespace quiet
