#include "managed.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "gate.h"
#include "held.h"
#include "ranges.h"
#include "replay/current.h"
#include "replay/record.h"
#include "rewind.h"
#include "task.h"

namespace flowgpu::managed {

namespace {

// Between handles (0x1f…) and what programs and their tools map by themselves (below 0x11…).
constexpr uint64_t kWindow = 0x180000000000, kWindowBytes = 6ull << 40;
// The driver rounds what it reserves up to this, and asks for as much again to align it.
constexpr uint64_t kPlace = 32ull << 20;
constexpr uint64_t kShared = 64ull << 20; // of an arena for several allocations
constexpr uint64_t kOwn = 16ull << 20;    // from here on an allocation has its own
constexpr uint64_t kLarge = 2ull << 20;   // as the driver, which aligns from here on to as much
constexpr uint64_t kPage = 4096;
constexpr int kTries = 16; // where something lies in the window already

struct Span {
    uint64_t address, bytes;
};

struct Arena {
    uint64_t address = 0;
    uint64_t bytes = 0;
    unsigned flags = 0;
    CUcontext context = nullptr;
    uint64_t granule = 0;          // of the parts, 0: it is one allocation
    std::unique_ptr<Ranges> parts; // free ones
    // Of the exchange.
    uint32_t generation = 0; // of the driver's life that has mapped it
    int fd = -1;             // which the driver has mapped
    bool away = false;
    std::vector<Span> used; // pages of allocations
    void* room = nullptr;   // where the bytes are copied to, or have been moved to
};

struct Arenas {
    std::mutex mutex; // guards what follows
    std::map<uint64_t, Arena> all;
    Ranges places{kWindow, kWindowBytes};
};

// Made on first use, never destroyed, as Task.
Arenas& arenas() {
    static auto* made = new Arenas();
    return *made;
}

uint64_t up(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}

uint64_t place_of(uint64_t bytes) {
    return up(bytes, kPlace) + kPlace;
}

template <class T = void> T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

rewind::Range range_of(const Arena& arena) {
    return {static_cast<uintptr_t>(arena.address), arena.bytes};
}

// In the current context.
CUresult make(Arena* arena) {
    for (int i = 0; i < kTries; i++) {
        const uint64_t place = arenas().places.claim(place_of(arena->bytes));
        if (!place)
            return CUDA_ERROR_NOT_SUPPORTED;
        rewind::Wish wish = {{static_cast<uintptr_t>(place), arena->bytes}, nullptr};
        rewind::wish(&wish);
        CUdeviceptr got = 0;
        const CUresult result = FG_REAL(cuMemAllocManaged)(&got, arena->bytes, arena->flags);
        rewind::wish(nullptr);
        if (result == CUDA_SUCCESS && got == place && wish.mapped) {
            arena->address = place;
            arena->fd = wish.fd;
            arena->generation = flowgpu_page.generation.load();
            return CUDA_SUCCESS;
        }
        if (result == CUDA_SUCCESS)
            FG_REAL(cuMemFree_v2)(got);
        if (result != CUDA_SUCCESS || wish.reserved) {
            arenas().places.release(place, place_of(arena->bytes));
            return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result;
        }
        // Something else lies there, and stays: so does the claim.
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

void forget(std::map<uint64_t, Arena>::iterator it) {
    address_map().remove(it->first, only(MemoryKind::arena));
    arenas().places.release(it->first, place_of(it->second.bytes));
    arenas().all.erase(it);
}

// One that has as much left, in the context and of the kind.
std::map<uint64_t, Arena>::iterator find_part(CUcontext context, unsigned flags, uint64_t granule,
                                              uint64_t bytes, uint64_t* address) {
    auto& all = arenas().all;
    return std::find_if(all.begin(), all.end(), [&](auto& row) {
        Arena& arena = row.second;
        if (!arena.parts || arena.context != context || arena.flags != flags ||
            arena.granule != granule)
            return false;
        *address = arena.parts->claim(bytes);
        return *address != 0;
    });
}

} // namespace

CUresult allocate(CUdevice device, CUcontext context, size_t bytes, unsigned flags,
                  CUdeviceptr* address) {
    int concurrent = 0;
    if (!replay::prepared() || bytes > kWindowBytes / 2 ||
        FG_REAL(cuDeviceGetAttribute)(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
                                      device) != CUDA_SUCCESS ||
        !concurrent)
        return CUDA_ERROR_NOT_SUPPORTED;
    const bool own = bytes >= kOwn;
    const uint64_t granule = own ? 0 : bytes < kLarge ? kSmallGranule : kLarge;
    const uint64_t rounded = up(bytes, own ? kLarge : granule);
    std::lock_guard<std::mutex> lock(arenas().mutex);
    uint64_t found = 0;
    auto it = own ? arenas().all.end() : find_part(context, flags, granule, rounded, &found);
    if (it == arenas().all.end()) {
        Arena arena;
        arena.bytes = own ? std::max(rounded, kPlace) : kShared;
        arena.flags = flags;
        arena.context = context;
        const CUresult result = make(&arena);
        if (result != CUDA_SUCCESS)
            return result;
        found = arena.address;
        if (!own) {
            arena.granule = granule;
            arena.parts = std::make_unique<Ranges>(arena.address, arena.bytes);
            arena.parts->claim(rounded);
        }
        address_map().put(Region{arena.address, arena.bytes, MemoryKind::arena, device, context});
        arenas().all.emplace(found, std::move(arena));
    }
    address_map().put(Region{found, bytes, MemoryKind::managed, device, context});
    task().driver_memory_changed();
    *address = found;
    return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(arenas().mutex);
    Region region;
    if (!address_map().remove(address, only(MemoryKind::managed), &region))
        return CUDA_ERROR_INVALID_VALUE;
    task().driver_memory_changed();
    const auto it = std::prev(arenas().all.upper_bound(address));
    Arena& arena = it->second;
    if (arena.parts) {
        arena.parts->release(address, up(region.bytes, arena.granule));
        if (!arena.parts->all_free())
            return CUDA_SUCCESS;
    }
    const CUresult result = FG_REAL(cuMemFree_v2)(it->first);
    forget(it);
    return result;
}

// The driver has freed the arenas with the context.
void end_of(CUcontext context) {
    std::lock_guard<std::mutex> lock(arenas().mutex);
    for (auto it = arenas().all.begin(); it != arenas().all.end();) {
        const auto arena = it++;
        if (arena->second.context != context)
            continue;
        for (const Region& region :
             address_map().all(only(MemoryKind::managed), arena->first, arena->second.bytes))
            address_map().remove(region.address, only(MemoryKind::managed));
        forget(arena);
    }
    task().driver_memory_changed();
}

namespace {

Step fail(char* detail, size_t bytes, const char* what, uint64_t address,
          CUresult result = CUDA_SUCCESS) {
    const char* name = nullptr;
    if (result != CUDA_SUCCESS)
        FG_DRIVER(cuGetErrorName)(result, &name);
    snprintf(detail, bytes, "managed memory at %#llx: %s%s%s",
             static_cast<unsigned long long>(address), what, name ? ": " : "", name ? name : "");
    return Step::failed;
}

// Pages in which there is something, page by page: of others the copy has zeros already, without
// taking memory for them.
void copy_page(uint64_t to, uint64_t from) {
    const char* bytes = pointer<char>(from);
    if (*bytes || memcmp(bytes, bytes + 1, kPage - 1) != 0)
        memcpy(pointer(to), bytes, kPage);
}

void copy_used(const Arena& arena, uint64_t to, uint64_t from) {
    for (const Span& span : arena.used)
        for (uint64_t at = 0; at < span.bytes; at += kPage) {
            const uint64_t offset = span.address - arena.address + at;
            copy_page(to + offset, from + offset);
        }
}

void find_used(Arena& arena) {
    arena.used.clear();
    for (const Region& region :
         address_map().all(only(MemoryKind::managed), arena.address, arena.bytes)) {
        const uint64_t start = region.address / kPage * kPage;
        const uint64_t end = up(region.address + region.bytes, kPage);
        if (!arena.used.empty() && start <= arena.used.back().address + arena.used.back().bytes)
            arena.used.back().bytes = end - arena.used.back().address;
        else
            arena.used.push_back({start, end - start});
    }
}

// Waits for its end. What is not brought to the host is so by the copy, page by page.
void bring_to_host(const Arena& arena) {
    const replay::Current current(arena.context);
    if (current.result() != CUDA_SUCCESS)
        return;
    for (const Span& span : arena.used)
        FG_DRIVER(cuMemPrefetchAsync)(span.address, span.bytes, CU_DEVICE_CPU, nullptr);
    FG_DRIVER(cuStreamSynchronize)(nullptr);
}

// What the program has protected cannot be read, and would come back without that.
bool is_plain(const Arena& arena) {
    bool plain = true;
    proc::each_mapping([&](const proc::Mapping& mapping) {
        if (mapping.start < arena.address + arena.bytes && arena.address < mapping.end)
            plain = plain && memcmp(mapping.mode, "rw", 2) == 0;
    });
    return plain;
}

bool move(void* from, void* to, size_t bytes) {
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

bool make_room(Arena& arena) {
    if (arena.room)
        return true;
    void* room = mmap(nullptr, arena.bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena.room = room == MAP_FAILED ? nullptr : room;
    return arena.room != nullptr;
}

// The thread in which the driver makes an arena anew. It waits within the driver's mmap until its
// pages have taken the place of those that are there: only then the program's threads are held, and
// whoever is held may have a lock that the driver, or malloc, waits for.
struct Arrival {
    std::mutex mutex; // guards what follows
    std::condition_variable changed;
    enum { none, asking, mapping, exchanged, ended } state = none;
    Arena* arena = nullptr;
    CUresult result = CUDA_SUCCESS;
    CUdeviceptr got = 0;
    // Arguments of its mmap.
    int protection = 0, flags = 0, fd = -1;
    bool replaced = false;
};
Arrival& arrival() {
    static auto* made = new Arrival();
    return *made;
}

void* take_place(void* at, size_t, int protection, int flags, int fd, long) {
    Arrival& a = arrival();
    std::unique_lock<std::mutex> lock(a.mutex);
    a.protection = protection;
    a.flags = flags;
    a.fd = fd;
    a.state = Arrival::mapping;
    a.changed.notify_all();
    a.changed.wait(lock, [&] { return a.state == Arrival::exchanged; });
    return a.replaced ? at : MAP_FAILED;
}

void* arrive(void*) {
    prctl(PR_SET_NAME, "flowgpu-managed"); // who holds threads leaves it out by this
    gate::exempt();
    Arrival& a = arrival();
    const Arena& arena = *a.arena;
    CUdeviceptr got = 0;
    CUresult result;
    {
        const replay::Current current(arena.context);
        rewind::Wish wish = {range_of(arena), take_place};
        rewind::wish(&wish);
        result = current.result();
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuMemAllocManaged)(&got, arena.bytes, arena.flags);
        rewind::wish(nullptr);
        if (result == CUDA_SUCCESS && got != arena.address)
            FG_DRIVER(cuMemFree_v2)(got);
    }
    std::lock_guard<std::mutex> lock(a.mutex);
    a.result = result;
    a.got = got;
    a.state = Arrival::ended;
    a.changed.notify_all();
    return nullptr;
}

// What lies there goes aside, and the driver's mapping takes its place, with the bytes. False: all
// is as it was.
bool take_back(Arena& arena, int protection, int flags, int fd) {
    void* const at = pointer(arena.address);
    void* const aside = std::exchange(arena.room, nullptr);
    // The program may have divided it meanwhile, and what is divided is not moved as one.
    mprotect(at, arena.bytes, PROT_READ | PROT_WRITE);
    if (!move(at, aside, arena.bytes))
        return false;
    if (mmap(at, arena.bytes, protection, flags, fd, static_cast<off_t>(arena.address)) != at) {
        move(aside, at, arena.bytes);
        return false;
    }
    copy_used(arena, arena.address, reinterpret_cast<uint64_t>(aside));
    munmap(aside, arena.bytes);
    rewind::forget_data(range_of(arena));
    arena.away = false;
    arena.fd = fd;
    arena.generation = flowgpu_page.generation.load();
    return true;
}

Arena* coming; // that come() is for

constexpr char kLetGo[] = "the program's threads were not held";

} // namespace

bool away() {
    const auto& all = arenas().all;
    return std::any_of(all.begin(), all.end(), [](const auto& row) { return row.second.away; });
}

Step begin_leaving(bool* held, char* detail, size_t bytes) {
    for (auto& [address, arena] : arenas().all) {
        if (arena.away)
            continue;
        if (!is_plain(arena))
            return fail(detail, bytes, "the program has protected pages of it", address);
        find_used(arena);
        bring_to_host(arena);
        if (!make_room(arena))
            return fail(detail, bytes, "there is no memory of the host for it", address);
        *held = true;
    }
    return Step::done;
}

Step leave(char* detail, size_t bytes) {
    for (auto& [address, arena] : arenas().all) {
        if (arena.away || !arena.room)
            continue;
        const Held held;
        if (!held.all())
            return fail(detail, bytes, kLetGo, address);
        if (!rewind::hold_data(range_of(arena)))
            return fail(detail, bytes, "there are too many ranges of it", address);
        copy_used(arena, reinterpret_cast<uint64_t>(arena.room), address);
        const bool moved = held.still() && move(arena.room, pointer(address), arena.bytes);
        if (!moved) {
            rewind::forget_data(range_of(arena));
            return fail(detail, bytes, held.still() ? "its pages cannot be exchanged" : kLetGo,
                        address);
        }
        arena.room = nullptr;
        arena.away = true;
        if (!held.still()) {
            fail(detail, bytes, kLetGo, address);
            return Step::lost;
        }
    }
    return Step::done;
}

Step begin_coming(bool* held, char* detail, size_t bytes) {
    Arrival& a = arrival();
    std::unique_lock<std::mutex> lock(a.mutex);
    if (a.state == Arrival::exchanged)
        a.changed.wait(lock, [&] { return a.state == Arrival::ended; });
    if (a.state == Arrival::ended) {
        a.state = Arrival::none;
        const uint64_t address = a.arena->address;
        if (a.result != CUDA_SUCCESS) {
            const Step step = fail(detail, bytes, "it cannot be made again", address, a.result);
            return a.replaced ? Step::lost : step;
        }
    }
    if (a.state == Arrival::mapping) { // who asked has not come back
        *held = true;
        return Step::done;
    }
    auto& all = arenas().all;
    const auto it =
        std::find_if(all.begin(), all.end(), [](const auto& row) { return row.second.away; });
    if (it == all.end())
        return Step::done;
    coming = &it->second;
    if (!make_room(*coming))
        return fail(detail, bytes, "there are no addresses for a copy of it", it->first);
    *held = true;
    if (coming->generation == flowgpu_page.generation.load())
        return Step::done;
    a.arena = coming;
    a.state = Arrival::asking;
    a.replaced = false;
    // It takes over which signals this thread lets in (service.cpp), and gives them to the driver's
    // threads that it may start.
    pthread_t thread;
    if (pthread_create(&thread, nullptr, arrive, nullptr) != 0) {
        a.state = Arrival::none;
        return fail(detail, bytes, "there is no room for a thread", it->first);
    }
    pthread_detach(thread);
    a.changed.wait(lock, [&] { return a.state == Arrival::mapping || a.state == Arrival::ended; });
    if (a.state == Arrival::mapping)
        return Step::done;
    a.state = Arrival::none;
    return a.result == CUDA_SUCCESS
               ? fail(detail, bytes, "its address could not be had again", it->first)
               : fail(detail, bytes, "it cannot be made again", it->first, a.result);
}

Step come(char* detail, size_t bytes) {
    Arrival& a = arrival();
    if (!coming || !coming->away)
        return Step::done; // its answer was lost
    Arena& arena = *coming;
    const Held held;
    if (!held.all())
        return fail(detail, bytes, kLetGo, arena.address);
    const bool stayed = arena.generation == flowgpu_page.generation.load();
    std::unique_lock<std::mutex> lock(a.mutex);
    const bool replaced =
        stayed ? take_back(arena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, arena.fd)
               : a.state == Arrival::mapping && take_back(arena, a.protection, a.flags, a.fd);
    if (!stayed) {
        a.replaced = replaced;
        a.state = Arrival::exchanged;
        a.changed.notify_all();
    }
    if (!replaced)
        return fail(detail, bytes, "the driver's mapping could not take its place", arena.address);
    if (!held.still()) {
        fail(detail, bytes, kLetGo, arena.address);
        return Step::lost;
    }
    return Step::done;
}

void lock() {
    arenas().mutex.lock();
}

void unlock() {
    arenas().mutex.unlock();
}

} // namespace flowgpu::managed
