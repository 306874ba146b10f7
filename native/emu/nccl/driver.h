// The driver's functions, resolved as the CUDA runtime inside of NCCL does it.
#ifndef FLOWGPU_EMU_NCCL_DRIVER_H
#define FLOWGPU_EMU_NCCL_DRIVER_H

#include <cuda.h>

#include "api.h"

#define FN_DRIVER_FUNCTIONS(X)                                                                     \
    X(cuInit)                                                                                      \
    X(cuGetErrorName)                                                                              \
    X(cuDeviceGet)                                                                                 \
    X(cuDeviceGetCount)                                                                            \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxSetCurrent)                                                                             \
    X(cuCtxGetDevice)                                                                              \
    X(cuThreadExchangeStreamCaptureMode)                                                           \
    X(cuMemGetAllocationGranularity)                                                               \
    X(cuMemCreate)                                                                                 \
    X(cuMemRelease)                                                                                \
    X(cuMemAddressReserve)                                                                         \
    X(cuMemAddressFree)                                                                            \
    X(cuMemMap)                                                                                    \
    X(cuMemUnmap)                                                                                  \
    X(cuMemSetAccess)                                                                              \
    X(cuMemHostRegister)                                                                           \
    X(cuMemHostUnregister)                                                                         \
    X(cuMemHostGetDevicePointer)                                                                   \
    X(cuMemExportToShareableHandle)                                                                \
    X(cuMemImportFromShareableHandle)                                                              \
    X(cuMemcpyHtoDAsync)                                                                           \
    X(cuMemsetD8Async)                                                                             \
    X(cuStreamCreate)                                                                              \
    X(cuStreamDestroy)                                                                             \
    X(cuStreamSynchronize)                                                                         \
    X(cuStreamWaitEvent)                                                                           \
    X(cuStreamGetCaptureInfo)                                                                      \
    X(cuEventCreate)                                                                               \
    X(cuEventDestroy)                                                                              \
    X(cuEventRecord)                                                                               \
    X(cuEventRecordWithFlags)                                                                      \
    X(cuEventSynchronize)                                                                          \
    X(cuLibraryLoadData)                                                                           \
    X(cuLibraryGetKernel)                                                                          \
    X(cuLaunchKernel)

namespace flowgpu::nccl {

using CaptureInfo = CUresult (*)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                 const CUgraphNode**, size_t*);

struct Driver {
#define FN_MEMBER(name) void* name##_address;
    FN_DRIVER_FUNCTIONS(FN_MEMBER)
#undef FN_MEMBER
    CUkernel kernel;
};

// Null, and an error text, without a driver.
const Driver* driver();

Result cuda_failed(const char* call, CUresult result);

// A function of the driver. cuda.h makes macros of many names, so they are not handed on.
#define FN_CU(name, ...)                                                                           \
    reinterpret_cast<decltype(&::name)>(::flowgpu::nccl::driver()->name##_address)(__VA_ARGS__)
#define FN_CU_TRY(name, ...)                                                                       \
    do {                                                                                           \
        const CUresult cu_ = reinterpret_cast<decltype(&::name)>(                                  \
            ::flowgpu::nccl::driver()->name##_address)(__VA_ARGS__);                               \
        if (cu_ != CUDA_SUCCESS)                                                                   \
            return ::flowgpu::nccl::cuda_failed(#name, cu_);                                       \
    } while (false)

// Calls that a capture of another stream would refuse are made meanwhile, as NCCL makes them.
class Relaxed {
  public:
    Relaxed() { FN_CU(cuThreadExchangeStreamCaptureMode, &mode_); }
    ~Relaxed() { FN_CU(cuThreadExchangeStreamCaptureMode, &mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The context of a communicator's GPU, current for a while.
class Current {
  public:
    explicit Current(CUcontext context) {
        FN_CU(cuCtxGetCurrent, &before_);
        FN_CU(cuCtxSetCurrent, context);
    }
    ~Current() { FN_CU(cuCtxSetCurrent, before_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

  private:
    CUcontext before_ = nullptr;
};

// A piece of device memory of its own: handle, address and mapping.
struct Memory {
    CUdeviceptr address = 0;
    size_t bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
};
Result allocate(CUdevice device, size_t bytes, Memory* memory);
// Maps the memory at an address of its own, and lets `device` use it.
Result map(CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, Memory* memory);
// `with_handle`: this mapping holds a reference of its own.
void unmap(const Memory& memory, bool with_handle);

} // namespace flowgpu::nccl

#endif
