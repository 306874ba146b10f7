// A driver that answers every call with success at once: what is left of a call's time is ours.
#include <atomic>
#include <cstring>

#include "driver.h"

namespace {

template <unsigned symbol> struct Answer {
    template <typename... Arguments> static CUresult with(Arguments...) { return CUDA_SUCCESS; }
};

// What native/vmm needs to hand out memory.
template <> struct Answer<flowgpu::I_cuMemAddressReserve> {
    static CUresult with(CUdeviceptr* address, size_t, size_t, CUdeviceptr hint,
                         unsigned long long) {
        *address = hint;
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuMemGetAllocationGranularity> {
    static CUresult with(size_t* bytes, const CUmemAllocationProp*,
                         CUmemAllocationGranularity_flags) {
        *bytes = 2 << 20;
        return CUDA_SUCCESS;
    }
};

// Objects, of which the replay engine keeps a record.
template <class Handle> CUresult create(Handle* handle) {
    static std::atomic<uintptr_t> last{0};
    *handle = reinterpret_cast<Handle>(last += 64);
    return CUDA_SUCCESS;
}
template <> struct Answer<flowgpu::I_cuDevicePrimaryCtxRetain> {
    static CUresult with(CUcontext* context, CUdevice) {
        *context = reinterpret_cast<CUcontext>(64);
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuCtxGetCurrent> {
    static CUresult with(CUcontext* context) {
        *context = reinterpret_cast<CUcontext>(64);
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuDeviceGetCount> {
    static CUresult with(int* count) {
        *count = 1;
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuCtxGetDevice> {
    static CUresult with(CUdevice* device) {
        *device = 0;
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuCtxGetDevice_v2> {
    static CUresult with(CUdevice* device, CUcontext) {
        *device = 0;
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuDevicePrimaryCtxGetState> {
    static CUresult with(CUdevice, unsigned* flags, int* active) {
        *flags = 0;
        *active = 1;
        return CUDA_SUCCESS;
    }
};
// bench_calls asks for these two functions by name, as cudart does.
template <> struct Answer<flowgpu::I_cuGetProcAddress_v2> {
    static CUresult with(const char* name, void** function, int, cuuint64_t,
                         CUdriverProcAddressQueryResult*) {
        const bool launch = !strcmp(name, "cuLaunchKernel");
        *function = launch ? reinterpret_cast<void*>(&::cuLaunchKernel)
                           : reinterpret_cast<void*>(&::cuCtxGetDevice_v2);
        return CUDA_SUCCESS;
    }
};
template <> struct Answer<flowgpu::I_cuEventCreate> {
    static CUresult with(CUevent* event, unsigned) { return create(event); }
};
template <> struct Answer<flowgpu::I_cuModuleLoadData> {
    static CUresult with(CUmodule* module, const void*) { return create(module); }
};
template <> struct Answer<flowgpu::I_cuModuleGetFunction> {
    static CUresult with(CUfunction* function, CUmodule, const char*) { return create(function); }
};
template <> struct Answer<flowgpu::I_cuStreamCreate> {
    static CUresult with(CUstream* stream, unsigned) { return create(stream); }
};

} // namespace

#define FG_FORWARD(name, parameters, arguments)                                                    \
    extern "C" __attribute__((visibility("default"))) CUresult name parameters {                   \
        return Answer<flowgpu::I_##name>::with arguments;                                          \
    }
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#include "generated/api.inc"
