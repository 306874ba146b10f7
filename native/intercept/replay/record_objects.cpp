// Streams, events, host memory, and answers that name objects.
#include <bitset>
#include <cstring>
#include <new>
#include <set>

#include <sys/mman.h>

#include "arguments.h"
#include "pools.h"
#include "recorded.h"
#include "registry.h"
#include "task.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

// The pages of a cuMemHostAlloc are registered memory, so that they are the program's own.
constexpr unsigned kRegisterFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;

} // namespace

CUresult register_memory(void* address, const HostMemory& place) {
    const unsigned flags = place.ours ? place.flags & kRegisterFlags : place.flags;
    return FG_DRIVER(cuMemHostRegister_v2)(address, place.bytes, flags);
}

namespace recorded {

namespace {

template <class H, class F, class... V> CUresult create(H* out, Function<F> function, V... values) {
    H made = nullptr;
    CUresult result = function.call(out ? &made : nullptr, to_call(values)...);
    if (result != CUDA_SUCCESS)
        return result;
    *out = note(made, true, [&](Object& object) { object.make = maker<H>(function, values...); });
    return result;
}

// Who keeps a stream's attributes, and under which numbers: a default stream has no object, so its
// context does.
struct Attributes {
    Attributes(CUstream stream, bool per_thread)
        : default_stream(!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD),
          threads(stream == CU_STREAM_PER_THREAD || (per_thread && !stream)),
          holder(default_stream ? static_cast<const void*>(current_context()) : stream) {}
    static constexpr uint64_t kDefault = 1ull << 32;
    bool default_stream;
    bool threads; // the calling thread's
    const void* holder;

    uint64_t number(CUstreamAttrID attribute) const {
        return static_cast<uint64_t>(attribute) | (default_stream ? kDefault : 0);
    }
    std::set<CUstreamAttrID> kept() const {
        std::set<CUstreamAttrID> attributes;
        with_object(holder, [&](Object& object) {
            for (const auto& [key, again] : object.state)
                if (key.first == I_cuStreamSetAttribute &&
                    !(key.second & kDefault) == !default_stream)
                    attributes.insert(static_cast<CUstreamAttrID>(key.second & ~kDefault));
        });
        return attributes;
    }
};

void keep_attribute(const Attributes& of, CUstream stream, CUstreamAttrID attribute,
                    const CUstreamAttrValue& value) {
    if (of.threads) // only the thread itself could set it
        with_object(of.holder, [&](Object& object) {
            object.why = "with attributes of a thread's default stream (cuStreamSetAttribute)";
            object.make = nullptr;
        });
    else
        keep_set(of.holder, of.number(attribute), FG_FUNCTION(cuStreamSetAttribute), stream,
                 attribute, value);
}

CUresult set_attribute(CUstream stream, CUstreamAttrID attribute, const CUstreamAttrValue* value,
                       bool per_thread, decltype(&::cuStreamSetAttribute) function) {
    CUresult result = function(to_driver(stream), attribute, value);
    if (result == CUDA_SUCCESS && value)
        keep_attribute({stream, per_thread}, stream, attribute, *value);
    return result;
}

CUresult copy_attributes(CUstream to, CUstream from, bool per_thread,
                         CUresult (*function)(CUstream, CUstream)) {
    const auto priority = [to] {
        CUstreamAttrValue value = {};
        if (object_of(to)) // nothing else has one of its own, and lives
            FG_DRIVER(cuStreamGetAttribute)(to_driver(to), CU_STREAM_ATTRIBUTE_PRIORITY, &value);
        return value.priority;
    };
    const int before = priority();
    CUresult result = function(to_driver(to), to_driver(from));
    if (result != CUDA_SUCCESS)
        return result;
    // What was set of neither is as in a stream that has just been made, but for the priority.
    const Attributes of(to, per_thread);
    std::set<CUstreamAttrID> attributes = of.kept();
    attributes.merge(Attributes(from, per_thread).kept());
    if (priority() != before)
        attributes.insert(CU_STREAM_ATTRIBUTE_PRIORITY);
    for (const CUstreamAttrID attribute : attributes) {
        CUstreamAttrValue value = {};
        if (FG_DRIVER(cuStreamGetAttribute)(to_driver(to), attribute, &value) != CUDA_SUCCESS)
            continue;
        // The driver refuses the value that it tells of an attribute that nobody has set.
        if (of.threads ||
            FG_DRIVER(cuStreamSetAttribute)(to_driver(to), attribute, &value) == CUDA_SUCCESS)
            keep_attribute(of, to, attribute, value);
        else
            set(of.holder, I_cuStreamSetAttribute, of.number(attribute), nullptr);
    }
    return result;
}

CUresult record(CUevent event, CUresult result) {
    Object* object = result == CUDA_SUCCESS ? object_of(event) : nullptr;
    if (object && !object->marked.load(std::memory_order_relaxed))
        object->marked.store(true, std::memory_order_relaxed);
    if (object && object->age.load(std::memory_order_relaxed) >= 0)
        object->age.store(-1, std::memory_order_relaxed);
    return result;
}

// The time in which CUDA was away does not count. An event from before that has an age. If both
// events have one, their ages alone tell the time between them.
CUresult elapsed(float* out, CUevent start, CUevent end, decltype(&::cuEventElapsedTime) function) {
    CUresult result = function(out, to_driver(start), to_driver(end));
    const Object *first = object_of(start), *second = object_of(end);
    if (result != CUDA_SUCCESS || !first || !second)
        return result;
    const double from = first->age.load(), to = second->age.load();
    if (from >= 0 && to >= 0)
        *out = static_cast<float>(from - to);
    else if (from >= 0 || to >= 0)
        *out = static_cast<float>(*out + (from >= 0 ? from : -to));
    return result;
}

struct Callback {
    CUstreamCallback function;
    void* data;
    CUstream stream;
};

void CUDA_CB call_back(CUstream, CUresult status, void* data) {
    auto* callback = static_cast<Callback*>(data);
    callback->function(callback->stream, status, callback->data);
    delete callback;
}

CUresult add_callback(CUstream stream, CUstreamCallback function, void* data, unsigned flags,
                      decltype(&::cuStreamAddCallback) add) {
    if (!function)
        return add(to_driver(stream), function, data, flags);
    auto* callback = new (std::nothrow) Callback{function, data, stream};
    if (!callback)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = add(to_driver(stream), call_back, callback, flags);
    if (result != CUDA_SUCCESS)
        delete callback;
    return result;
}

template <class H> void translate_answer(void* data) {
    auto* handle = static_cast<H*>(data);
    if (handle && *handle)
        *handle = to_program(*handle);
}

void translate_attribute(CUpointer_attribute attribute, void* data) {
    if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        translate_answer<CUcontext>(data);
    if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
        translate_answer<CUmemoryPool>(data);
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
        attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
        attribute == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR)
        translate_answer<CUdeviceptr>(data); // of a constant
}

// A device's own pool, or one that the program has made and set, which is noted already.
CUresult pool_of(CUmemoryPool* out, CUdevice device,
                 CUresult (*function)(CUmemoryPool*, CUdevice)) {
    CUmemoryPool driver = nullptr;
    CUresult result = function(out ? &driver : nullptr, device);
    if (result == CUDA_SUCCESS)
        *out = note(driver, false, [=](Object& object) {
            object.context = nullptr;
            object.make = maker<CUmemoryPool>(FG_FUNCTION(cuDeviceGetDefaultMemPool), device);
        });
    return result;
}

using PoolAt = CUresult (*)(CUmemoryPool*, CUmemLocation*, CUmemAllocationType);

CUresult pool_at(CUmemoryPool* out, CUmemLocation* location, CUmemAllocationType type,
                 PoolAt function, CUresult (*of_device)(CUmemoryPool*, CUdevice)) {
    if (out && location && type == CU_MEM_ALLOCATION_TYPE_PINNED &&
        location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        return pool_of(out, location->id, of_device);
    CUmemPoolProps props = {}, stand_in;
    props.allocType = type;
    if (location)
        props.location = *location;
    // No such location has a pool of its own.
    const bool any = location && location->type != CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    if (out && any && pools::may_serve(props, &stand_in)) {
        if ((*out = pools::default_managed(*location)))
            return CUDA_SUCCESS;
        CUmemoryPool fresh = nullptr;
        const CUresult result = recorded::cuMemPoolCreate(&fresh, &props);
        if (result == CUDA_SUCCESS &&
            (*out = pools::make_default_managed(*location, fresh)) != fresh)
            recorded::cuMemPoolDestroy(fresh);
        return result;
    }
    CUmemoryPool driver = nullptr;
    const CUresult result = function(out ? &driver : nullptr, location, type);
    if (result == CUDA_SUCCESS)
        *out = note(driver, false, [](Object& object) {
            object.context = nullptr;
            object.why = "that is no device's";
        });
    return result;
}

CUresult allocate_host(void** out, size_t bytes, unsigned flags) {
    constexpr unsigned known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (!out || !bytes || flags & ~known)
        return FG_DRIVER(cuMemHostAlloc)(out, bytes, flags); // refuses
    HostMemory place;
    place.bytes = bytes;
    place.flags = flags;
    place.ours = true;
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        int devices; // a driver that is not initialised says so first
        CUresult usable = FG_DRIVER(cuDeviceGetCount)(&devices);
        return usable == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : usable;
    }
    madvise(pages, place.bytes, MADV_HUGEPAGE);
    CUresult result = register_memory(pages, place);
    if (result != CUDA_SUCCESS) {
        munmap(pages, place.bytes);
        return result;
    }
    note_host(pages, place);
    *out = pages;
    return result;
}

// The driver in its present life may not know of it.
CUresult unregister_memory(void* address, const HostMemory& place) {
    CUdevice device;
    return place.dead ? FG_DRIVER(cuCtxGetDevice)(&device)
                      : FG_DRIVER(cuMemHostUnregister)(address);
}

CUresult register_host(void* address, size_t bytes, unsigned flags, CUresult result) {
    if (result == CUDA_SUCCESS) {
        HostMemory place;
        place.bytes = bytes;
        place.flags = flags;
        note_host(address, place);
    }
    return result;
}

} // namespace

CUresult cuStreamCreate(CUstream* phStream, unsigned Flags) {
    return create(phStream, FG_FUNCTION(cuStreamCreate), Flags);
}

CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned flags, int priority) {
    return create(phStream, FG_FUNCTION(cuStreamCreateWithPriority), flags, priority);
}

CUresult cuStreamDestroy(CUstream hStream) {
    return destroy(hStream, FG_DRIVER(cuStreamDestroy));
}

CUresult cuStreamDestroy_v2(CUstream hStream) {
    return destroy(hStream, FG_DRIVER(cuStreamDestroy_v2));
}

CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr,
                              const CUstreamAttrValue* value) {
    return set_attribute(hStream, attr, value, false, FG_DRIVER(cuStreamSetAttribute));
}

CUresult cuStreamSetAttribute_ptsz(CUstream hStream, CUstreamAttrID attr,
                                   const CUstreamAttrValue* value) {
    return set_attribute(hStream, attr, value, true, FG_DRIVER(cuStreamSetAttribute_ptsz));
}

CUresult cuStreamCopyAttributes(CUstream dst, CUstream src) {
    return copy_attributes(dst, src, false, FG_DRIVER(cuStreamCopyAttributes));
}

CUresult cuStreamCopyAttributes_ptsz(CUstream dst, CUstream src) {
    return copy_attributes(dst, src, true, FG_DRIVER(cuStreamCopyAttributes_ptsz));
}

CUresult cuEventCreate(CUevent* phEvent, unsigned Flags) {
    return create(phEvent, FG_FUNCTION(cuEventCreate), Flags);
}

CUresult cuEventDestroy(CUevent hEvent) {
    return destroy(hEvent, FG_DRIVER(cuEventDestroy));
}

CUresult cuEventDestroy_v2(CUevent hEvent) {
    return destroy(hEvent, FG_DRIVER(cuEventDestroy_v2));
}

CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
    return elapsed(pMilliseconds, hStart, hEnd, FG_DRIVER(cuEventElapsedTime));
}

CUresult cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
    return elapsed(pMilliseconds, hStart, hEnd, FG_DRIVER(cuEventElapsedTime_v2));
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    return record(hEvent, FG_DRIVER(cuEventRecord)(to_driver(hEvent), to_driver(hStream)));
}

CUresult cuEventRecord_ptsz(CUevent hEvent, CUstream hStream) {
    return record(hEvent, FG_DRIVER(cuEventRecord_ptsz)(to_driver(hEvent), to_driver(hStream)));
}

CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned flags) {
    return record(hEvent,
                  FG_DRIVER(cuEventRecordWithFlags)(to_driver(hEvent), to_driver(hStream), flags));
}

CUresult cuEventRecordWithFlags_ptsz(CUevent hEvent, CUstream hStream, unsigned flags) {
    return record(hEvent, FG_DRIVER(cuEventRecordWithFlags_ptsz)(to_driver(hEvent),
                                                                 to_driver(hStream), flags));
}

CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData,
                             unsigned flags) {
    return add_callback(hStream, callback, userData, flags, FG_DRIVER(cuStreamAddCallback));
}

CUresult cuStreamAddCallback_ptsz(CUstream hStream, CUstreamCallback callback, void* userData,
                                  unsigned flags) {
    return add_callback(hStream, callback, userData, flags, FG_DRIVER(cuStreamAddCallback_ptsz));
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    CUresult result = FG_DRIVER(cuPointerGetAttribute)(data, attribute, to_driver(ptr));
    if (result == CUDA_SUCCESS)
        translate_attribute(attribute, data);
    return result;
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr ptr) {
    CUresult result = FG_DRIVER(cuPointerGetAttributes)(count, attributes, data, to_driver(ptr));
    if (result == CUDA_SUCCESS)
        for (unsigned i = 0; i < count; i++)
            translate_attribute(attributes[i], data[i]);
    return result;
}

CUresult cuMemGetAddressRange(CUdeviceptr_v1* pbase, unsigned* psize, CUdeviceptr_v1 dptr) {
    return FG_DRIVER(cuMemGetAddressRange)(pbase, psize, dptr); // of 32 bits: no constant is there
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
    CUresult result = FG_DRIVER(cuMemGetAddressRange_v2)(pbase, psize, to_driver(dptr));
    if (result == CUDA_SUCCESS)
        translate_answer<CUdeviceptr>(pbase);
    return result;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
    return pool_of(pool_out, dev, FG_DRIVER(cuDeviceGetDefaultMemPool));
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) {
    return pool_of(pool, dev, FG_DRIVER(cuDeviceGetMemPool));
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
    CUmemPoolProps stand_in;
    const bool served = poolProps && pools::may_serve(*poolProps, &stand_in);
    const CUmemPoolProps* asked = served ? &stand_in : poolProps;
    CUresult result = FG_DRIVER(cuMemPoolCreate)(pool, asked);
    if (result == CUDA_SUCCESS)
        *pool = note(*pool, true, [props = *asked](Object& object) {
            object.context = nullptr;
            // Memory of any other pool would come back as memory of a device.
            if (props.handleTypes != CU_MEM_HANDLE_TYPE_NONE ||
                props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
                props.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                object.why = "that can be shared, or is no device's";
            else
                object.make = maker<CUmemoryPool>(FG_FUNCTION(cuMemPoolCreate), props);
        });
    if (result == CUDA_SUCCESS && served)
        pools::serve(*pool, poolProps->location);
    return result;
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool_out, CUmemLocation* location,
                                CUmemAllocationType type) {
    return pool_at(pool_out, location, type, FG_DRIVER(cuMemGetDefaultMemPool),
                   FG_DRIVER(cuDeviceGetDefaultMemPool));
}

CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type) {
    const bool managed = pool && location && type == CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (managed && (*pool = pools::set_managed(*location)))
        return CUDA_SUCCESS;
    return pool_at(pool, location, type, FG_DRIVER(cuMemGetMemPool), FG_DRIVER(cuDeviceGetMemPool));
}

// Memory that a checkpoint has taken over is still the pool's to the program.
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
    CUresult result = FG_DRIVER(cuMemPoolGetAttribute)(to_driver(pool), attr, value);
    const bool reserved =
        attr == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || attr == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
    if (result == CUDA_SUCCESS && attr >= CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT &&
        attr <= CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        *static_cast<uint64_t*>(value) += pools::bytes_of(pool, reserved);
    return result;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
    const CUresult result = FG_DRIVER(cuMemPoolSetAttribute)(to_driver(pool), attr, value);
    if (result != CUDA_SUCCESS)
        return result;
    Word64 kept = {}; // all attributes are of 64 bits or less
    const bool is_flag = attr <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    memcpy(&kept, value, is_flag ? sizeof(int) : sizeof kept);
    keep_set(pool, attr, FG_FUNCTION(cuMemPoolSetAttribute), pool, attr, kept);
    return result;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, size_t count) {
    // The pool's own device cannot lose its access, and gains none.
    std::bitset<64> had;
    for (size_t i = 0; map && i < count && i < had.size(); i++) {
        CUmemAccess_flags flags{};
        CUmemLocation where = map[i].location;
        had[i] = FG_DRIVER(cuMemPoolGetAccess)(&flags, to_driver(pool), &where) == CUDA_SUCCESS &&
                 flags == map[i].flags;
    }
    const CUresult result = FG_DRIVER(cuMemPoolSetAccess)(to_driver(pool), map, count);
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
        if (i >= had.size() || !had[i])
            keep_set(pool, static_cast<uint64_t>(map[i].location.id),
                     FG_FUNCTION(cuMemPoolSetAccess), pool, map[i], size_t{1});
    return result;
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
    if (location && pools::serves(pool))
        return type == CU_MEM_ALLOCATION_TYPE_MANAGED && pools::set_managed(*location, pool)
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    const CUresult result = FG_DRIVER(cuMemSetMemPool)(location, type, to_driver(pool));
    if (result == CUDA_SUCCESS)
        unsaved_calls[I_cuMemSetMemPool].fetch_add(1, std::memory_order_relaxed);
    return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    if (pools::is_default_managed(pool))
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = destroy(pool, FG_DRIVER(cuMemPoolDestroy));
    if (result == CUDA_SUCCESS)
        pools::end_serving(pool);
    return result;
}

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned Flags) {
    return allocate_host(pp, bytesize, Flags);
}

CUresult cuMemAllocHost(void** pp, unsigned bytesize) {
    return allocate_host(pp, bytesize, 0);
}

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) {
    return allocate_host(pp, bytesize, 0);
}

CUresult cuMemFreeHost(void* p) {
    HostMemory place;
    if (!find_host(p, &place) || !place.ours)
        return FG_DRIVER(cuMemFreeHost)(p);
    CUresult result = unregister_memory(p, place);
    if (result != CUDA_SUCCESS)
        return result;
    take_host(p, &place);
    munmap(p, place.bytes);
    return result;
}

CUresult cuMemHostRegister(void* p, size_t bytesize, unsigned Flags) {
    return register_host(p, bytesize, Flags, FG_DRIVER(cuMemHostRegister)(p, bytesize, Flags));
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned Flags) {
    return register_host(p, bytesize, Flags, FG_DRIVER(cuMemHostRegister_v2)(p, bytesize, Flags));
}

CUresult cuMemHostUnregister(void* p) {
    HostMemory place;
    if (find_host(p, &place) && place.ours)
        return CUDA_ERROR_INVALID_VALUE; // as the driver of what it has allocated
    CUresult result = unregister_memory(p, place);
    if (result == CUDA_SUCCESS)
        take_host(p, &place);
    return result;
}

CUresult cuMemHostGetFlags(unsigned* pFlags, void* p) {
    CUresult result = FG_DRIVER(cuMemHostGetFlags)(pFlags, p);
    HostMemory place;
    if (result == CUDA_SUCCESS && find_host(p, &place, true) && place.ours)
        *pFlags |= place.flags;
    return result;
}

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS* list, unsigned count,
                                              unsigned flags) {
    std::vector<CUDA_LAUNCH_PARAMS> copies;
    if (list)
        copies.assign(list, list + count);
    for (CUDA_LAUNCH_PARAMS& one : copies) {
        one.function = launched(one.function);
        one.hStream = to_driver(one.hStream);
    }
    return FG_DRIVER(cuLaunchCooperativeKernelMultiDevice)(list ? copies.data() : nullptr, count,
                                                           flags);
}

} // namespace recorded

} // namespace flowgpu::replay
