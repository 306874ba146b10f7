// Memory of the host that the driver holds: what of it is noted is in pinned.h.
#include "handlers.h"
#include "pinned.h"

namespace flowgpu::handle {

namespace {

CUresult noted(CUresult result, void* const* place, size_t bytes, unsigned register_flags) {
    if (result == CUDA_SUCCESS)
        pinned::note(*place, bytes, register_flags);
    return result;
}

CUresult ended(CUresult result, void* address) {
    if (result == CUDA_SUCCESS)
        pinned::forget(address);
    return result;
}

} // namespace

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned Flags) {
    return noted(FG_REAL(cuMemHostAlloc)(pp, bytesize, Flags), pp, bytesize, 0);
}

CUresult cuMemAllocHost(void** pp, unsigned bytesize) {
    return noted(FG_REAL(cuMemAllocHost)(pp, bytesize), pp, bytesize, 0);
}

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) {
    return noted(FG_REAL(cuMemAllocHost_v2)(pp, bytesize), pp, bytesize, 0);
}

CUresult cuMemFreeHost(void* p) {
    return ended(FG_REAL(cuMemFreeHost)(p), p);
}

CUresult cuMemHostRegister(void* p, size_t bytesize, unsigned Flags) {
    return noted(FG_REAL(cuMemHostRegister)(p, bytesize, Flags), &p, bytesize, Flags);
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned Flags) {
    return noted(FG_REAL(cuMemHostRegister_v2)(p, bytesize, Flags), &p, bytesize, Flags);
}

CUresult cuMemHostUnregister(void* p) {
    return ended(FG_REAL(cuMemHostUnregister)(p), p);
}

} // namespace flowgpu::handle
