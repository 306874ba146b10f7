// Writes to device memory and reads it back, step after step, and says a line each.
// Usage: user FILE [UID]; ends with 0 once FILE exists, with another code at a wrong byte. With UID
// it becomes that user once it has the memory.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define BYTES 4096

static void ok(CUresult result, int step) {
    if (result != CUDA_SUCCESS) {
        printf("step %d: error %d\n", step, result);
        exit(2);
    }
}

int main(int argc, char** argv) {
    CUcontext context;
    CUdeviceptr data;
    unsigned char found[BYTES];
    if (argc < 2) return 1;
    setlinebuf(stdout);
    ok(cuInit(0), -3);
    ok(cuDevicePrimaryCtxRetain(&context, 0), -2);
    ok(cuCtxSetCurrent(context), -1);
    ok(cuMemAlloc_v2(&data, BYTES), 0);
    if (argc > 2 && setuid((uid_t)atoi(argv[2]))) return 1;
    for (int step = 0; access(argv[1], F_OK); step++) {
        ok(cuMemsetD8_v2(data, (unsigned char)step, BYTES), step);
        ok(cuMemcpyDtoH_v2(found, data, BYTES), step);
        for (int at = 0; at < BYTES; at++) {
            if (found[at] != (unsigned char)step) return 3;
        }
        printf("%d %d\n", (int)getuid(), step);
        usleep(10000);
    }
    return 0;
}
