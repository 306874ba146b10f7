// CRIU has no image of an io_uring. A program that asks the C library for one gets EPERM, as in
// most containers: libuv (Node, PyTorch's TCPStore) and others then do without. One that a program
// makes by a system call of its own is refused at a checkpoint.
#include <cerrno>
#include <cstdarg>

#include <sys/syscall.h>

extern "C" __attribute__((visibility("default"))) long syscall(long number, ...) {
    if (number == SYS_io_uring_setup) {
        errno = EPERM;
        return -1;
    }
    va_list list;
    va_start(list, number);
    long words[6];
    for (long& word : words)
        word = va_arg(list, long);
    va_end(list);
    register long fourth asm("r10") = words[3];
    register long fifth asm("r8") = words[4];
    register long sixth asm("r9") = words[5];
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(words[0]), "S"(words[1]), "d"(words[2]), "r"(fourth),
                   "r"(fifth), "r"(sixth)
                 : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = static_cast<int>(-result);
        return -1;
    }
    return result;
}
