"""Programs with memory of every kind, for the restores of test_criu_view.py."""

from __future__ import annotations

MEMORY = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.argtypes = [ctypes.c_ssize_t]
def write(address, size, every=4096):
    noise = os.urandom(4096)
    for at in range(address, address + size, every):
        ctypes.memmove(at, noise, 4096)
        ctypes.memmove(at, at.to_bytes(8, "little"), 8)
def take(size, advice=15, every=4096):
    address = libc.mmap(None, size + (4 << 20), 3, 0x22, -1, 0) + (4 << 20) - 1 & -(2 << 20)
    assert libc.madvise(address, size, advice) == 0
    write(address, size, every)
    return address
def count():
    number = 0
    while True:
        print(number, flush=True)
        number += 1
        time.sleep(0.01)
"""

KINDS = {
    "huge pages": "take(32 << 20, advice=14)",
    "small pages": "take(32 << 20)",
    "every second page": "take(32 << 20); take(4 << 20, every=8192)",
    "read-only and unreadable": """
a = take(48 << 20)
assert libc.mprotect(a, 12 << 20, 1) == 0 and libc.mprotect(a + (13 << 20), 4 << 20, 0) == 0
""",
    "files": """
import tempfile
file = tempfile.TemporaryFile()
file.truncate(48 << 20)
a = libc.mmap(None, 48 << 20, 3, 2, file.fileno(), 0)
write(a, 30 << 20)
write(a + (32 << 20), 16 << 20, every=8192)
assert libc.mprotect(a, 1 << 20, 1) == 0 and libc.mlock(a + (2 << 20), 1 << 20) == 0
""",
    "locked": "take(32 << 20); a = take(24 << 20); assert libc.mlock(a, 24 << 20) == 0",
    "heap": "write(libc.sbrk(32 << 20), 32 << 20)",
    "35 threads": """
take(32 << 20)
threading.stack_size(1 << 20)
def deep(level):
    deep(level - 1) if level else time.sleep(1e6)
for _ in range(34):
    threading.Thread(target=deep, args=(50,), daemon=True).start()
""",
}

# The children's own memory begins below pages that nobody may touch: beside the parent's it would
# be a mapping that the parent has not, and CRIU 4.2 overlooks that the one after it is shared.
FORKED = """
take(48 << 20)
libc.mmap(None, 8 << 20, 0, 0x22, -1, 0)
ready, done = os.pipe()
for child in range(2):
    if os.fork() == 0:
        take(36 << 20)
        os.write(done, b".")
        while True:
            time.sleep(1)
take(32 << 20)
for child in range(2):
    os.read(ready, 1)
"""

# Stacks in the middle of a large buffer: the first thread's, as a coroutine has it, and with `two`
# that of another one, where the C library puts thread descriptor, restartable sequences and list
# of robust mutexes.
ON_BUFFER = r"""
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
static volatile sig_atomic_t hits;
static void handler(int number) { (void)number; hits++; }
static pthread_barrier_t both_run;
static void *wait_forever(void *arguments) {
    char local[8192];
    pthread_barrier_wait(&both_run);
    if (strcmp(((char **)arguments)[1], "aligned")) for (;;) pause();
    // With a stack pointer that is a multiple of 4 KiB.
    __asm__ volatile("mov %0, %%rsp\n1: mov %1, %%eax\nsyscall\njmp 1b" ::"r"(
        (uintptr_t)(local + 4096) & -4096ul), "i"(SYS_pause) : "memory");
    return NULL;
}
static void count(void) {
    char local[4096];
    memset(local, 0x5a, sizeof local);
    for (;;) {
        printf("%d\n", (int)hits);
        usleep(10000);
        for (unsigned i = 0; i < sizeof local; i++)
            if (((volatile char *)local)[i] != 0x5a) exit(1);
    }
}
int main(int argc, char **argv) {
    size_t size = 48 << 20, part = 16 << 20;
    char *buffer = aligned_alloc(2 << 20, size);
    memset(buffer, 0xa5, size);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, buffer + part / 2, part);
    sigset_t mask;
    sigfillset(&mask);
    pthread_sigmask(SIG_BLOCK, &mask, NULL);
    pthread_t thread;
    pthread_barrier_init(&both_run, NULL, 2);
    if (argc > 1) {
        if (pthread_create(&thread, &attributes, wait_forever, argv)) return 2;
        pthread_barrier_wait(&both_run);
    }
    struct sigaction action = {.sa_handler = handler};
    for (int number = SIGHUP; number <= SIGTERM; number++)
        sigaction(number, &action, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    ucontext_t here, there;
    getcontext(&there);
    there.uc_stack.ss_sp = buffer + 2 * part;
    there.uc_stack.ss_size = part / 2;
    makecontext(&there, count, 0);
    return swapcontext(&here, &there);
}
"""

# Each has more than the machine, and is no more than address space: `size` is a multiple of it.
RESERVE = """
size = os.sysconf("SC_PHYS_PAGES") * 4096 * 8 >> 30 << 30
def reserve(prot, flags=0x22):
    address = libc.mmap(None, size, prot, flags, -1, 0)
    assert address != 2 ** 64 - 1 and libc.mprotect(address + (1 << 30), 4 << 20, 3) == 0
    write(address + (1 << 30), 4 << 20)
    return address
def fork():
    ready, done = os.pipe()
    for child in range(2):
        if os.fork() == 0:
            write(a + (1 << 30), 1 << 20)
            os.write(done, b".")
            while True:
                time.sleep(1)
    for child in range(2):
        os.read(ready, 1)
"""

RESERVATIONS = {
    "nobody may touch it, forked": "a = reserve(0); fork()",
    "nobody may touch its pages any more, forked": """
a = reserve(0)
assert libc.mprotect(a + (1 << 30) + (2 << 20), 2 << 20, 0) == 0
fork()
""",
    "to be read, forked": "a = reserve(1); fork()",
    "not to be counted, its pages not to be touched, forked": """
a = reserve(0, 0x4022)
assert libc.mprotect(a + (1 << 30) + (2 << 20), 2 << 20, 0) == 0
fork()
""",
    "writable, not to be counted, 29 TiB, forked": """
size = 29 << 40
a = reserve(3, 0x4022)
fork()
""",
    "writable bit by bit": """
a = reserve(0)
for at in range(a, a + size, 1 << 30):
    assert libc.mprotect(at, 1 << 30, 3) == 0
""",
}
