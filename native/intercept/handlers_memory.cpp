// Memory: cuMemAlloc and its kin live in the window; the queries go on answering as the driver
// would without us.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "gate.h"
#include "handlers.h"
#include "managed.h"
#include "memstub.h"
#include "pools.h"
#include "replay/record.h"
#include "task.h"

namespace flowgpu::handle {

namespace {

enum class AddressUse {
    outside,   // memory of the driver's, managed, of the program's own mappings, or none
    allocated, // in memory from cuMemAlloc
    unused,    // in a window or a tract, and not allocated
};

constexpr unsigned kGranuleBits = 21;
constexpr uint64_t kGranule = 1ull << kGranuleBits;
// A remembered granule is one word: a version, and the granule's number in 48 bits of address.
constexpr unsigned kNumberBits = 48 - kGranuleBits;

// What an address is, mostly without the lock of the address map: some programs ask for every
// argument of every kernel that they launch (Triton does).
//
// A thread remembers the granules that it has found to lie in one allocation, in its own record
// (gate.h), so that nothing is shared but the map's version, which changes when memory ends. An
// answer about memory that another thread is freeing meanwhile may be either, as the driver's would
// be.
AddressUse place_of(uint64_t address) {
    const AddressMap& map = address_map();
    if (!map.may_be_in_window(address))
        return AddressUse::outside;
    uint64_t granule = address >> kGranuleBits;
    uint64_t word = map.version() << kNumberBits | granule; // before the map is asked
    auto& remembered = gate::find_record()->granules[granule % gate::kGranules];
    if (remembered.load(std::memory_order_relaxed) == word && granule >> kNumberBits == 0)
        return AddressUse::allocated;
    Region found;
    constexpr Kinds kKinds = kShared | only(MemoryKind::allocation, MemoryKind::managed);
    if (!map.find(address, kKinds, &found) || found.kind == MemoryKind::managed)
        return AddressUse::outside;
    if (found.kind != MemoryKind::allocation)
        return AddressUse::unused;
    uint64_t start = granule << kGranuleBits;
    if (found.address <= start && start + kGranule <= found.address + found.bytes)
        remembered.store(word, std::memory_order_relaxed);
    return AddressUse::allocated;
}

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

// Before an allocation: what keeps the driver from one, too.
CUresult before_allocation() {
    CUresult result = context_error();
    if (result == CUDA_SUCCESS)
        result = capture_error();
    if (result == CUDA_SUCCESS)
        release_deferred();
    return result;
}

// What the driver answers to an address that it has not: first it looks at the context.
CUresult wrong(CUresult result, CUresult context = context_error()) {
    return context == CUDA_SUCCESS ? result : context;
}

// cuMemFree needs no current context, so that its absence is no error (H100, driver 580).
CUresult free_error() {
    CUresult result = context_error();
    return result == CUDA_ERROR_INVALID_CONTEXT ? CUDA_SUCCESS : result;
}

// Waits for the work of the context an allocation belongs to, as cuMemFree does.
CUresult drain(CUcontext owner) {
    CUcontext now = nullptr;
    FG_REAL(cuCtxGetCurrent)(&now);
    if (!owner)
        return CUDA_SUCCESS; // of a library, which has ended
    if (now == owner)
        return FG_REAL(cuCtxSynchronize)();
    CUresult result = FG_REAL(cuCtxPushCurrent_v2)(owner);
    if (result != CUDA_SUCCESS)
        return result;
    result = FG_REAL(cuCtxSynchronize)();
    FG_REAL(cuCtxPopCurrent_v2)(&now);
    return result;
}

// Memory that is the driver's alone; `free` asks the driver. It may give the memory to another
// thread before we know, so it is forgotten until the driver has refused.
template <class Free> CUresult free_of_driver(CUdeviceptr address, Free&& free) {
    Region ended;
    const bool known = address_map().remove(address, kOfTheDriver, &ended);
    const CUresult result = free();
    if (known && result != CUDA_SUCCESS)
        address_map().put(ended);
    if (known)
        task().driver_memory_changed();
    return result;
}

// Memory that the program frees and FlowGPU has.
constexpr Kinds kOurs = only(MemoryKind::allocation, MemoryKind::adopted, MemoryKind::managed);

CUresult release(const Region& region) {
    Task& t = task();
    CUresult result = region.kind == MemoryKind::allocation ? t.memory.release(region.address)
                      : region.kind == MemoryKind::managed  ? managed::release(region.address)
                                                            : pools::release(region.address);
    t.update_page();
    return result;
}

// Until no capture is under way, which a wait may break.
CUresult defer(CUdeviceptr address) {
    Task& t = task();
    std::lock_guard<std::mutex> lock(t.mutex);
    auto& frees = t.deferred_frees;
    if (std::find(frees.begin(), frees.end(), address) != frees.end())
        return CUDA_ERROR_INVALID_VALUE;
    frees.push_back(address);
    return CUDA_SUCCESS;
}

using StreamCall = CUresult (*)(CUstream);
using IsCapturing = CUresult (*)(CUstream, CUstreamCaptureStatus*);
using FreeAsync = CUresult (*)(CUdeviceptr, CUstream);

// The driver takes memory from cuMemAlloc here as well. Ours cannot be unmapped in the order of a
// stream, so the caller waits.
CUresult free_async(CUdeviceptr address, CUstream stream, StreamCall wait, FreeAsync real,
                    IsCapturing is_capturing) {
    Region region;
    const bool captures = task().captures.load();
    const bool ours = address_map().starts_at(address, kOurs, &region);
    if (captures && ours && region.pool) {
        CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
        const CUresult result = is_capturing(stream, &capturing);
        if (result != CUDA_SUCCESS || capturing != CU_STREAM_CAPTURE_STATUS_NONE)
            return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result;
        return defer(address);
    }
    if (captures || !ours)
        return free_of_driver(address, [=] { return real(address, stream); });
    CUresult result = wait(stream);
    return result == CUDA_SUCCESS ? release(region) : result;
}

CUresult note_variable(CUresult result, const CUdeviceptr* address) {
    Region ours;
    if (result == CUDA_SUCCESS && address && is_managed(*address) &&
        !address_map().find(*address, only(MemoryKind::managed), &ours)) {
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        t.managed_variables.insert(*address);
    }
    return result;
}

CUresult note_of_pool(CUresult result, const CUdeviceptr* address, size_t bytes, CUmemoryPool pool,
                      CUstream stream) {
    if (result == CUDA_SUCCESS && address && *address) // a pool gives none of no bytes
        pools::note(*address, bytes, pool, stream);
    return result;
}

// Hints are for pages of one allocation. The driver would take those of the whole tract as well.
template <class Give, class Note>
CUresult hint(CUdeviceptr address, size_t bytes, Give give, Note note) {
    Region region;
    const bool ours = address_map().any(only(MemoryKind::managed)) &&
                      address_map().find(address, only(MemoryKind::managed), &region);
    if (ours && bytes > region.address + region.bytes - address)
        return wrong(CUDA_ERROR_INVALID_VALUE);
    const CUresult result = give();
    if (ours && result == CUDA_SUCCESS)
        note();
    return result;
}

// As the calls have it that are older than locations.
CUmemLocation location_of(CUdevice device) {
    CUmemLocation location = {};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (device == CU_DEVICE_CPU)
        location.type = CU_MEM_LOCATION_TYPE_HOST;
    else
        location.id = device;
    return location;
}
CUmemLocation location_of(CUmemLocation location) {
    return location;
}

template <class Real, class Where, class... More>
CUresult prefetch(Real real, CUdeviceptr address, size_t bytes, Where where, More... more) {
    return hint(
        address, bytes, [&] { return real(address, bytes, where, more...); },
        [&] { managed::note_prefetch(address, bytes, location_of(where)); });
}

using Attach = CUresult (*)(CUstream, CUdeviceptr, size_t, unsigned);

// Where the host may touch managed memory at any time, an attachment changes nothing. What shares
// a tract is asked for with that, and so for all streams.
CUresult attach(Attach real, CUstream stream, CUdeviceptr address, size_t bytes, unsigned flags) {
    Region region;
    if (!address_map().any(only(MemoryKind::managed)) ||
        !address_map().find(address, only(MemoryKind::managed), &region))
        return real(stream, address, bytes, flags);
    const bool single = flags == CU_MEM_ATTACH_SINGLE;
    const bool to_one = reinterpret_cast<uintptr_t>(stream) >= 16; // no special stream
    const bool whole = !address_map().find(address, only(MemoryKind::variable), &region);
    if (region.address != address || (bytes && bytes != region.bytes) || (single && !to_one))
        return wrong(CUDA_ERROR_INVALID_VALUE);
    const managed::Place place = managed::place_of(address);
    const unsigned all = CU_MEM_ATTACH_GLOBAL;
    return real(stream, place.tract, 0, single && !(place.whole && whole) ? all : flags);
}

constexpr Kinds kHaveRange = kinds_that_answer(kRange);

// The kinds of memory of which FlowGPU answers, by the question.
struct Questions {
    Kinds kinds[CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID + 1] = {};

    constexpr Questions() {
        kinds[CU_POINTER_ATTRIBUTE_CONTEXT] = kinds_that_answer(kContext);
        kinds[CU_POINTER_ATTRIBUTE_RANGE_START_ADDR] = kHaveRange;
        kinds[CU_POINTER_ATTRIBUTE_RANGE_SIZE] = kHaveRange;
        kinds[CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR] = kinds_that_answer(kMappedRange);
        kinds[CU_POINTER_ATTRIBUTE_MAPPING_SIZE] = kinds_that_answer(kMappedRange);
        kinds[CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES] = kinds_that_answer(kHandleTypes);
        kinds[CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE] = kinds_that_answer(kIpcCapable);
        kinds[CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE] = kinds_that_answer(kPool);
    }
    constexpr Kinds answered(CUpointer_attribute attribute) const {
        return static_cast<size_t>(attribute) < sizeof kinds / sizeof *kinds ? kinds[attribute] : 0;
    }
};
constexpr Questions kQuestions;

// Memory that the program maps itself is exportable, and later an import, because of us: what it
// asked for is what it may see. Memory from cuMemAlloc has no handle.
uint64_t handle_types_of(const Region& region, CUdeviceptr address) {
    CUmemAllocationProp asked = {};
    return region.kind == MemoryKind::mapping && task().memory.asked_at(address, &asked)
               ? asked.requestedHandleTypes
               : 0;
}

template <class T> bool tell(void* data, T value) {
    memcpy(data, &value, sizeof value);
    return true;
}

// The driver, made anew, may have one reservation in the place of several of the program's. The
// range that it says memory there has is that of all.
bool find_covered(CUdeviceptr address, Region* reservation) {
    const AddressMap& map = address_map();
    constexpr Kinds kCover = only(MemoryKind::cover);
    return map.any(kCover) && map.find(address, kCover, reservation) &&
           map.find(address, only(MemoryKind::reservation), reservation);
}

// What the driver would say without us, of the memory that it knows otherwise. False: its own
// answer is right. The address is looked up only where kinds of memory that live answer the
// question: programs that ask of every argument of a launch want other attributes.
bool answer(CUpointer_attribute attribute, CUdeviceptr address, AddressUse place, void* data) {
    constexpr Kinds kInWindows = only(MemoryKind::allocation, MemoryKind::variable);
    const Kinds kinds =
        kQuestions.answered(attribute) &
        (place == AddressUse::allocated ? kInWindows : ~only(MemoryKind::allocation));
    Region found;
    if (!kinds || !address_map().any(kinds) || !address_map().find(address, kinds, &found)) {
        const bool of_range = attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
                              attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        if (!of_range || place == AddressUse::allocated || !find_covered(address, &found))
            return false;
    }
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: // memory of a pool is nobody's
        return tell(data, found.pool ? nullptr : found.context);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        return tell<CUdeviceptr>(data, found.address);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        return tell<size_t>(data, found.bytes);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return tell(data, handle_types_of(found, address));
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        return tell(data, true); // in another way (handlers_ipc.cpp)
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return found.pool && tell(data, found.pool);
    default:
        return false;
    }
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
    result = before_allocation();
    if (result != CUDA_SUCCESS)
        return result;
    result = task().memory.allocate(device, context, bytesize, dptr);
    if (result == CUDA_SUCCESS) {
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
    Region region;
    if (!address_map().starts_at(dptr, kOurs, &region)) {
        if (address_map().in_window(dptr))
            return wrong(CUDA_ERROR_INVALID_VALUE, free_error());
        return free_of_driver(dptr, [=] { return FG_REAL(cuMemFree_v2)(dptr); });
    }
    if (t.captures.load()) {
        CUresult result = capture_error();
        if (result != CUDA_SUCCESS)
            return result;
        return defer(dptr);
    }
    release_deferred();
    CUresult result = free_error();
    if (result == CUDA_SUCCESS)
        result = drain(region.context);
    return result == CUDA_SUCCESS ? release(region) : result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
    Region region;
    if (!address_map().find(dptr, kHaveRange, &region)) {
        if (address_map().in_window(dptr))
            return wrong(CUDA_ERROR_NOT_FOUND);
        return FG_REAL(cuMemGetAddressRange_v2)(pbase, psize, dptr);
    }
    CUresult result = context_error();
    if (result != CUDA_SUCCESS)
        return result;
    if (pbase)
        *pbase = region.address;
    if (psize)
        *psize = region.bytes;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    AddressUse place = place_of(ptr);
    if (place == AddressUse::unused || (place == AddressUse::allocated && !data))
        return CUDA_ERROR_INVALID_VALUE;
    if (place == AddressUse::allocated && answer(attribute, ptr, place, data))
        return CUDA_SUCCESS;
    CUresult result = FG_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    // The driver knows nothing of the pool of managed memory.
    const bool of_pool = attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE && data;
    if ((result == CUDA_SUCCESS || of_pool) && place == AddressUse::outside &&
        answer(attribute, ptr, place, data))
        return CUDA_SUCCESS;
    return result;
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes,
                                void** data, CUdeviceptr ptr) {
    AddressUse place = place_of(ptr);
    if (place == AddressUse::unused)
        ptr = 0; // answered as any address that is not memory
    CUresult result = FG_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (result == CUDA_SUCCESS)
        for (unsigned i = 0; i < numAttributes; i++)
            answer(attributes[i], ptr, place, data[i]);
    return result;
}

CUresult allocate_managed(CUdeviceptr* address, size_t bytes, bool lasting) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    const CUresult result = current(&device, &context);
    return result == CUDA_SUCCESS
               ? managed::allocate(device, context, bytes, CU_MEM_ATTACH_GLOBAL, address, lasting)
               : result;
}

CUresult cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    const bool valid = dptr && bytesize &&
                       (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST) &&
                       current(&device, &context) == CUDA_SUCCESS;
    if (valid) {
        result = before_allocation();
        if (result != CUDA_SUCCESS)
            return result;
        result = managed::allocate(device, context, bytesize, flags, dptr);
    }
    if (result != CUDA_ERROR_NOT_SUPPORTED)
        return result;
    result = FG_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    if (result == CUDA_SUCCESS) {
        address_map().put(Region{*dptr, bytesize, MemoryKind::unplaced, device, context});
        task().driver_memory_changed();
    }
    return result;
}

namespace {

using AllocateFrom = CUresult (*)(CUdeviceptr*, size_t, CUmemoryPool, CUstream);

// What a managed pool gives is there at once, whatever the stream has still to do. In a capture it
// answers as the driver's (docs/design/hardware-notes.md): a node is the stand-in's.
CUresult allocate_from(CUdeviceptr* address, size_t bytes, CUmemoryPool pool, CUstream stream,
                       AllocateFrom real, IsCapturing is_capturing) {
    CUmemLocation preferred = {};
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    const bool served = address && bytes && pools::serves(pool, &preferred);
    CUresult result = served ? is_capturing(stream, &capturing) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    const auto where = preferred.type;
    if (!served || (capturing && where == CU_MEM_LOCATION_TYPE_DEVICE))
        return note_of_pool(real(address, bytes, pool, stream), address, bytes, pool, stream);
    if (capturing == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (capturing)
        return where == CU_MEM_LOCATION_TYPE_HOST || where == CU_MEM_LOCATION_TYPE_HOST_NUMA
                   ? CUDA_ERROR_NOT_SUPPORTED
                   : CUDA_ERROR_INVALID_VALUE;
    result = handle::cuMemAllocManaged(address, bytes, CU_MEM_ATTACH_GLOBAL);
    Region region;
    if (result == CUDA_SUCCESS &&
        address_map().starts_at(*address, only(MemoryKind::managed), &region)) {
        region.pool = pool;
        address_map().put(region);
        if (where != CU_MEM_LOCATION_TYPE_NONE)
            handle::cuMemAdvise_v2(*address, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                                   preferred);
    }
    return result;
}

} // namespace

CUresult cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device) {
    return hint(
        devPtr, count, [&] { return FG_REAL(cuMemAdvise)(devPtr, count, advice, device); },
        [&] { managed::note_advice(devPtr, count, advice, location_of(device)); });
}

CUresult cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice,
                        CUmemLocation location) {
    return hint(
        devPtr, count, [&] { return FG_REAL(cuMemAdvise_v2)(devPtr, count, advice, location); },
        [&] { managed::note_advice(devPtr, count, advice, location); });
}

CUresult cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice,
                            CUstream hStream) {
    return prefetch(FG_REAL(cuMemPrefetchAsync), devPtr, count, dstDevice, hStream);
}

CUresult cuMemPrefetchAsync_ptsz(CUdeviceptr devPtr, size_t count, CUdevice dstDevice,
                                 CUstream hStream) {
    return prefetch(FG_REAL(cuMemPrefetchAsync_ptsz), devPtr, count, dstDevice, hStream);
}

CUresult cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location,
                               unsigned int flags, CUstream hStream) {
    return prefetch(FG_REAL(cuMemPrefetchAsync_v2), devPtr, count, location, flags, hStream);
}

CUresult cuMemPrefetchAsync_v2_ptsz(CUdeviceptr devPtr, size_t count, CUmemLocation location,
                                    unsigned int flags, CUstream hStream) {
    return prefetch(FG_REAL(cuMemPrefetchAsync_v2_ptsz), devPtr, count, location, flags, hStream);
}

CUresult cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length,
                                unsigned int flags) {
    return attach(FG_REAL(cuStreamAttachMemAsync), hStream, dptr, length, flags);
}

CUresult cuStreamAttachMemAsync_ptsz(CUstream hStream, CUdeviceptr dptr, size_t length,
                                     unsigned int flags) {
    return attach(FG_REAL(cuStreamAttachMemAsync_ptsz), hStream, dptr, length, flags);
}

// The host reaches a managed variable by its address alone (cudart asks for it by
// cuLibraryGetManaged): so the images that are loaded need not be read, that is, unpacked.
CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
    return note_variable(FG_REAL(cuModuleGetGlobal_v2)(dptr, bytes, hmod, name), dptr);
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
    return note_variable(FG_REAL(cuLibraryGetGlobal)(dptr, bytes, library, name), dptr);
}

namespace {

// While it lives, the first device's primary context is current where none was.
class SomeContext {
  public:
    explicit SomeContext(bool wanted) {
        CUcontext context = nullptr;
        if (!wanted || FG_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || context ||
            FG_REAL(cuDevicePrimaryCtxRetain)(&context, 0) != CUDA_SUCCESS)
            return;
        retained_ = true;
        pushed_ = FG_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
    }
    ~SomeContext() {
        CUcontext popped = nullptr;
        if (pushed_)
            FG_REAL(cuCtxPopCurrent_v2)(&popped);
        if (retained_)
            cuDevicePrimaryCtxRelease_v2(0);
    }
    SomeContext(const SomeContext&) = delete;
    SomeContext& operator=(const SomeContext&) = delete;

  private:
    bool retained_ = false, pushed_ = false;
};

} // namespace

// The driver needs no context to answer. The program's host may write there from now on, so it is
// given the address that lasts, and to have memory there takes one.
CUresult cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary library,
                             const char* name) {
    const SomeContext context(replay::awaits_context(library));
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
    return allocate_from(dptr, bytesize, pool, hStream, FG_REAL(cuMemAllocFromPoolAsync),
                         FG_REAL(cuStreamIsCapturing));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                                      CUstream hStream) {
    return allocate_from(dptr, bytesize, pool, hStream, FG_REAL(cuMemAllocFromPoolAsync_ptsz),
                         FG_REAL(cuStreamIsCapturing_ptsz));
}

CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    return free_async(dptr, hStream, FG_REAL(cuStreamSynchronize), FG_REAL(cuMemFreeAsync),
                      FG_REAL(cuStreamIsCapturing));
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
    return free_async(dptr, hStream, FG_REAL(cuStreamSynchronize_ptsz),
                      FG_REAL(cuMemFreeAsync_ptsz), FG_REAL(cuStreamIsCapturing_ptsz));
}

} // namespace flowgpu::handle
