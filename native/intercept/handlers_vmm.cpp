// Memory that the program creates and maps itself. It holds handles of ours for it
// (native/vmm/memory.h), which every call here exchanges for the driver's; a handle that the driver
// gave passes as it is.
#include <vector>

#include "handlers.h"
#include "ipc.h"
#include "memstub.h"
#include "task.h"

namespace flowgpu::handle {

namespace {

// The window is made of mappings too, of which the driver would tell the program, and so is what a
// legacy handle opened; what it may do with such memory is nothing here.
bool ours(CUdeviceptr address) {
    return address_map().in_window(address) || ipc::is_opened(address);
}

using MapArray = CUresult (*)(CUarrayMapInfo*, unsigned int, CUstream);

// An array would hold the memory beside its mappings, where a hand-over does not look.
CUresult map_array(unsigned symbol, MapArray real, CUarrayMapInfo* list, unsigned count,
                   CUstream stream) {
    if (!list)
        return real(list, count, stream);
    std::vector<CUarrayMapInfo> translated(list, list + count);
    bool used = false;
    for (CUarrayMapInfo& info : translated) {
        if (info.memHandleType != CU_MEM_HANDLE_TYPE_GENERIC)
            continue;
        CUmemGenericAllocationHandle& handle = info.memHandle.memHandle;
        used = used || task().memory.is_program_handle(handle);
        handle = task().memory.driver_handle(handle);
    }
    CUresult result = real(translated.data(), count, stream);
    if (result == CUDA_SUCCESS && used)
        count_refused(symbol);
    return result;
}

} // namespace

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* prop, unsigned long long flags) {
    Task& t = task();
    if (!handle || !prop || !Memory::takes_over(size, *prop, flags)) {
        CUresult result = FG_REAL(cuMemCreate)(handle, size, prop, flags);
        if (result == CUDA_SUCCESS)
            t.add_not_plain(*handle, size);
        return result;
    }
    CUcontext context = nullptr; // the service thread will want one; none is no error here
    size_t limit = 0;
    if (FG_REAL(cuCtxGetLimit)(&limit, CU_LIMIT_STACK_SIZE) == CUDA_SUCCESS) // not one that ended
        FG_REAL(cuCtxGetCurrent)(&context);
    CUresult result = t.memory.create_handle(size, *prop, context, handle);
    if (result == CUDA_SUCCESS)
        t.update_page();
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Task& t = task();
    if (!t.memory.is_program_handle(handle)) {
        CUresult result = FG_REAL(cuMemRelease)(handle);
        if (result == CUDA_SUCCESS)
            t.remove_not_plain(handle);
        return result;
    }
    CUresult result = t.memory.release_handle(handle);
    t.update_page();
    return result;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
    auto address = reinterpret_cast<CUdeviceptr>(addr);
    if (ours(address))
        return CUDA_ERROR_INVALID_VALUE; // such memory has no handle
    if (handle && task().memory.retain_handle(address, handle))
        return CUDA_SUCCESS;
    return FG_REAL(cuMemRetainAllocationHandle)(handle, addr);
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    Memory& memory = task().memory;
    if (ours(ptr))
        return CUDA_ERROR_INVALID_VALUE;
    if (!memory.is_program_handle(handle))
        return FG_REAL(cuMemMap)(ptr, size, offset, handle, flags);
    CUresult result = memory.map_handle(ptr, size, offset, handle, flags);
    if (result == CUDA_SUCCESS)
        memstub::forget(ptr, size);
    return result;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    Task& t = task();
    if (ours(ptr))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = t.memory.unmap_range(ptr, size);
    t.update_page();
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
    if (ours(ptr))
        return CUDA_ERROR_INVALID_VALUE;
    return task().memory.set_access(ptr, size, desc, count);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                CUmemGenericAllocationHandle handle) {
    Memory& memory = task().memory;
    CUmemAllocationProp asked = {};
    bool known = memory.asked_for(handle, &asked);
    if (!known && memory.is_program_handle(handle))
        return CUDA_ERROR_INVALID_VALUE; // released, though a mapping keeps the memory
    CUresult result =
        FG_REAL(cuMemGetAllocationPropertiesFromHandle)(prop, memory.driver_handle(handle));
    if (result == CUDA_SUCCESS && known) {
        prop->requestedHandleTypes = asked.requestedHandleTypes;
        prop->allocFlags = asked.allocFlags;
    }
    return result;
}

CUresult cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType handleType,
                                      unsigned long long flags) {
    Memory& memory = task().memory;
    if (memory.is_program_handle(handle)) {
        const CUresult result = memory.may_export(shareableHandle, handle, handleType, flags);
        return result == CUDA_SUCCESS ? ipc::make_ticket(handle, static_cast<int*>(shareableHandle))
                                      : result;
    }
    // Whoever has the descriptor shares the memory, and whether it was closed cannot be known.
    CUresult result =
        FG_REAL(cuMemExportToShareableHandle)(shareableHandle, handle, handleType, flags);
    if (result == CUDA_SUCCESS)
        count_refused(I_cuMemExportToShareableHandle);
    return result;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
                                        CUmemAllocationHandleType shHandleType) {
    CUresult result = CUDA_SUCCESS;
    if (handle && shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
        ipc::import_ticket(static_cast<int>(reinterpret_cast<intptr_t>(osHandle)), handle,
                           &result)) {
        task().update_page();
        return result;
    }
    result = FG_REAL(cuMemImportFromShareableHandle)(handle, osHandle, shHandleType);
    if (result == CUDA_SUCCESS) // of somebody that FlowGPU does not know
        count_refused(I_cuMemImportFromShareableHandle);
    return result;
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo* mapInfoList, unsigned int count, CUstream hStream) {
    return map_array(I_cuMemMapArrayAsync, FG_REAL(cuMemMapArrayAsync), mapInfoList, count,
                     hStream);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo* mapInfoList, unsigned int count,
                                 CUstream hStream) {
    return map_array(I_cuMemMapArrayAsync_ptsz, FG_REAL(cuMemMapArrayAsync_ptsz), mapInfoList,
                     count, hStream);
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                            CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                            unsigned long long flags) {
    // A multicast object makes a checkpoint refuse already (cuMulticastCreate).
    return FG_REAL(cuMulticastBindMem)(mcHandle, mcOffset, task().memory.driver_handle(memHandle),
                                       memOffset, size, flags);
}

} // namespace flowgpu::handle
