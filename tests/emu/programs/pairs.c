// Creates and destroys events and streams, and says how much memory of the host that leaves.
// Usage: pairs COUNT; prints the handles that were given out, as far as they differ, and the bytes
// that are resident more than after a tenth of the pairs.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define MOST 65536

static uintptr_t handles[MOST];
static unsigned distinct;

static long resident(void) {
    long pages = -1;
    FILE* file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*d %ld", &pages) != 1)
        exit(2);
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

// A set by a hash of the address.
static void note(const void* handle) {
    uintptr_t given = (uintptr_t)handle;
    for (unsigned at = (unsigned)(given * 0x9e3779b97f4a7c15u >> 48);; at = (at + 1) % MOST) {
        if (handles[at] == given)
            return;
        if (!handles[at]) {
            handles[at] = given;
            if (++distinct == MOST)
                exit(3);
            return;
        }
    }
}

static void pair(long number) {
    CUevent event;
    CUstream stream;
    if (cuEventCreate(&event, 0) != CUDA_SUCCESS)
        exit(4);
    note(event);
    if (cuEventDestroy_v2(event) != CUDA_SUCCESS)
        exit(5);
    if (number % 8)
        return;
    if (cuStreamCreate(&stream, 0) != CUDA_SUCCESS)
        exit(6);
    note(stream);
    if (cuStreamDestroy_v2(stream) != CUDA_SUCCESS)
        exit(7);
}

int main(int argc, char** argv) {
    CUcontext context;
    if (argc != 2 || cuInit(0) != CUDA_SUCCESS ||
        cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
        cuCtxSetCurrent(context) != CUDA_SUCCESS)
        return 1;
    long count = atol(argv[1]), before = 0;
    for (long i = 0; i < count; i++) {
        if (i == count / 10)
            before = resident();
        pair(i);
    }
    printf("%u %ld\n", distinct, resident() - before);
    return 0;
}
