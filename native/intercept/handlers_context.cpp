// Initialisation, symbol resolution, contexts, peers and stream captures.
#include "communicators.h"
#include "entrance.h"
#include "gate.h"
#include "handlers.h"
#include "managed.h"
#include "memstub.h"
#include "nvml.h"
#include "pinned.h"
#include "pools.h"
#include "replay/record.h"
#include "service.h"
#include "task.h"

namespace flowgpu::handle {

namespace {

CUresult note_context(CUresult result, CUcontext* context) {
    if (result == CUDA_SUCCESS && context) {
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        t.contexts.insert(*context);
    }
    return result;
}

// The driver frees a context's memory with the context; ours is not bound to one, so it is freed
// here.
void end_context(CUcontext context) {
    Task& t = task();
    {
        std::lock_guard<std::mutex> lock(t.mutex);
        t.contexts.erase(context);
    }
    pools::end_of(context);
    managed::end_of(context);
    pinned::end_of(context);
    t.memory.release_context(context);
    t.update_page();
}

bool primary_is_active(CUdevice device) {
    unsigned flags = 0;
    int active = 0;
    return FG_REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

using EndPrimary = CUresult (*)(CUdevice);

CUresult end_primary(CUdevice device, EndPrimary end) {
    CUcontext context = nullptr;
    if (primary_is_active(device) &&
        FG_REAL(cuDevicePrimaryCtxRetain)(&context, device) == CUDA_SUCCESS)
        FG_REAL(cuDevicePrimaryCtxRelease_v2)(device);
    managed::before_end_of(context);
    CUresult result = end(device);
    if (result == CUDA_SUCCESS && context && !primary_is_active(device))
        end_context(context);
    else
        managed::goes_on(context);
    return result;
}

CUresult destroy_context(CUcontext context, CUresult (*destroy)(CUcontext)) {
    managed::before_end_of(context);
    CUresult result = destroy(context);
    if (result == CUDA_SUCCESS)
        end_context(context);
    else
        managed::goes_on(context);
    return result;
}

CUresult change_peer(CUcontext peer, bool enabled) {
    CUdevice accessor = 0;
    CUdevice device = 0;
    CUresult result = FG_REAL(cuCtxGetDevice)(&accessor);
    if (result == CUDA_SUCCESS)
        result = FG_REAL(cuCtxPushCurrent_v2)(peer);
    if (result != CUDA_SUCCESS)
        return result;
    result = FG_REAL(cuCtxGetDevice)(&device);
    CUcontext popped = nullptr;
    FG_REAL(cuCtxPopCurrent_v2)(&popped);
    return result == CUDA_SUCCESS ? task().memory.set_peer(device, accessor, enabled) : result;
}

void count_capture(int change) {
    task().captures.fetch_add(change);
    memstub::captures_changed(task().captures);
    communicators::captures_changed(task().captures);
}

CUresult begin_capture(CUresult result) {
    if (result == CUDA_SUCCESS)
        count_capture(1);
    return result;
}

CUresult end_capture(CUresult result) {
    // A capture that was invalidated ends here as well, with an error; a stream that was not
    // capturing does not.
    if (result != CUDA_ERROR_ILLEGAL_STATE && result != CUDA_ERROR_INVALID_VALUE &&
        result != CUDA_ERROR_INVALID_HANDLE && result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED &&
        result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD && task().captures.load())
        count_capture(-1);
    return result;
}

void swap(CUresult result, void** function) {
    if (result != CUDA_SUCCESS || !function || !*function)
        return;
    if (void* ours = wrapper_for(*function)) {
        *function = ours;
        return;
    }
    Task& t = task();
    std::lock_guard<std::mutex> lock(t.mutex);
    if (t.unknown_functions.insert(*function).second)
        t.page.load()->unknown_symbols = t.unknown_functions.size();
}

} // namespace

CUresult cuInit(unsigned int Flags) {
    entrance::pass();
    CUresult result = FG_REAL(cuInit)(Flags);
    if (result != CUDA_SUCCESS) {
        entrance::leave();
    } else {
        static pthread_once_t first = PTHREAD_ONCE_INIT;
        pthread_once(&first, replay::keep_environment);
        service::start();
        // After the driver's own handlers, so that it runs before them.
        [[maybe_unused]] static const int asked = atexit([] {
            gate::begin_exit();
            nvml::wait_until_back();
        });
    }
    return result;
}

// The real resolver knows versions and stream modes; what it returns says which of our functions to
// hand out (P2).
CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
    CUresult result = FG_REAL(cuGetProcAddress)(symbol, pfn, cudaVersion, flags);
    swap(result, pfn);
    return result;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* symbolStatus) {
    CUresult result = FG_REAL(cuGetProcAddress_v2)(symbol, pfn, cudaVersion, flags, symbolStatus);
    swap(result, pfn);
    return result;
}

CUresult cuCtxCreate(CUcontext* pctx, unsigned int flags, CUdevice dev) {
    return note_context(FG_REAL(cuCtxCreate)(pctx, flags, dev), pctx);
}

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
    return note_context(FG_REAL(cuCtxCreate_v2)(pctx, flags, dev), pctx);
}

CUresult cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* params, int numParams,
                        unsigned int flags, CUdevice dev) {
    return note_context(FG_REAL(cuCtxCreate_v3)(pctx, params, numParams, flags, dev), pctx);
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* params, unsigned int flags,
                        CUdevice dev) {
    return note_context(FG_REAL(cuCtxCreate_v4)(pctx, params, flags, dev), pctx);
}

CUresult cuCtxFromGreenCtx(CUcontext* pContext, CUgreenCtx hCtx) {
    return note_context(FG_REAL(cuCtxFromGreenCtx)(pContext, hCtx), pContext);
}

CUresult cuCtxDestroy(CUcontext ctx) {
    return destroy_context(ctx, FG_REAL(cuCtxDestroy));
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
    return destroy_context(ctx, FG_REAL(cuCtxDestroy_v2));
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
    return end_primary(dev, FG_REAL(cuDevicePrimaryCtxRelease));
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    return end_primary(dev, FG_REAL(cuDevicePrimaryCtxRelease_v2));
}

CUresult cuDevicePrimaryCtxReset(CUdevice dev) {
    return end_primary(dev, FG_REAL(cuDevicePrimaryCtxReset));
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    return end_primary(dev, FG_REAL(cuDevicePrimaryCtxReset_v2));
}

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
    CUresult result = FG_REAL(cuCtxEnablePeerAccess)(peerContext, Flags);
    return result == CUDA_SUCCESS ? change_peer(peerContext, true) : result;
}

CUresult cuCtxDisablePeerAccess(CUcontext peerContext) {
    CUresult result = FG_REAL(cuCtxDisablePeerAccess)(peerContext);
    return result == CUDA_SUCCESS ? change_peer(peerContext, false) : result;
}

CUresult cuStreamBeginCapture(CUstream hStream) {
    return begin_capture(FG_REAL(cuStreamBeginCapture)(hStream));
}

CUresult cuStreamBeginCapture_ptsz(CUstream hStream) {
    return begin_capture(FG_REAL(cuStreamBeginCapture_ptsz)(hStream));
}

CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
    return begin_capture(FG_REAL(cuStreamBeginCapture_v2)(hStream, mode));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode) {
    return begin_capture(FG_REAL(cuStreamBeginCapture_v2_ptsz)(hStream, mode));
}

CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph,
                                     const CUgraphNode* dependencies,
                                     const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                     CUstreamCaptureMode mode) {
    return begin_capture(FG_REAL(cuStreamBeginCaptureToGraph)(
        hStream, hGraph, dependencies, dependencyData, numDependencies, mode));
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph,
                                          const CUgraphNode* dependencies,
                                          const CUgraphEdgeData* dependencyData,
                                          size_t numDependencies, CUstreamCaptureMode mode) {
    return begin_capture(FG_REAL(cuStreamBeginCaptureToGraph_ptsz)(
        hStream, hGraph, dependencies, dependencyData, numDependencies, mode));
}

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
    CUresult result = end_capture(FG_REAL(cuStreamEndCapture)(hStream, phGraph));
    release_deferred();
    return result;
}

CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph* phGraph) {
    CUresult result = end_capture(FG_REAL(cuStreamEndCapture_ptsz)(hStream, phGraph));
    release_deferred();
    return result;
}

} // namespace flowgpu::handle
