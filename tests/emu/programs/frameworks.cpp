// A library with the interfaces of the frameworks' allocators that native/memstub takes over.
//   -DPART_CORE  as libc10.so: exports the function that the allocator reports to
//   -DPART_CUDA  as libc10_cuda.so: a caching allocator that calls it through its PLT
//   -DPART_BFC   as TensorFlow's: an allocator with virtual functions
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define EXPORT __attribute__((visibility("default")))

namespace c10 {
struct Device {
    int8_t type;
    int8_t index;
};
EXPORT void reportMemoryUsageToProfiler(void* address, int64_t bytes, size_t allocated,
                                        size_t reserved, Device device);
} // namespace c10

#ifdef PART_CORE
static int64_t profiled;
namespace c10 {
void reportMemoryUsageToProfiler(void*, int64_t bytes, size_t allocated, size_t reserved,
                                 Device device) {
    if (allocated == 11 && reserved == 22 && device.type == 1)
        profiled += bytes;
}
} // namespace c10
extern "C" EXPORT int64_t profiled_bytes() {
    return profiled;
}
#endif

#ifdef PART_CUDA
extern "C" EXPORT void report(uint64_t address, int64_t bytes, int device) {
    c10::reportMemoryUsageToProfiler(reinterpret_cast<void*>(address), bytes, 11, 22,
                                     c10::Device{1, static_cast<int8_t>(device)});
}
#endif

#ifdef PART_BFC
namespace tsl {
struct AllocationAttributes {
    int unused;
};
class Allocator {
  public:
    virtual ~Allocator() = default;
    virtual void* AllocateRaw(size_t alignment, size_t bytes,
                              const AllocationAttributes& attributes) = 0;
    virtual void DeallocateRaw(void* address) = 0;
};
class EXPORT BFCAllocator : public Allocator {
  public:
    void* AllocateRaw(size_t alignment, size_t bytes, const AllocationAttributes&) override;
    void DeallocateRaw(void* address) override;
};
void* BFCAllocator::AllocateRaw(size_t alignment, size_t bytes, const AllocationAttributes&) {
    return bytes > (1u << 30) ? nullptr : aligned_alloc(alignment, bytes);
}
void BFCAllocator::DeallocateRaw(void* address) {
    free(address);
}
} // namespace tsl
static tsl::Allocator* allocator = new tsl::BFCAllocator();
extern "C" EXPORT void* allocate(size_t bytes) {
    return allocator->AllocateRaw(64, bytes, tsl::AllocationAttributes{});
}
extern "C" EXPORT void deallocate(void* address) {
    allocator->DeallocateRaw(address);
}
#endif
