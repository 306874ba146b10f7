// For tests, preloaded into CRIU: its DIES_AT-th call of ptrace(2) is its last. Where DIES_OF names
// a request by its number, those alone are counted, and the last one is made.
#include <cerrno>
#include <cstdarg>
#include <cstdlib>

#include <sys/ptrace.h>
#include <sys/syscall.h>

extern "C" {
long syscall(long, ...) noexcept;
int* __errno_location() noexcept;

// As in libc: what a PTRACE_PEEK.. finds is returned.
__attribute__((visibility("default"))) long ptrace(__ptrace_request request, ...) noexcept {
    static int calls = 0;
    va_list list;
    va_start(list, request);
    long thread = va_arg(list, int);
    void* address = va_arg(list, void*);
    void* data = va_arg(list, void*);
    va_end(list);
    const char *number = getenv("DIES_AT"), *only = getenv("DIES_OF");
    if (!only || atoi(only) == request)
        calls++;
    bool last = number && calls == atoi(number);
    constexpr int kKill = 9;
    if (last && !only)
        syscall(SYS_kill, syscall(SYS_getpid), kKill);
    long found = 0;
    bool peeks =
        request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
    long result = syscall(SYS_ptrace, request, thread, address, peeks ? &found : data);
    if (last)
        syscall(SYS_kill, syscall(SYS_getpid), kKill);
    if (!peeks || result < 0)
        return result;
    *__errno_location() = 0;
    return found;
}
}
