#include "pools.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "replay/current.h"
#include "replay/record.h"
#include "replay/threads.h"
#include "task.h"

namespace flowgpu::pools {

namespace {

constexpr uint64_t kChunk = 2ull << 20;   // of a block, and of what can be mapped
constexpr uint64_t kPlaces = 32ull << 20; // of addresses that can be had again

// A block that has the bytes of pieces.
struct Cover {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
    size_t pieces;
    uint64_t place = 0; // where the addresses begin that are held for it
};

// Addresses that are had again as one: nothing is mapped across the end of a reservation.
struct HeldPlace {
    uint64_t bytes;
    size_t covers;
};

struct Pools {
    std::mutex mutex;                              // guards what follows
    std::map<uint64_t, Cover> copies;              // of what the driver still has, by address
    std::map<uint64_t, Cover> covers;              // of what is ours
    std::map<uint64_t, HeldPlace> places;          // of both, by address
    std::map<CUmemoryPool, CUmemLocation> managed; // what each prefers
    std::map<std::pair<int, int>, CUmemoryPool> managed_defaults, managed_set; // by location
};
std::atomic<bool> any_managed; // has ever been

constexpr Kinds kPoolOnly = only(MemoryKind::pool), kAdopted = only(MemoryKind::adopted);

// Made on first use, never destroyed, as Task.
Pools& all() {
    static auto* made = new Pools();
    return *made;
}

uint64_t down(uint64_t address, uint64_t to) {
    return address / to * to;
}
uint64_t up(uint64_t address, uint64_t to) {
    return down(address + to - 1, to);
}

// Runs of chunks in which there are pieces, each of one device.
std::map<uint64_t, Cover> runs() {
    std::map<uint64_t, Cover> found;
    uint64_t start = 0, end = 0;
    int device = -1;
    for (const Region& piece : address_map().all(kPoolOnly)) {
        const uint64_t first = down(piece.address, kChunk);
        const uint64_t last = up(piece.address + piece.bytes, kChunk);
        if (first > end || device != piece.device || found.empty()) {
            start = first;
            end = last;
            device = piece.device;
            found[start] = Cover{last - first, 0, 0};
        }
        end = std::max(end, last);
        Cover& cover = found[start];
        cover.bytes = end - start;
        cover.pieces++;
    }
    return found;
}

// Copies the pieces of a run into its block, which is mapped somewhere for as long.
CUresult copy(uint64_t address, const Cover& cover, CUmemGenericAllocationHandle handle) {
    const std::vector<Region> pieces = address_map().all(kPoolOnly, address, cover.bytes);
    const Region& first = pieces.front();
    replay::Current current(first.context);
    CUresult result = current.result();
    if (result != CUDA_SUCCESS)
        return result;
    CUdeviceptr there = 0;
    result = FG_DRIVER(cuMemAddressReserve)(&there, cover.bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    const CUmemAccessDesc access = access_of(first.device, true);
    result = FG_DRIVER(cuMemMap)(there, cover.bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = FG_DRIVER(cuMemSetAccess)(there, cover.bytes, &access, 1);
        for (const Region& piece : pieces)
            if (result == CUDA_SUCCESS)
                result = FG_DRIVER(cuMemcpyDtoD_v2)(there + (piece.address - address),
                                                    piece.address, piece.bytes);
        const CUresult done = FG_DRIVER(cuCtxSynchronize)();
        result = result == CUDA_SUCCESS ? done : result;
        FG_DRIVER(cuMemUnmap)(there, cover.bytes);
    }
    FG_DRIVER(cuMemAddressFree)(there, cover.bytes);
    return result;
}

CUresult keep(uint64_t address, Cover& cover) {
    const Region first = address_map().all(kPoolOnly, address, cover.bytes).front();
    CUmemAllocationProp asked = {};
    asked.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    asked.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    asked.location.id = first.device;
    Memory& memory = task().memory;
    CUresult result = memory.create_handle(cover.bytes, asked, first.context, &cover.handle);
    if (result != CUDA_SUCCESS)
        return result;
    result = copy(address, cover, memory.driver_handle(cover.handle));
    if (result != CUDA_SUCCESS) {
        memory.release_handle(cover.handle);
        return result;
    }
    memory.map_later(address, cover.handle);
    return CUDA_SUCCESS;
}

// Has the addresses of all copies held.
void hold_places() {
    uint64_t start = 0, end = 0;
    for (auto& [address, cover] : all().copies) {
        if (start == 0 || down(address, kPlaces) >= end)
            start = down(address, kPlaces);
        end = up(address + cover.bytes, kPlaces);
        all().places[start].bytes = end - start;
        all().places[start].covers++;
        cover.place = start;
    }
    for (const auto& [at, place] : all().places)
        address_map().put(Region{at, place.bytes, MemoryKind::reservation});
}

// `reserved`: at the driver, not only to be.
void give_up(const Cover& cover, bool reserved) {
    auto it = all().places.find(cover.place);
    if (it == all().places.end() || --it->second.covers)
        return;
    address_map().remove(it->first, only(MemoryKind::reservation));
    if (reserved)
        FG_DRIVER(cuMemAddressFree)(it->first, it->second.bytes);
    all().places.erase(it);
}

std::pair<int, int> key_of(const CUmemLocation& location) {
    const bool numbered = location.type == CU_MEM_LOCATION_TYPE_DEVICE ||
                          location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    return {location.type, numbered ? location.id : 0};
}

void drop_copies() {
    task().memory.drop_waiting();
    for (const auto& [address, cover] : all().copies)
        give_up(cover, false);
    all().copies.clear();
}

// Null where the record does not tell. The special streams are the current context's.
CUcontext context_of(CUstream stream) {
    if (reinterpret_cast<uintptr_t>(stream) < 16)
        return replay::current_context();
    const replay::Object* object = replay::object_of(stream);
    return object && object->context ? reinterpret_cast<CUcontext>(object->context->slot) : nullptr;
}

bool find_context(CUstream stream, CUcontext* context) {
    *context = context_of(stream);
    return *context || FG_REAL(cuStreamGetCtx)(stream, context) == CUDA_SUCCESS;
}

// Else it is memory of a graph's node, which is there once the graph runs. Without the record no
// copy can be made.
bool is_outside_graphs(CUstream stream) {
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    return replay::prepared() &&
           (!task().captures.load() ||
            (FG_REAL(cuStreamIsCapturing)(stream, &capturing) == CUDA_SUCCESS && !capturing));
}

// Asks for what nobody needs to know before.
bool complete(Region* piece) {
    if (piece->device >= 0)
        return true;
    const replay::Current current(piece->context);
    CUresult result = current.result();
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuCtxGetDevice)(&piece->device);
    if (result == CUDA_SUCCESS && !piece->pool)
        result = FG_REAL(cuDeviceGetMemPool)(&piece->pool, piece->device);
    if (result == CUDA_SUCCESS)
        address_map().put(*piece);
    return result == CUDA_SUCCESS;
}

// What of a pool says that its memory cannot be as ours.
const char* why_not(CUmemoryPool pool) {
    bool peers = false;
    replay::with_object(pool, [&](replay::Object& object) {
        for (const auto& [key, again] : object.state)
            peers |= key.first == I_cuMemPoolSetAccess;
    });
    return peers ? "device memory of pools that other devices may use" : nullptr;
}

} // namespace

void note(CUdeviceptr address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    Region region = {address, bytes, MemoryKind::driver};
    if (is_outside_graphs(stream) && find_context(stream, &region.context)) {
        region.kind = MemoryKind::pool;
        region.pool = pool;
    } else if (pool && !replay::prepared() && is_managed(address)) {
        region.kind = MemoryKind::unplaced;
    }
    address_map().put(region);
    task().driver_memory_changed();
}

bool copy_out(char* detail, size_t bytes) {
    std::lock_guard<std::mutex> lock(all().mutex);
    for (Region& piece : address_map().all(kPoolOnly)) {
        const char* why = complete(&piece)
                              ? why_not(piece.pool)
                              : "device memory of a pool that the driver does not tell";
        if (why) {
            snprintf(detail, bytes, "%s", why);
            return false;
        }
    }
    for (auto& [address, cover] : runs()) {
        const CUresult result = keep(address, cover);
        if (result == CUDA_SUCCESS) {
            all().copies.emplace(address, std::move(cover));
            continue;
        }
        const char* name = "an unknown error";
        FG_DRIVER(cuGetErrorName)(result, &name);
        snprintf(detail, bytes,
                 "device memory of pools (cuMemAllocAsync), of which %llu MiB cannot be copied: %s",
                 static_cast<unsigned long long>(cover.bytes >> 20), name);
        drop_copies();
        return false;
    }
    hold_places();
    return true;
}

void stay() {
    std::lock_guard<std::mutex> lock(all().mutex);
    if (!all().copies.empty())
        drop_copies();
}

void driver_is_new() {
    std::lock_guard<std::mutex> lock(all().mutex);
    task().memory.stop_waiting();
    all().covers.merge(all().copies);
    all().copies.clear();
    for (Region& piece : address_map().all(kPoolOnly)) {
        piece.kind = MemoryKind::adopted;
        address_map().put(piece);
    }
    task().driver_memory_changed();
}

CUresult release(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(all().mutex);
    if (!address_map().remove(address, kAdopted))
        return CUDA_ERROR_INVALID_VALUE;
    auto cover = std::prev(all().covers.upper_bound(address));
    if (--cover->second.pieces)
        return CUDA_SUCCESS;
    const CUresult result = task().memory.unmap_range(cover->first, cover->second.bytes);
    give_up(cover->second, true);
    all().covers.erase(cover);
    return result;
}

void end_of(CUcontext context) {
    for (const Region& piece : address_map().all(kAdopted))
        if (piece.context == context)
            release(piece.address);
}

uint64_t bytes_of(CUmemoryPool pool, bool reserved) {
    uint64_t sum = 0;
    for (const Region& piece : address_map().all(kAdopted | only(MemoryKind::managed)))
        sum += piece.pool == pool ? piece.bytes : 0;
    return reserved && serves(pool) ? up(sum, kPlaces) : sum;
}

bool may_serve(const CUmemPoolProps& props, CUmemPoolProps* stand_in) {
    const CUmemLocation& at = props.location;
    int version = 0, concurrent = 0;
    *stand_in = props;
    stand_in->allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    if (at.type != CU_MEM_LOCATION_TYPE_DEVICE)
        stand_in->location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    return props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED &&
           props.handleTypes == CU_MEM_HANDLE_TYPE_NONE && !props.maxSize &&
           at.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT &&
           FG_DRIVER(cuDriverGetVersion)(&version) == CUDA_SUCCESS && version >= 13000 &&
           FG_DRIVER(cuDeviceGetAttribute)(&concurrent,
                                           CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
                                           stand_in->location.id) == CUDA_SUCCESS &&
           concurrent;
}

void serve(CUmemoryPool pool, const CUmemLocation& preferred) {
    std::lock_guard<std::mutex> lock(all().mutex);
    all().managed[pool] = preferred;
    any_managed = true;
}

bool serves(CUmemoryPool pool, CUmemLocation* preferred) {
    if (!any_managed.load(std::memory_order_relaxed))
        return false;
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto it = all().managed.find(pool);
    if (it == all().managed.end())
        return false;
    if (preferred)
        *preferred = it->second;
    return true;
}

void end_serving(CUmemoryPool pool) {
    std::lock_guard<std::mutex> lock(all().mutex);
    all().managed.erase(pool);
    auto& set = all().managed_set;
    for (auto it = set.begin(); it != set.end();)
        it = it->second == pool ? set.erase(it) : std::next(it);
}

CUmemoryPool set_managed(const CUmemLocation& location) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto it = all().managed_set.find(key_of(location));
    return it == all().managed_set.end() ? nullptr : it->second;
}

bool set_managed(const CUmemLocation& location, CUmemoryPool pool) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto it = all().managed.find(pool);
    const bool fits = it != all().managed.end() && key_of(it->second) == key_of(location);
    if (fits)
        all().managed_set[key_of(location)] = pool;
    return fits;
}

CUmemoryPool default_managed(const CUmemLocation& location) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto it = all().managed_defaults.find(key_of(location));
    return it == all().managed_defaults.end() ? nullptr : it->second;
}

CUmemoryPool make_default_managed(const CUmemLocation& location, CUmemoryPool pool) {
    std::lock_guard<std::mutex> lock(all().mutex);
    return all().managed_defaults.emplace(key_of(location), pool).first->second;
}

bool is_default_managed(CUmemoryPool pool) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto& defaults = all().managed_defaults;
    return std::any_of(defaults.begin(), defaults.end(),
                       [=](const auto& row) { return row.second == pool; });
}

void lock() {
    all().mutex.lock();
}

void unlock() {
    all().mutex.unlock();
}

} // namespace flowgpu::pools
