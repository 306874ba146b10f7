// Device memory, host memory, copies and memsets.
#include "client.h"

#include <climits>
#include <sys/mman.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

uint64_t address_of(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer);
}

uint64_t handle_of(CUstream stream) {
    return reinterpret_cast<uint64_t>(stream);
}

CUresult copy(MemSide to, uint64_t dst, MemSide from, uint64_t src, size_t size, Ordering ordering,
              CUstream stream) {
    return rpc(Op::Memcpy, outs(), to, dst, from, src, uint64_t{size}, ordering, handle_of(stream));
}

CUresult fill(CUdeviceptr dst, size_t pitch, uint32_t element, uint32_t value, size_t width,
              size_t height, Ordering ordering, CUstream stream) {
    return rpc(Op::Memset, outs(), uint64_t{dst}, uint64_t{pitch}, element, value, uint64_t{width},
               uint64_t{height}, ordering, handle_of(stream));
}

CUresult shaped(const CUDA_MEMCPY3D& what, Ordering ordering, CUstream stream) {
    return rpc(Op::MemcpyShaped, outs(), what, ordering, handle_of(stream));
}

CUresult copy_2d(const CUDA_MEMCPY2D* copy, Ordering ordering, CUstream stream) {
    if (copy == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_MEMCPY3D what{};
    what.srcXInBytes = copy->srcXInBytes;
    what.srcY = copy->srcY;
    what.srcMemoryType = copy->srcMemoryType;
    what.srcHost = copy->srcHost;
    what.srcDevice = copy->srcDevice;
    what.srcArray = copy->srcArray;
    what.srcPitch = copy->srcPitch;
    what.dstXInBytes = copy->dstXInBytes;
    what.dstY = copy->dstY;
    what.dstMemoryType = copy->dstMemoryType;
    what.dstHost = copy->dstHost;
    what.dstDevice = copy->dstDevice;
    what.dstArray = copy->dstArray;
    what.dstPitch = copy->dstPitch;
    what.WidthInBytes = copy->WidthInBytes;
    what.Height = copy->Height;
    what.Depth = 1;
    return shaped(what, ordering, stream);
}

CUresult copy_3d(const CUDA_MEMCPY3D* copy, Ordering ordering, CUstream stream) {
    return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : shaped(*copy, ordering, stream);
}

// One row, of bytes: what cuMemcpyHtoA and its like copy.
struct Row {
    CUDA_MEMCPY3D what{};

    explicit Row(size_t size) {
        what.WidthInBytes = size;
        what.Height = what.Depth = 1;
    }
    Row& from_array(CUarray array, size_t offset) {
        what.srcMemoryType = CU_MEMORYTYPE_ARRAY;
        what.srcArray = array;
        what.srcXInBytes = offset;
        return *this;
    }
    Row& to_array(CUarray array, size_t offset) {
        what.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        what.dstArray = array;
        what.dstXInBytes = offset;
        return *this;
    }
    Row& from_host(const void* host) {
        what.srcMemoryType = CU_MEMORYTYPE_HOST;
        what.srcHost = host;
        return *this;
    }
    Row& to_host(void* host) {
        what.dstMemoryType = CU_MEMORYTYPE_HOST;
        what.dstHost = host;
        return *this;
    }
    Row& from_device(CUdeviceptr device) {
        what.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        what.srcDevice = device;
        return *this;
    }
    Row& to_device(CUdeviceptr device) {
        what.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        what.dstDevice = device;
        return *this;
    }
};

// A wrong argument, which a driver finds after it has found the context.
CUresult invalid() {
    size_t free = 0;
    size_t total = 0;
    const CUresult r = rpc(Op::MemGetInfo, outs(&free, &total));
    return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
}

size_t pages(size_t size) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    return (size + page - 1) / page * page;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuMemGetInfo_v2(size_t* free, size_t* total) {
    return rpc(Op::MemGetInfo, outs(free, total));
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
    return pointer == nullptr || size == 0 ? invalid()
                                           : rpc(Op::MemAlloc, outs(pointer), uint64_t{size});
}

CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr* pointer, size_t* pitch, size_t width,
                                    size_t height, unsigned int element) {
    if (pointer == nullptr || pitch == nullptr || width == 0 || height == 0 ||
        (element != 4 && element != 8 && element != 16)) {
        return invalid();
    }
    *pitch = (width + kSmallAlignment - 1) / kSmallAlignment * kSmallAlignment;
    return cuMemAlloc_v2(pointer, *pitch * height);
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr pointer) {
    Entry entry;
    const CUresult r = rpc(Op::MemFree, outs(), uint64_t{pointer});
    if (r == CUDA_SUCCESS) {
        drop_managed(pointer);
    }
    return r;
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr* pointer, size_t size, CUstream stream) {
    return pointer == nullptr ? invalid()
                              : rpc(Op::MemAllocAsync, outs(pointer), uint64_t{size}, uint64_t{0},
                                    handle_of(stream));
}

CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr* pointer, size_t size, CUmemoryPool pool,
                                         CUstream stream) {
    const auto from = reinterpret_cast<uint64_t>(pool);
    return pointer == nullptr || pool == nullptr ? CUDA_ERROR_INVALID_VALUE
           : is_managed_pool(from) ? allocate_from_managed_pool(size, from, stream, pointer)
                                   : rpc(Op::MemAllocAsync, outs(pointer), uint64_t{size},
                                         reinterpret_cast<uint64_t>(pool), handle_of(stream));
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    if (managed_pool_of(pointer) != 0) {
        const CUresult r = cuStreamSynchronize(stream);
        return r == CUDA_SUCCESS ? cuMemFree_v2(pointer) : r;
    }
    return rpc(Op::MemFreeAsync, outs(), uint64_t{pointer}, handle_of(stream));
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* props) {
    if (pool == nullptr || props == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        return make_managed_pool(*props, pool);
    }
    const CUmemLocation& at = props->location;
    if (props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        at.type < CU_MEM_LOCATION_TYPE_DEVICE || at.type > CU_MEM_LOCATION_TYPE_HOST_NUMA) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (props->handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
        return unsupported("a pool that is shared");
    }
    return rpc(Op::PoolCreate, outs(pool), at);
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool) {
    return end_managed_pool(reinterpret_cast<uint64_t>(pool))
               ? rpc(Op::PoolDestroy, outs(), reinterpret_cast<uint64_t>(pool))
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location,
                                        CUmemAllocationType type) {
    if (pool == nullptr || location == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        return default_managed_pool(*location, pool);
    }
    return type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type == CU_MEM_LOCATION_TYPE_DEVICE
               ? rpc(Op::DefaultPool, outs(pool), location->id)
               : unsupported("a default pool that is not of a device");
}

CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location,
                                 CUmemAllocationType type) {
    if (pool == nullptr || location == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        return current_managed_pool(*location, pool);
    }
    const bool of_device =
        type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type == CU_MEM_LOCATION_TYPE_DEVICE;
    return of_device ? rpc(Op::CurrentPool, outs(pool), location->id)
                     : cuMemGetDefaultMemPool(pool, location, type);
}

CUresult CUDAAPI cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type,
                                 CUmemoryPool pool) {
    if (location == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        return set_managed_pool(*location, reinterpret_cast<uint64_t>(pool));
    }
    return type == CU_MEM_ALLOCATION_TYPE_PINNED && location->type == CU_MEM_LOCATION_TYPE_DEVICE
               ? cuDeviceSetMemPool(location->id, pool)
               : unsupported("a pool that is not of a device");
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    return pool == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::DefaultPool, outs(pool), device);
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
    return pool == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::CurrentPool, outs(pool), device);
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    return rpc(Op::SetCurrentPool, outs(), device, reinterpret_cast<uint64_t>(pool));
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                       void* value) {
    uint64_t wide = 0;
    if (value == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = rpc(Op::PoolGetAttribute, outs(&wide), reinterpret_cast<uint64_t>(pool),
                           static_cast<int>(attribute));
    if (r == CUDA_SUCCESS) {
        const bool narrow = attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
        const bool reserved = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ||
                              attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        if (attribute >= CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) {
            wide += bytes_of_managed_pool(reinterpret_cast<uint64_t>(pool), reserved);
        }
        std::memcpy(value, &wide, narrow ? sizeof(int) : sizeof wide);
    }
    return r;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                       void* value) {
    uint64_t wide = 0;
    if (value == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const bool narrow = attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    std::memcpy(&wide, value, narrow ? sizeof(int) : sizeof wide);
    return rpc(Op::PoolSetAttribute, outs(), reinterpret_cast<uint64_t>(pool),
               static_cast<int>(attribute), wide);
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access,
                                    size_t count) {
    Call call(Op::PoolSetAccess);
    return set_access(call.in(reinterpret_cast<uint64_t>(pool)), access, count);
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool pool,
                                    CUmemLocation* location) {
    return flags == nullptr || location == nullptr || location->type != CU_MEM_LOCATION_TYPE_DEVICE
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::PoolGetAccess, outs(flags), reinterpret_cast<uint64_t>(pool),
                     location->id);
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    return rpc(Op::PoolTrim, outs(), reinterpret_cast<uint64_t>(pool), uint64_t{keep});
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
    return rpc(Op::MemAddressRange, outs(base, size), uint64_t{pointer});
}

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                       CUdeviceptr pointer) {
    if (data == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT ||
        attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE) {
        if (const uint64_t pool = managed_pool_of(pointer); pool != 0) {
            const uint64_t value = attribute == CU_POINTER_ATTRIBUTE_CONTEXT ? 0 : pool;
            std::memcpy(data, &value, sizeof value);
            return CUDA_SUCCESS;
        }
    }
    Call call(Op::PointerAttribute);
    call.in(static_cast<int>(attribute)).in(uint64_t{pointer});
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        const std::string_view value = call.take_blob();
        std::memcpy(data, value.data(), value.size());
    }
    return r;
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes,
                                        void** data, CUdeviceptr pointer) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (count == 0 || attributes == nullptr || data == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // An attribute that the pointer does not have is zero here, and no error.
    for (unsigned int i = 0; i < count; ++i) {
        if (cuPointerGetAttribute(data[i], attributes[i], pointer) == CUDA_SUCCESS) {
            continue;
        }
        switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<int*>(data[i]) =
                attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? CU_DEVICE_INVALID : 0;
            break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_MAPPED:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
            *static_cast<bool*>(data[i]) = false;
            break;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<uint64_t*>(data[i]) = 0;
            break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: // measured: left as it is
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostAlloc(void** pointer, size_t size, unsigned int flags) {
    constexpr unsigned int kKnown =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (pointer == nullptr || size == 0 || (flags & ~kKnown) != 0) {
        return invalid();
    }
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    // Shared like the real driver's, so that a dump sees the same kind of mapping.
    void* memory =
        ::mmap(nullptr, pages(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const CUresult r =
        rpc(Op::HostRegister, outs(), address_of(memory), uint64_t{size}, flags, uint8_t{1});
    if (r != CUDA_SUCCESS) {
        ::munmap(memory, pages(size));
        return r;
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.host_memory[memory] = pages(size);
    *pointer = memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocHost_v2(void** pointer, size_t size) {
    return cuMemHostAlloc(pointer, size, 0);
}

CUresult CUDAAPI cuMemFreeHost(void* pointer) {
    Entry entry;
    if (pointer == nullptr) {
        return entry.status();
    }
    const CUresult r = rpc(Op::HostUnregister, outs(), address_of(pointer), uint8_t{1});
    if (r == CUDA_SUCCESS) {
        Process& p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        const auto found = p.host_memory.find(pointer);
        if (found != p.host_memory.end()) {
            ::munmap(found->first, found->second);
            p.host_memory.erase(found);
        }
    }
    return r;
}

CUresult CUDAAPI cuMemHostRegister_v2(void* pointer, size_t size, unsigned int flags) {
    constexpr unsigned int kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                    CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
    return pointer == nullptr || size == 0 || (flags & ~kKnown) != 0
               ? invalid()
               : rpc(Op::HostRegister, outs(), address_of(pointer), uint64_t{size}, flags,
                     uint8_t{0});
}

CUresult CUDAAPI cuMemHostUnregister(void* pointer) {
    return pointer == nullptr ? CUDA_ERROR_INVALID_VALUE
                              : rpc(Op::HostUnregister, outs(), address_of(pointer), uint8_t{0});
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned int* flags, void* pointer) {
    return flags == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::HostFlags, outs(flags), address_of(pointer));
}

CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned int flags) {
    if (out == nullptr || flags != 0) {
        return invalid();
    }
    const CUresult r = rpc(Op::HostPointer, outs(), address_of(pointer));
    if (r == CUDA_SUCCESS) {
        *out = address_of(pointer);
    }
    return r == CUDA_ERROR_NOT_SUPPORTED ? unsupported("cuMemHostGetDevicePointer_v2") : r;
}

CUresult CUDAAPI cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t size) {
    return copy(MemSide::kUnified, dst, MemSide::kUnified, src, size, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    return copy(MemSide::kUnified, dst, MemSide::kUnified, src, size, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext, size_t size) {
    return copy(MemSide::kDevice, dst, MemSide::kDevice, src, size, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext,
                                   size_t size, CUstream stream) {
    return copy(MemSide::kDevice, dst, MemSide::kDevice, src, size, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t size) {
    return copy(MemSide::kDevice, dst, MemSide::kHost, address_of(src), size, Ordering::kSync,
                nullptr);
}

CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t size,
                                      CUstream stream) {
    return copy(MemSide::kDevice, dst, MemSide::kHost, address_of(src), size, Ordering::kAsync,
                stream);
}

CUresult CUDAAPI cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t size) {
    return copy(MemSide::kHost, address_of(dst), MemSide::kDevice, src, size, Ordering::kSync,
                nullptr);
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t size, CUstream stream) {
    return copy(MemSide::kHost, address_of(dst), MemSide::kDevice, src, size, Ordering::kAsync,
                stream);
}

CUresult CUDAAPI cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t size) {
    return copy(MemSide::kDevice, dst, MemSide::kDevice, src, size, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t size,
                                      CUstream stream) {
    return copy(MemSide::kDevice, dst, MemSide::kDevice, src, size, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpy2D_v2(const CUDA_MEMCPY2D* what) {
    return copy_2d(what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* what) {
    return copy_2d(what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* what, CUstream stream) {
    return copy_2d(what, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpy3D_v2(const CUDA_MEMCPY3D* what) {
    return copy_3d(what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* what, CUstream stream) {
    return copy_3d(what, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpyHtoA_v2(CUarray dst, size_t offset, const void* src, size_t size) {
    return shaped(Row(size).from_host(src).to_array(dst, offset).what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyHtoAAsync_v2(CUarray dst, size_t offset, const void* src, size_t size,
                                      CUstream stream) {
    return shaped(Row(size).from_host(src).to_array(dst, offset).what, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpyAtoH_v2(void* dst, CUarray src, size_t offset, size_t size) {
    return shaped(Row(size).from_array(src, offset).to_host(dst).what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyAtoHAsync_v2(void* dst, CUarray src, size_t offset, size_t size,
                                      CUstream stream) {
    return shaped(Row(size).from_array(src, offset).to_host(dst).what, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemcpyDtoA_v2(CUarray dst, size_t offset, CUdeviceptr src, size_t size) {
    return shaped(Row(size).from_device(src).to_array(dst, offset).what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyAtoD_v2(CUdeviceptr dst, CUarray src, size_t offset, size_t size) {
    return shaped(Row(size).from_array(src, offset).to_device(dst).what, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemcpyAtoA_v2(CUarray dst, size_t dst_offset, CUarray src, size_t src_offset,
                                 size_t size) {
    return shaped(Row(size).from_array(src, src_offset).to_array(dst, dst_offset).what,
                  Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count) {
    return fill(dst, 0, 1, value, count, 1, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, size_t count) {
    return fill(dst, 0, 2, value, count, 1, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD32_v2(CUdeviceptr dst, unsigned int value, size_t count) {
    return fill(dst, 0, 4, value, count, 1, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count,
                                 CUstream stream) {
    return fill(dst, 0, 1, value, count, 1, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count,
                                  CUstream stream) {
    return fill(dst, 0, 2, value, count, 1, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count,
                                  CUstream stream) {
    return fill(dst, 0, 4, value, count, 1, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width,
                                 size_t height) {
    return fill(dst, pitch, 1, value, width, height, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD2D16_v2(CUdeviceptr dst, size_t pitch, unsigned short value, size_t width,
                                  size_t height) {
    return fill(dst, pitch, 2, value, width, height, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD2D32_v2(CUdeviceptr dst, size_t pitch, unsigned int value, size_t width,
                                  size_t height) {
    return fill(dst, pitch, 4, value, width, height, Ordering::kSync, nullptr);
}

CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width,
                                   size_t height, CUstream stream) {
    return fill(dst, pitch, 1, value, width, height, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr dst, size_t pitch, unsigned short value,
                                    size_t width, size_t height, CUstream stream) {
    return fill(dst, pitch, 2, value, width, height, Ordering::kAsync, stream);
}

CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr dst, size_t pitch, unsigned int value, size_t width,
                                    size_t height, CUstream stream) {
    return fill(dst, pitch, 4, value, width, height, Ordering::kAsync, stream);
}

} // extern "C"
