// What program and stub driver count, in a file that the test reads meanwhile.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct Stats {
    uint64_t inside;   // threads in the driver now
    uint64_t launches; // that reached the driver
    uint64_t calls;    // that returned to the program
    uint64_t signals;  // handled by the program
    uint64_t errors;   // of a call, or an errno that was changed
    uint64_t stop;     // written by the test
};

static inline struct Stats* open_stats(void) {
    int fd = open(getenv("STUB_STATS"), O_RDWR | O_CLOEXEC);
    void* mapped =
        fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}
