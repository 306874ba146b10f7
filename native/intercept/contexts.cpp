#include "contexts.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "task.h"

namespace flowgpu::contexts {

namespace {

// Retains primary contexts, which the program must not see.
class AllContexts {
  public:
    AllContexts() : contexts_(task().memory.contexts()) {
        Task& t = task();
        {
            std::lock_guard<std::mutex> lock(t.mutex);
            contexts_.insert(t.contexts.begin(), t.contexts.end());
        }
        int devices = 0;
        FG_REAL(cuDeviceGetCount)(&devices);
        for (CUdevice device = 0; device < devices; device++) {
            unsigned flags = 0;
            int active = 0;
            CUcontext primary = nullptr;
            if (FG_REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS &&
                active && FG_REAL(cuDevicePrimaryCtxRetain)(&primary, device) == CUDA_SUCCESS) {
                contexts_.insert(primary);
                retained_.push_back(device);
            }
        }
    }
    ~AllContexts() {
        FG_REAL(cuCtxSetCurrent)(nullptr);
        for (CUdevice device : retained_)
            FG_REAL(cuDevicePrimaryCtxRelease_v2)(device);
    }
    const std::set<CUcontext>& get() const { return contexts_; }

  private:
    std::set<CUcontext> contexts_;
    std::vector<CUdevice> retained_;
};

uint64_t least_of(const std::set<CUcontext>& contexts) {
    uint64_t least = ~uint64_t{0};
    // A capture of the program's must not be ended by a question of ours.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    FG_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    for (CUcontext context : contexts) {
        size_t free = 0, total = 0;
        CUdevice device = 0;
        if (FG_REAL(cuCtxSetCurrent)(context) == CUDA_SUCCESS &&
            FG_REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS &&
            FG_REAL(cuMemGetInfo_v2)(&free, &total) == CUDA_SUCCESS)
            least = std::min(least, free + task().memory.room_bytes(device));
    }
    FG_REAL(cuCtxSetCurrent)(nullptr);
    return least;
}

template <typename Test> bool any_device(Test test) {
    int devices = 0;
    FG_REAL(cuDeviceGetCount)(&devices);
    for (CUdevice device = 0; device < devices; device++)
        if (test(device))
            return true;
    return false;
}

} // namespace

CUresult drain() {
    AllContexts all;
    CUresult result = CUDA_SUCCESS;
    for (CUcontext context : all.get()) {
        result = FG_REAL(cuCtxSetCurrent)(context);
        if (result == CUDA_SUCCESS)
            result = FG_REAL(cuCtxSynchronize)();
        if (result != CUDA_SUCCESS)
            break;
    }
    return result;
}

uint64_t least_free() {
    return least_of(task().memory.contexts());
}

bool on_shared_gpu() {
    return any_device([](CUdevice device) {
        // Drivers that do not know the question leave the answer alone.
        int shared = 0;
        FG_REAL(cuDeviceGetAttribute)(&shared, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device);
        return shared != 0;
    });
}

bool on_part_of_gpu() {
    return any_device([](CUdevice device) {
        // "NVIDIA A100 80GB PCIe MIG 7g.80gb": no attribute tells.
        char name[256] = {};
        FG_REAL(cuDeviceGetName)(name, sizeof name, device);
        return strstr(name, " MIG ") != nullptr;
    });
}

uint64_t least_free_of_all() {
    return least_of(AllContexts().get());
}

} // namespace flowgpu::contexts
