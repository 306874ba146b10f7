/* Writes pages of its own as a device does: behind the page tables. A buffer that io_uring has
   registered is pinned, as memory that a driver has registered is, and the kernel writes into it
   without a look at who may. At SIGUSR1 the buffer becomes what the file is, and later it is told.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kBytes = 1 << 20 };

static void fail(const char* what) {
    perror(what);
    exit(1);
}

int main(int count, char** words) {
    (void)count;
    char* buffer = mmap(NULL, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(buffer, 'a', kBytes);
    const int file = open(words[1], O_RDONLY);
    struct io_uring_params about = {0};
    const int ring = (int)syscall(SYS_io_uring_setup, 4, &about);
    if (file < 0 || ring < 0)
        fail("io_uring_setup");
    const struct iovec whole = {buffer, kBytes};
    if (syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &whole, 1) < 0)
        fail("io_uring_register");
    char* queue = mmap(NULL, about.sq_off.array + about.sq_entries * 4, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe* entry =
        mmap(NULL, about.sq_entries * sizeof *entry, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    sigset_t asked;
    sigemptyset(&asked);
    sigaddset(&asked, SIGUSR1);
    sigprocmask(SIG_BLOCK, &asked, NULL);
    printf("ready %lx-%lx\n", (unsigned long)buffer, (unsigned long)buffer + kBytes);
    fflush(stdout);
    int number;
    sigwait(&asked, &number);
    entry->opcode = IORING_OP_READ_FIXED;
    entry->fd = file;
    entry->addr = (uintptr_t)buffer;
    entry->len = kBytes;
    ((unsigned*)(queue + about.sq_off.array))[0] = 0;
    __atomic_store_n((unsigned*)(queue + about.sq_off.tail), 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
        fail("io_uring_enter");
    /* CRIU knows no such rings. */
    munmap(queue, about.sq_off.array + about.sq_entries * 4);
    munmap(entry, about.sq_entries * sizeof *entry);
    close(ring);
    puts("written");
    fflush(stdout);
    for (;;) {
        sigwait(&asked, &number);
        printf("%c%c\n", buffer[0], buffer[kBytes - 1]);
        fflush(stdout);
    }
}
