// Virtual memory management: reservations, allocations as handles, mappings, export and import.
#include "client.h"

#include <sys/mman.h>

namespace flowgpu::emu {

namespace {

constexpr unsigned int kOtherTypes =
    CU_MEM_HANDLE_TYPE_WIN32 | CU_MEM_HANDLE_TYPE_WIN32_KMT | CU_MEM_HANDLE_TYPE_FABRIC;

// Device memory only; host locations and other handle types are refused by name.
CUresult check_properties(const CUmemAllocationProp* prop) {
    if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return unsupported("cuMemCreate outside a device");
    }
    // Compression is a hint that is not taken.
    if (prop->allocFlags.usage != 0) {
        return unsupported("cuMemCreate of a tile pool");
    }
    if (prop->win32HandleMetaData != nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // Measured: bits that name no type are not looked at.
    if ((prop->requestedHandleTypes & kOtherTypes) != 0) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t alignment,
                                     CUdeviceptr hint, unsigned long long flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    const bool power_of_two = (alignment & (alignment - 1)) == 0;
    if (pointer == nullptr || size == 0 || size % kGranularity != 0 || !power_of_two ||
        flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const size_t align = alignment > kGranularity ? alignment : kGranularity;
    void* at = size < kPlaces && align <= kPlaces
                   ? reserve_small(size, align)
                   : reserve_large(size, std::max<size_t>(align, kPlaces), hint);
    if (at == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const auto address = reinterpret_cast<uint64_t>(at);
    const CUresult r = rpc(Op::AddressReserve, outs(), address, uint64_t{size});
    if (r != CUDA_SUCCESS) {
        unreserve(at, size);
        return r;
    }
    *pointer = address;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    Entry entry;
    const CUresult r = rpc(Op::AddressFree, outs(), uint64_t{pointer}, uint64_t{size});
    if (r == CUDA_SUCCESS) {
        unreserve(reinterpret_cast<void*>(pointer), size);
    }
    return r;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                             const CUmemAllocationProp* prop, unsigned long long flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (handle == nullptr || flags != 0 || size == 0 || size % kGranularity != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = check_properties(prop); r != CUDA_SUCCESS) {
        return r;
    }
    return rpc(Op::MemCreate, outs(handle), uint64_t{size}, prop->location.id,
               static_cast<uint32_t>(prop->requestedHandleTypes),
               uint8_t{prop->allocFlags.gpuDirectRDMACapable});
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    return rpc(Op::MemRelease, outs(), uint64_t{handle});
}

CUresult CUDAAPI cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE
                      : rpc(Op::MemMap, outs(), uint64_t{pointer}, uint64_t{size}, uint64_t{offset},
                            uint64_t{handle});
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr pointer, size_t size) {
    return rpc(Op::MemUnmap, outs(), uint64_t{pointer}, uint64_t{size});
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* access,
                                size_t count) {
    Call call(Op::MemSetAccess);
    return set_access(call.in(uint64_t{pointer}).in(uint64_t{size}), access, count);
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                CUdeviceptr pointer) {
    if (flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return rpc(Op::MemGetAccess, outs(flags), location->id, uint64_t{pointer});
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags option) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (granularity == nullptr || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                                   option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = check_properties(prop); r != CUDA_SUCCESS) {
        return r;
    }
    *granularity = kGranularity;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type,
                                              unsigned long long flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (out == nullptr || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    Call call(Op::MemExport);
    call.in(uint64_t{handle});
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        if (!call.received_fd()) {
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        *static_cast<int*>(out) = call.received_fd().release();
    }
    return r;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os,
                                                CUmemAllocationHandleType type) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (handle == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    Call call(Op::MemImport);
    call.attach(static_cast<int>(reinterpret_cast<intptr_t>(os)));
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        *handle = call.take<uint64_t>();
    }
    return r;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    return handle == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::MemRetainHandle, outs(handle), reinterpret_cast<uint64_t>(address));
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                        CUmemGenericAllocationHandle handle) {
    Entry entry;
    if (prop == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int device = 0;
    uint32_t types = 0;
    uint8_t rdma = 0;
    const CUresult r = rpc(Op::MemHandleProperties, outs(&device, &types, &rdma), uint64_t{handle});
    if (r == CUDA_SUCCESS) {
        *prop = {};
        prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
        prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        prop->location.id = device;
        prop->allocFlags.gpuDirectRDMACapable = rdma;
    }
    return r;
}

} // extern "C"
