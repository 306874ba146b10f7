/* A process whose memory does not stand still: its threads write, map, unmap,
   move, drop and protect all the time. With "forks" it also has a child that
   does the same, and makes more. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kGuardInstall = 102 }; /* Linux 6.13 */
enum { kPage = 4096, kRegions = 12, kPages = 192, kThreads = 3 };

static int file;
static uint64_t forks;

static uint64_t draw(uint64_t* state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static char* map(uint64_t* state) {
    const int flags = draw(state) % 3 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_PRIVATE;
    char* region = mmap(NULL, kPages * kPage, PROT_READ | PROT_WRITE, flags,
                        flags & MAP_ANONYMOUS ? -1 : file, 0);
    if (region == MAP_FAILED)
        abort();
    if (draw(state) % 4 == 0)
        madvise(region, kPages * kPage, MADV_HUGEPAGE);
    return region;
}

static void* work(void* argument) {
    uint64_t state = (uintptr_t)argument * 0x9e3779b97f4a7c15 + 1;
    char* regions[kRegions];
    for (int i = 0; i < kRegions; i++)
        regions[i] = map(&state);
    for (;;) {
        char** region = &regions[draw(&state) % kRegions];
        char* page = *region + draw(&state) % kPages * kPage;
        switch (draw(&state) % 64) {
        case 0: /* somewhere else, in the place of other memory */
            if (mremap(*region, kPages * kPage, kPages * kPage, MREMAP_MAYMOVE | MREMAP_FIXED,
                       regions[(region - regions + 1) % kRegions]) != MAP_FAILED) {
                regions[(region - regions + 1) % kRegions][0] += 1;
                *region = map(&state);
            }
            break;
        case 1:
            munmap(*region, kPages * kPage);
            *region = map(&state);
            break;
        case 2:
            madvise(page, (size_t)(*region + kPages * kPage - page), MADV_DONTNEED);
            break;
        case 3: /* what nobody may read keeps its bytes */
            mprotect(*region, kPages * kPage, draw(&state) % 2 ? PROT_NONE : PROT_READ);
            usleep(draw(&state) % 3000);
            mprotect(*region, kPages * kPage, PROT_READ | PROT_WRITE);
            break;
        case 4:
            if (forks && __atomic_fetch_sub(&forks, 1, __ATOMIC_RELAXED) == 1) {
                if (fork() == 0)
                    work((void*)(uintptr_t)draw(&state));
                __atomic_store_n(&forks, 0, __ATOMIC_RELAXED);
            }
            break;
        case 5:
            memset(page, 0, kPage);
            break;
        case 6:
            usleep(1);
            break;
        default:
            memcpy(page + draw(&state) % (kPage - 8), &state, 8);
        }
    }
}

int main(int count, char** words) {
    char bytes[kPages * kPage];
    for (int i = 0; i < kPages * kPage; i++)
        bytes[i] = (char)i;
    file = open(words[1], O_RDWR | O_CREAT, 0600);
    if (file < 0 || write(file, bytes, sizeof bytes) != sizeof bytes)
        return 1;
    if (count > 2 && fork() == 0)
        forks = 40;
    /* Pages that are not there and may not be touched, among others. */
    char* guarded =
        mmap(NULL, 64 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(guarded, 1, 64 * kPage);
    madvise(guarded + 10 * kPage, 3 * kPage, kGuardInstall);
    pthread_t thread;
    for (uintptr_t i = 1; i < kThreads; i++)
        pthread_create(&thread, NULL, work, (void*)(i + (uintptr_t)getpid()));
    puts("ready");
    fflush(stdout);
    work((void*)(uintptr_t)getpid());
}
