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
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared;
    (void)stream, (void)values, (void)extra;
    __atomic_fetch_add(&stats->inside, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&stats->launches, 1, __ATOMIC_SEQ_CST);
    for (volatile int i = 0; i < 200; i++) {
    }
    __atomic_fetch_sub(&stats->inside, 1, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
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
