// Memory: cuMemAlloc and its kin live in the window; the queries go on answering as the driver
// would without us.
#include <algorithm>
#include <cstring>

#include "addresses.h"
#include "handlers.h"
#include "ipc.h"
#include "memstub.h"
#include "pools.h"
#include "replay/record.h"
#include "task.h"

namespace flowgpu::handle {

using addresses::Place;
using addresses::place_of;

namespace {

constexpr size_t kPitchAlignment = 512; // what cuMemAllocPitch answers on sm_80 to sm_100

CUresult current(CUdevice* device, CUcontext* context) {
    CUresult result = FG_REAL(cuCtxGetCurrent)(context);
    return result == CUDA_SUCCESS ? FG_REAL(cuCtxGetDevice)(device) : result;
}

// The error a fault has left in the current context: cuMemAlloc answers it, but a piece of a block
// that exists needs no driver call. Not asked during a capture, which a query would break.
CUresult context_error() {
    if (task().captures.load())
        return CUDA_SUCCESS;
    CUresult result = FG_REAL(cuStreamQuery)(nullptr);
    return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
}

// Where a capture would not see an allocation or its end the driver refuses it, and breaks the
// capture; our blocks are made and ended by calls that it never forbids. So it is asked for one of
// its own.
CUresult capture_error() {
    if (!task().captures.load())
        return CUDA_SUCCESS;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    FG_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    const bool forbids = mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    FG_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    CUdeviceptr probe = 0;
    if (!forbids)
        return CUDA_SUCCESS;
    CUresult result = FG_REAL(cuMemAlloc_v2)(&probe, 1);
    if (result == CUDA_SUCCESS)
        FG_REAL(cuMemFree_v2)(probe);
    return result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? result : CUDA_SUCCESS;
}

// What the driver answers to an address that it has not: first it looks at the context.
CUresult wrong(CUresult result, CUresult context = context_error()) {
    return context == CUDA_SUCCESS ? result : context;
}

// Of cuMemFree, for which no context need be the current one (H100, driver 580).
CUresult free_error() {
    CUresult result = context_error();
    return result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_SUCCESS : result;
}

// Waits for the work of the context an allocation belongs to, as cuMemFree does.
CUresult drain(CUcontext owner) {
    CUcontext now = nullptr;
    FG_REAL(cuCtxGetCurrent)(&now);
    if (now == owner)
        return FG_REAL(cuCtxSynchronize)();
    CUresult result = FG_REAL(cuCtxPushCurrent_v2)(owner);
    if (result != CUDA_SUCCESS)
        return result;
    result = FG_REAL(cuCtxSynchronize)();
    FG_REAL(cuCtxPopCurrent_v2)(&now);
    return result;
}

CUresult release(CUdeviceptr address) {
    Task& t = task();
    CUresult result = t.memory.release(address);
    addresses::taken();
    t.update_page();
    return result;
}

// Memory that is the driver's alone; `free` asks the driver.
template <class Free> CUresult free_foreign(CUdeviceptr address, Free&& free) {
    pools::Ending ending(address);
    return ending.done(free());
}

// An allocation that begins there: of the window, or of a pool's and ours by now.
bool starts_at(CUdeviceptr address, Allocation* found) {
    return (task().memory.find(address, found) || pools::find(address, found)) &&
           found->address == address;
}

CUresult release(const Allocation& allocation) {
    if (allocation.block)
        return release(allocation.address);
    CUresult result = pools::release(allocation.address);
    task().update_page();
    return result;
}

using StreamCall = CUresult (*)(CUstream);
using FreeAsync = CUresult (*)(CUdeviceptr, CUstream);

// The driver takes memory from cuMemAlloc here as well. Ours cannot be unmapped in the order of a
// stream, so the caller waits.
CUresult free_async(CUdeviceptr address, CUstream stream, StreamCall wait, FreeAsync real) {
    Allocation allocation;
    if (task().captures.load() || !starts_at(address, &allocation))
        return free_foreign(address, [=] { return real(address, stream); });
    CUresult result = wait(stream);
    return result == CUDA_SUCCESS ? release(allocation) : result;
}

CUresult note_foreign(CUresult result, CUdeviceptr* address, size_t bytes) {
    if (result == CUDA_SUCCESS && address && *address)
        task().add_foreign(*address, bytes);
    return result;
}

CUresult note_variable(CUresult result, const CUdeviceptr* address) {
    if (result == CUDA_SUCCESS && address && is_managed(*address)) {
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        t.managed_variables.insert(*address);
    }
    return result;
}

// Of no bytes a pool gives none, without an error.
CUresult note_of_pool(CUresult result, CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                      CUstream stream) {
    if (result == CUDA_SUCCESS && address && *address)
        pools::given(*address, bytes, pool, stream);
    return note_foreign(result, address, bytes);
}

// A module's variable among the program's memory is one by itself.
bool find(CUdeviceptr address, Allocation* found) {
    if (!task().memory.find(address, found))
        return pools::find(address, found) || ipc::find(address, found);
    replay::variable_at(address, &found->address, &found->bytes);
    return true;
}

Allocation allocation_at(CUdeviceptr address) {
    Allocation found = {};
    find(address, &found);
    return found;
}

// What the driver would say of memory from cuMemAlloc where VMM memory answers otherwise. True when
// answered. The allocation is looked up only where it is the answer: programs that ask of every
// argument of a launch want the other attributes.
bool answer_pointer_attribute(CUpointer_attribute attribute, CUdeviceptr address, void* data) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: {
        CUcontext context = allocation_at(address).context;
        memcpy(data, &context, sizeof context);
        return true;
    }
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: {
        CUdeviceptr start = allocation_at(address).address;
        memcpy(data, &start, sizeof start);
        return true;
    }
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: {
        size_t bytes = allocation_at(address).bytes;
        memcpy(data, &bytes, sizeof bytes);
        return true;
    }
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
        uint64_t none = 0;
        memcpy(data, &none, sizeof none);
        return true;
    }
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: {
        bool capable = true; // in another way (handlers_ipc.cpp)
        memcpy(data, &capable, sizeof capable);
        return true;
    }
    default:
        return false;
    }
}

// Memory that the program maps itself is exportable, and later an import, because of us: what it
// asked for is what it may see.
void correct_handle_types(CUpointer_attribute attribute, CUdeviceptr address, void* data) {
    CUmemAllocationProp asked = {};
    if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES &&
        task().memory.asked_at(address, &asked)) {
        uint64_t types = asked.requestedHandleTypes;
        memcpy(data, &types, sizeof types);
    }
}

// Memory of a pool's that is ours by now is the mapping of a block to the driver.
void correct_pools(CUpointer_attribute attribute, CUdeviceptr address, void* data) {
    Allocation found;
    CUmemoryPool pool = nullptr;
    if (!pools::find(address, &found, &pool))
        return;
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) {
        CUcontext none = nullptr; // it is nobody's
        memcpy(data, &none, sizeof none);
    }
    if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
        memcpy(data, &pool, sizeof pool);
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
        memcpy(data, &found.address, sizeof found.address);
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
        size_t bytes = found.bytes;
        memcpy(data, &bytes, sizeof bytes);
    }
}

void correct(CUpointer_attribute attribute, CUdeviceptr address, void* data) {
    correct_handle_types(attribute, address, data);
    correct_pools(attribute, address, data);
}

} // namespace

CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    CUresult result = current(&device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!dptr || !bytesize)
        return wrong(CUDA_ERROR_INVALID_VALUE);
    result = context_error();
    if (result == CUDA_SUCCESS)
        result = capture_error();
    if (result != CUDA_SUCCESS)
        return result;
    release_deferred();
    result = task().memory.allocate(device, context, bytesize, dptr);
    if (result == CUDA_SUCCESS) {
        addresses::given(*dptr, bytesize);
        memstub::forget(*dptr, bytesize);
        task().update_page();
    }
    return result;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                            unsigned int ElementSizeBytes) {
    bool element_fits = ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16;
    if (!dptr || !pPitch || !WidthInBytes || !Height || !element_fits)
        return wrong(CUDA_ERROR_INVALID_VALUE);
    size_t pitch = (WidthInBytes + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
    CUresult result = cuMemAlloc_v2(dptr, pitch * Height);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    return result;
}

CUresult cuMemFree_v2(CUdeviceptr dptr) {
    Task& t = task();
    Allocation allocation;
    if (!starts_at(dptr, &allocation)) {
        if (t.memory.in_window(dptr))
            return wrong(CUDA_ERROR_INVALID_VALUE, free_error());
        return free_foreign(dptr, [=] { return FG_REAL(cuMemFree_v2)(dptr); });
    }
    if (t.captures.load()) {
        CUresult result = capture_error();
        if (result != CUDA_SUCCESS)
            return result;
        std::lock_guard<std::mutex> lock(t.mutex);
        auto& frees = t.deferred_frees;
        if (std::find(frees.begin(), frees.end(), dptr) != frees.end())
            return CUDA_ERROR_INVALID_VALUE;
        frees.push_back(dptr);
        return CUDA_SUCCESS;
    }
    release_deferred();
    CUresult result = free_error();
    if (result == CUDA_SUCCESS)
        result = drain(allocation.context);
    return result == CUDA_SUCCESS ? release(allocation) : result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
    Allocation allocation;
    if (!find(dptr, &allocation)) {
        if (task().memory.in_window(dptr))
            return wrong(CUDA_ERROR_NOT_FOUND);
        return FG_REAL(cuMemGetAddressRange_v2)(pbase, psize, dptr);
    }
    CUresult result = context_error();
    if (result != CUDA_SUCCESS)
        return result;
    if (pbase)
        *pbase = allocation.address;
    if (psize)
        *psize = allocation.bytes;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    Place place = place_of(ptr);
    if (place == Place::unused || (place == Place::allocated && !data))
        return CUDA_ERROR_INVALID_VALUE;
    if (place == Place::allocated)
        return answer_pointer_attribute(attribute, ptr, data)
                   ? CUDA_SUCCESS
                   : FG_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    CUresult result = FG_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    if (result == CUDA_SUCCESS)
        correct(attribute, ptr, data);
    return result;
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes,
                                void** data, CUdeviceptr ptr) {
    Place place = place_of(ptr);
    if (place == Place::unused)
        ptr = 0; // answered as any address that is not memory
    CUresult result = FG_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (result == CUDA_SUCCESS)
        for (unsigned i = 0; i < numAttributes; i++)
            if (place != Place::allocated || !answer_pointer_attribute(attributes[i], ptr, data[i]))
                correct(attributes[i], ptr, data[i]);
    return result;
}

CUresult cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
    CUresult result = FG_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    if (result == CUDA_SUCCESS) {
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        t.managed.insert(*dptr);
    }
    return note_foreign(result, dptr, bytesize);
}

// The host reaches a managed variable by its address alone (cudart asks for it by
// cuLibraryGetManaged): so the images that are loaded need not be read, that is, unpacked.
CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
    return note_variable(FG_REAL(cuModuleGetGlobal_v2)(dptr, bytes, hmod, name), dptr);
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
    return note_variable(FG_REAL(cuLibraryGetGlobal)(dptr, bytes, library, name), dptr);
}

CUresult cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary library,
                             const char* name) {
    return note_variable(FG_REAL(cuLibraryGetManaged)(dptr, bytes, library, name), dptr);
}

CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
    return note_of_pool(FG_REAL(cuMemAllocAsync)(dptr, bytesize, hStream), dptr, bytesize, nullptr,
                        hStream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
    return note_of_pool(FG_REAL(cuMemAllocAsync_ptsz)(dptr, bytesize, hStream), dptr, bytesize,
                        nullptr, hStream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                                 CUstream hStream) {
    return note_of_pool(FG_REAL(cuMemAllocFromPoolAsync)(dptr, bytesize, pool, hStream), dptr,
                        bytesize, pool, hStream);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                                      CUstream hStream) {
    return note_of_pool(FG_REAL(cuMemAllocFromPoolAsync_ptsz)(dptr, bytesize, pool, hStream), dptr,
                        bytesize, pool, hStream);
}

CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    return free_async(dptr, hStream, FG_REAL(cuStreamSynchronize), FG_REAL(cuMemFreeAsync));
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
    return free_async(dptr, hStream, FG_REAL(cuStreamSynchronize_ptsz),
                      FG_REAL(cuMemFreeAsync_ptsz));
}

} // namespace flowgpu::handle
