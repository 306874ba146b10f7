// PyTorch: libc10_cuda.so calls c10::reportMemoryUsageToProfiler, which libc10.so exports, through
// its PLT for every block that the caching allocator gives out (bytes > 0) or takes back (< 0),
// profiler or not, with the allocator's lock held. The same for expandable segments, private pools
// and pools of the program's own.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memstub.h"

namespace {

// c10::Device: trivially copyable, so it comes in a register.
struct Device {
    int8_t type;
    int8_t index;
};
constexpr int8_t kCuda = 1; // c10::DeviceType::CUDA

using Report = void (*)(void*, int64_t, size_t, size_t, Device);

} // namespace

#define FGM_REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE

FGM_EXPORT void FGM_REPORT(void* address, int64_t bytes, size_t allocated, size_t reserved,
                           Device device) {
    using namespace flowgpu;
    // Host memory is reported too while a profiler runs.
    if (device.type == kCuda && bytes > 0)
        memstub::allocated(address, static_cast<size_t>(bytes), static_cast<uint8_t>(device.index));
    else if (device.type == kCuda && bytes < 0)
        memstub::freed(address);
    static std::atomic<Report> next{nullptr};
    static std::atomic<bool> looked{false};
    if (!looked.load(std::memory_order_acquire)) {
        next.store(reinterpret_cast<Report>(memstub::next_definition(
            FGM_NAME_OF(FGM_REPORT), reinterpret_cast<const void*>(&FGM_REPORT))));
        looked.store(true, std::memory_order_release);
    }
    if (Report report = next.load(std::memory_order_relaxed))
        report(address, bytes, allocated, reserved, device);
}
