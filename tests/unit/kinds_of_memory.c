/* Two processes with memory of every kind that CRIU treats in its own way. They
   do nothing once they have said "ready". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kGuardInstall = 102 }; /* Linux 6.13 */
enum { kPage = 4096, kPages = 512, kSize = kPages * kPage };

static uint64_t state = 88172645463325252ull;

static uint64_t draw(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void fill(char* to, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 8) {
        const uint64_t value = draw();
        memcpy(to + at, &value, 8);
    }
}

static char* map(int access, int flags, int file) {
    char* region = mmap(NULL, kSize, access, flags, file, 0);
    if (region == MAP_FAILED)
        abort();
    return region;
}

static char* anonymous(void) {
    return map(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

static char* filled(void) {
    char* region = anonymous();
    fill(region, kSize);
    return region;
}

static int file_of(const char* path) {
    char* bytes = filled();
    const int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || write(file, bytes, kSize) != kSize)
        abort();
    munmap(bytes, kSize);
    return file;
}

/* Some pages of a file, changed by runs and by single pages; others are read. */
static void change(char* region) {
    fill(region + 10 * kPage, 30 * kPage);
    memset(region + 20 * kPage, 0, 6 * kPage);
    for (int page = 100; page < 200; page += 3)
        region[page * kPage] ^= 1;
    static volatile char seen;
    for (int page = 300; page < 400; page++)
        seen += region[page * kPage];
}

/* CRIU puts its own code into this page for a moment. */
static void own_first_code(void) {
    char line[512], access[8];
    unsigned long start = 0, end;
    FILE* maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &start, &end, access) == 3 && access[2] == 'x')
            break;
    fclose(maps);
    char* page = (char*)start;
    mprotect(page, kPage, PROT_READ | PROT_WRITE | PROT_EXEC);
    *(volatile char*)page = *(volatile char*)page;
    mprotect(page, kPage, PROT_READ | PROT_EXEC);
}

static void* wait_for_ever(void* argument) {
    for (;;)
        pause();
    return argument;
}

int main(int count, char** words) {
    if (count != 3)
        return 1;
    const int all = PROT_READ | PROT_WRITE;
    own_first_code();
    char* shared_by_fork = filled();
    char* wiped = filled();
    madvise(wiped, kSize, MADV_WIPEONFORK);
    /* Pages with zeros, pages that were only read, and pages that were never touched. */
    char* zeros = anonymous();
    memset(zeros, 0, 100 * kPage);
    fill(zeros + 100 * kPage, 10 * kPage);
    static volatile char seen;
    for (int page = 150; page < 300; page++)
        seen += zeros[page * kPage];
    mmap(NULL, 1ul << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(filled(), kSize, PROT_NONE);
    mprotect(filled(), kSize, PROT_READ);
    change(map(all, MAP_PRIVATE, file_of(words[1])));
    /* CRIU sends it, since its name may be that of a device. */
    change(map(all, MAP_PRIVATE, file_of(words[2])));
    unlink(words[2]);
    fill(map(all, MAP_PRIVATE, open("/dev/zero", O_RDWR)), 100 * kPage);
    fill(map(all, MAP_SHARED | MAP_ANONYMOUS, -1), 100 * kPage);
    const int memory = memfd_create("memory", 0);
    if (ftruncate(memory, kSize) != 0)
        return 1;
    fill(map(all, MAP_SHARED, memory), 300 * kPage);
    change(map(all, MAP_PRIVATE, memory));
    madvise(filled(), kSize, MADV_DONTDUMP);
    madvise(filled(), kSize, MADV_DONTFORK);
    for (int i = 0; i < 2; i++) { /* the same bytes, to be merged */
        char* same = anonymous();
        memset(same, 0x5a, kSize);
        madvise(same, kSize, MADV_MERGEABLE);
    }
    char* huge = aligned_alloc(kSize, 2 * kSize);
    madvise(huge, 2 * kSize, MADV_HUGEPAGE);
    fill(huge, kSize + 50 * kPage);
    char* guarded = filled();
    madvise(guarded + 10 * kPage, 3 * kPage, kGuardInstall);
    madvise(guarded + 20 * kPage, 5 * kPage, MADV_DONTNEED);
    fill(map(all | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1), 50 * kPage);
    fill(map(all, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1) + kSize / 2, kSize / 2);
    char* scattered = anonymous();
    for (int page = 0; page < kPages; page += 2)
        scattered[page * kPage + page] = 1;
    pthread_t thread;
    if (fork() == 0) {
        fill(shared_by_fork + 100 * kPage, 50 * kPage);
        fill(wiped, 10 * kPage);
        memset(scattered + 64 * kPage, 0, 8 * kPage);
    }
    pthread_create(&thread, NULL, wait_for_ever, NULL);
    if (write(1, "ready\n", 6) != 6)
        return 1;
    wait_for_ever(NULL);
}
