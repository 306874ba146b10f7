#include "pools.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "replay/current.h"
#include "replay/record.h"
#include "replay/threads.h"
#include "task.h"

namespace flowgpu::pools {

namespace {

constexpr uint64_t kChunk = 2ull << 20;   // of a block, and of what can be mapped
constexpr uint64_t kPlaces = 32ull << 20; // of addresses that can be had again

using Pieces = std::map<uint64_t, Piece>; // by address

// A block that has the bytes of pieces.
struct Cover {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
    size_t pieces;
    uint64_t place = 0; // where the addresses begin that are held for it
};

// Addresses that are had again as one: nothing is mapped across the end of a reservation.
struct Place {
    uint64_t bytes;
    size_t covers;
};

struct Pools {
    std::mutex mutex; // guards what follows
    Pieces drivers, ours;
    std::map<uint64_t, Cover> copies; // of what the driver still has, by address
    std::map<uint64_t, Cover> covers; // of what is ours
    std::map<uint64_t, Place> places; // of both, by address
};
std::atomic<bool> any_ours{false};

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
    for (const auto& [address, piece] : all().drivers) {
        const uint64_t first = down(address, kChunk), last = up(address + piece.bytes, kChunk);
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
    const Piece& first = all().drivers.lower_bound(address)->second;
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
        for (auto it = all().drivers.lower_bound(address);
             it != all().drivers.end() && it->first - address < cover.bytes; ++it)
            if (result == CUDA_SUCCESS)
                result = FG_DRIVER(cuMemcpyDtoD_v2)(there + (it->first - address), it->first,
                                                    it->second.bytes);
        const CUresult done = FG_DRIVER(cuCtxSynchronize)();
        result = result == CUDA_SUCCESS ? done : result;
        FG_DRIVER(cuMemUnmap)(there, cover.bytes);
    }
    FG_DRIVER(cuMemAddressFree)(there, cover.bytes);
    return result;
}

CUresult keep(uint64_t address, Cover& cover) {
    const Piece& first = all().drivers.lower_bound(address)->second;
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
        replay::note_reservation(at, place.bytes);
}

// `reserved`: at the driver, not only to be.
void give_up(const Cover& cover, bool reserved) {
    auto it = all().places.find(cover.place);
    if (it == all().places.end() || --it->second.covers)
        return;
    replay::forget_reservation(it->first);
    if (reserved)
        FG_DRIVER(cuMemAddressFree)(it->first, it->second.bytes);
    all().places.erase(it);
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

// Asks for what nobody needs to know before.
bool complete(Piece& piece) {
    if (piece.device >= 0)
        return true;
    const replay::Current current(piece.context);
    CUresult result = current.result();
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuCtxGetDevice)(&piece.device);
    if (result == CUDA_SUCCESS && !piece.pool)
        result = FG_REAL(cuDeviceGetMemPool)(&piece.pool, piece.device);
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

void given(CUdeviceptr address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    if (!replay::prepared())
        return;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    // A node of a graph's, and memory once that runs.
    if (task().captures.load() &&
        (FG_REAL(cuStreamIsCapturing)(stream, &capturing) != CUDA_SUCCESS || capturing))
        return;
    Piece piece;
    piece.bytes = bytes;
    piece.pool = pool;
    piece.context = context_of(stream);
    if (!piece.context && FG_REAL(cuStreamGetCtx)(stream, &piece.context) != CUDA_SUCCESS)
        return;
    std::lock_guard<std::mutex> lock(all().mutex);
    all().drivers[address] = piece;
}

Ending::Ending(CUdeviceptr address) : address_(address) {
    {
        std::lock_guard<std::mutex> lock(all().mutex);
        auto it = all().drivers.find(address);
        if (it == all().drivers.end())
            return;
        ended_ = it->second;
    }
    // In the order in which bytes() is never less than what the task counts.
    task().remove_foreign(address);
    std::lock_guard<std::mutex> lock(all().mutex);
    all().drivers.erase(address);
}

CUresult Ending::done(CUresult result) {
    if (!ended_.bytes) {
        if (result == CUDA_SUCCESS)
            task().remove_foreign(address_);
    } else if (result != CUDA_SUCCESS) {
        {
            std::lock_guard<std::mutex> lock(all().mutex);
            all().drivers[address_] = ended_;
        }
        task().add_foreign(address_, ended_.bytes);
    }
    return result;
}

uint64_t bytes() {
    std::lock_guard<std::mutex> lock(all().mutex);
    uint64_t sum = 0;
    for (const auto& [address, piece] : all().drivers)
        sum += piece.bytes;
    return sum;
}

bool copy_out(char* detail, size_t bytes) {
    std::lock_guard<std::mutex> lock(all().mutex);
    for (auto& [address, piece] : all().drivers) {
        const char* why = complete(piece) ? why_not(piece.pool)
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
    for (const auto& [address, piece] : all().drivers)
        task().remove_foreign(address);
    all().ours.merge(all().drivers);
    all().drivers.clear();
    any_ours.store(!all().ours.empty());
}

bool find(CUdeviceptr address, Allocation* found, CUmemoryPool* pool) {
    if (!any_ours.load(std::memory_order_relaxed))
        return false;
    std::lock_guard<std::mutex> lock(all().mutex);
    auto it = all().ours.upper_bound(address);
    if (it == all().ours.begin() || address - (--it)->first >= it->second.bytes)
        return false;
    const Piece& piece = it->second;
    *found = Allocation{it->first, piece.bytes, piece.device, piece.context, nullptr};
    if (pool)
        *pool = piece.pool;
    return true;
}

CUresult release(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(all().mutex);
    if (!all().ours.erase(address))
        return CUDA_ERROR_INVALID_VALUE;
    any_ours.store(!all().ours.empty());
    auto cover = std::prev(all().covers.upper_bound(address));
    if (--cover->second.pieces)
        return CUDA_SUCCESS;
    const CUresult result = task().memory.unmap_range(cover->first, cover->second.bytes);
    give_up(cover->second, true);
    all().covers.erase(cover);
    return result;
}

void end_of(CUcontext context) {
    std::vector<uint64_t> ended;
    {
        std::lock_guard<std::mutex> lock(all().mutex);
        for (const auto& [address, piece] : all().ours)
            if (piece.context == context)
                ended.push_back(address);
    }
    for (uint64_t address : ended)
        release(address);
}

uint64_t bytes_of(CUmemoryPool pool) {
    if (!any_ours.load(std::memory_order_relaxed))
        return 0;
    std::lock_guard<std::mutex> lock(all().mutex);
    uint64_t sum = 0;
    for (const auto& [address, piece] : all().ours)
        sum += piece.pool == pool ? piece.bytes : 0;
    return sum;
}

void lock() {
    all().mutex.lock();
}

void unlock() {
    all().mutex.unlock();
}

} // namespace flowgpu::pools
