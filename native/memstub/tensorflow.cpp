// TensorFlow: tsl::BFCAllocator, for GPUs and (TF_CPU_ALLOCATOR_USE_BFC=true) for the host. The
// vtables refer to both functions by symbol, so every call comes here. The allocator does not tell
// its device; readers ask which memory of the program a block lies in.
#include <atomic>
#include <cstddef>

#include "flowgpu/live.h"
#include "memstub.h"

#define FGM_ALLOCATE _ZN3tsl12BFCAllocator11AllocateRawEmmRKNS_20AllocationAttributesE
#define FGM_DEALLOCATE _ZN3tsl12BFCAllocator13DeallocateRawEPv
#define FGM_SIZE _ZNK3tsl12BFCAllocator13AllocatedSizeEPKv

namespace {

using Allocate = void* (*)(void* self, size_t alignment, size_t bytes, const void* attributes);
using Deallocate = void (*)(void* self, void* address);
using SizeOf = size_t (*)(const void* self, const void* address);

std::atomic<Allocate> real_allocate{nullptr};
std::atomic<Deallocate> real_deallocate{nullptr};
std::atomic<SizeOf> real_size{nullptr};

template <typename Function>
Function real(std::atomic<Function>& slot, const char* symbol, const void* ours) {
    Function function = slot.load(std::memory_order_relaxed);
    if (__builtin_expect(function == nullptr, 0)) {
        function = reinterpret_cast<Function>(flowgpu::next_definition(symbol, ours));
        slot.store(function, std::memory_order_relaxed);
    }
    return function;
}

} // namespace

#define FGM_REAL(slot, symbol, ours) real(slot, FGM_NAME_OF(symbol), ours)

FGM_EXPORT void* FGM_ALLOCATE(void* self, size_t alignment, size_t bytes, const void* attributes) {
    auto* ours = reinterpret_cast<const void*>(&FGM_ALLOCATE);
    Allocate allocate = FGM_REAL(real_allocate, FGM_ALLOCATE, ours);
    if (!allocate)
        return nullptr; // as when the memory is used up
    void* address = allocate(self, alignment, bytes, attributes);
    if (!address)
        return nullptr;
    // What is given out is more than what is asked for, and the owner may use all of it.
    if (SizeOf size_of = FGM_REAL(real_size, FGM_SIZE, nullptr))
        bytes = size_of(self, address);
    flowgpu::memstub::changed(address, static_cast<int64_t>(bytes), FLOWGPU_LIVE_NO_DEVICE);
    return address;
}

FGM_EXPORT void FGM_DEALLOCATE(void* self, void* address) {
    auto* ours = reinterpret_cast<const void*>(&FGM_DEALLOCATE);
    // First: as soon as the allocator has it back, another thread may be given the same address.
    if (address)
        flowgpu::memstub::freed(address);
    if (Deallocate deallocate = FGM_REAL(real_deallocate, FGM_DEALLOCATE, ours))
        deallocate(self, address);
}
