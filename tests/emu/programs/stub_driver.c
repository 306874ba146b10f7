// A driver that does nothing, at once: what is left of a call's time is the intercept library's.
// It counts what reaches it in the file named by STUB_STATS.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "stats.h"

static struct Stats* stats;

CUresult cuInit(unsigned int flags) {
    (void)flags;
    stats = open_stats();
    return stats ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

CUresult cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    (void)stream;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void** values,
                        void** extra) {
    // What gate.c gives, wherever the call has waited.
    uint64_t mark = (uint64_t)function;
    unsigned sizes[] = {gx, gy, gz, bx, by, bz, shared};
    for (unsigned i = 0; i < 7; i++)
        if (sizes[i] != mark + 1 + i)
            return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)stream != mark + 8 || (uint64_t)values != mark + 9 || (uint64_t)extra != mark + 10)
        return CUDA_ERROR_INVALID_VALUE;
    __atomic_fetch_add(&stats->inside, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&stats->launches, 1, __ATOMIC_SEQ_CST);
    for (volatile int i = 0; i < 200; i++) {
    }
    __atomic_fetch_sub(&stats->inside, 1, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

CUresult cuTexRefSetMipmapLevelBias(CUtexref texture, float bias) {
    return bias == (float)(uint64_t)texture ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    (void)stream;
    function(data);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    (void)mode;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    *graph = NULL;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}
