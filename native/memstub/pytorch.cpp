// PyTorch: libc10_cuda.so calls c10::reportMemoryUsageToProfiler, which libc10.so exports, through
// its PLT for every block that the caching allocator gives out (bytes > 0) or takes back (< 0),
// profiler or not, with the allocator's lock held. The same for expandable segments, private pools
// and pools of the program's own.
#include <cstddef>
#include <cstdint>

#include "memstub.h"

#define FGM_REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE

FGM_EXPORT void FGM_REPORT(void* address, int64_t bytes, size_t allocated, size_t reserved,
                           flowgpu::memstub::Device device) {
    using namespace flowgpu::memstub;
    constexpr int8_t kCuda = 1; // c10::DeviceType::CUDA; host memory comes while a profiler runs
    if (device.type == kCuda && bytes != 0)
        changed(address, bytes, static_cast<uint8_t>(device.index));
    auto next = reinterpret_cast<Report>(page.set.next());
    if (__builtin_expect(!next, 0))
        next = next_report();
    next(address, bytes, allocated, reserved, device);
}

namespace flowgpu::memstub {

namespace {

void no_report(void*, int64_t, size_t, size_t, Device) {}

} // namespace

Report next_report() {
    auto found = reinterpret_cast<Report>(
        next_definition(FGM_NAME_OF(FGM_REPORT), reinterpret_cast<const void*>(&FGM_REPORT)));
    Report report = found ? found : no_report;
    page.set.set_next(reinterpret_cast<const void*>(report));
    return report;
}

} // namespace flowgpu::memstub
