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
constexpr uint64_t kShared = 64ull << 20; // of a tract for several allocations
constexpr uint64_t kOwn = 16ull << 20;    // from here on an allocation has its own
constexpr uint64_t kLarge = 2ull << 20;   // as the driver, which aligns from here on to as much
constexpr uint64_t kPage = 4096;
constexpr int kTries = 16; // where something lies in the window already

struct Span {
    uint64_t address, bytes;
};

// Hints for pages, up to `end`.
struct Hints {
    uint64_t end = 0;
    bool read_mostly = false;
    CUmemLocation preferred = {}, prefetched = {}; // CU_MEM_LOCATION_TYPE_INVALID: none
    uint64_t accessed_by = 0;                      // a bit for each device
    bool accessed_by_host = false;
};

struct Tract {
    uint64_t address = 0;
    uint64_t bytes = 0;
    unsigned flags = 0;
    CUcontext context = nullptr;
    bool lasting = false;           // and homeless without a context
    bool ends_with_context = false; // it is about to: the bytes are in `room` as well
    uint64_t granule = 0;           // of the parts, 0: it is one allocation
    std::unique_ptr<Ranges> parts;  // free ones
    // The exchange needs what follows.
    uint32_t generation = 0; // of the driver's life that has mapped it
    int fd = -1;             // which the driver has mapped
    bool away = false;
    bool hints_are_due = false;
    std::map<uint64_t, Hints> hints; // by address, none of them beside another
    std::vector<Span> used;          // pages of allocations
    void* room = nullptr;            // where the bytes are copied to, or have been moved to
};

struct Tracts {
    std::mutex mutex; // guards what follows
    std::map<uint64_t, Tract> all;
    Ranges places{kWindow, kWindowBytes};
};

// Made on first use, never destroyed, as Task.
Tracts& tracts() {
    static auto* made = new Tracts();
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

rewind::Range range_of(const Tract& tract) {
    return {static_cast<uintptr_t>(tract.address), tract.bytes};
}

// In the current context.
CUresult make(Tract* tract) {
    for (int i = 0; i < kTries; i++) {
        const uint64_t place = tracts().places.claim(place_of(tract->bytes));
        if (!place)
            return CUDA_ERROR_NOT_SUPPORTED;
        rewind::Wish wish = {{static_cast<uintptr_t>(place), tract->bytes}, nullptr};
        rewind::wish(&wish);
        CUdeviceptr got = 0;
        const CUresult result = FG_REAL(cuMemAllocManaged)(&got, tract->bytes, tract->flags);
        rewind::wish(nullptr);
        if (result == CUDA_SUCCESS && got == place && wish.mapped) {
            tract->address = place;
            tract->fd = wish.fd;
            tract->generation = flowgpu_page.generation.load();
            return CUDA_SUCCESS;
        }
        if (result == CUDA_SUCCESS)
            FG_REAL(cuMemFree_v2)(got);
        if (result != CUDA_SUCCESS || wish.reserved) {
            tracts().places.release(place, place_of(tract->bytes));
            return result == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED : result;
        }
        // Something else lies there, and stays: so does the claim.
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

// Changes the hints for pages of a tract.
template <class Change>
void change_hints(Tract& tract, uint64_t address, uint64_t bytes, Change change) {
    const uint64_t begin = address / kPage * kPage, end = up(address + bytes, kPage);
    const auto cut = [&](uint64_t at) {
        auto it = tract.hints.upper_bound(at);
        if (it == tract.hints.begin() || (--it)->first == at || it->second.end <= at)
            return;
        tract.hints.emplace(at, it->second);
        it->second.end = at;
    };
    cut(begin);
    cut(end);
    for (uint64_t at = begin; at < end;) {
        auto it = tract.hints.lower_bound(at);
        if (it == tract.hints.end() || it->first > at) {
            Hints fresh;
            fresh.end = it == tract.hints.end() ? end : std::min(end, it->first);
            it = tract.hints.emplace_hint(it, at, fresh);
        }
        change(it->second);
        at = it->second.end;
    }
}

Tract* tract_of(uint64_t address) {
    auto it = tracts().all.upper_bound(address);
    if (it == tracts().all.begin())
        return nullptr;
    Tract& tract = std::prev(it)->second;
    return address - tract.address < tract.bytes ? &tract : nullptr;
}

void set(CUmem_advise advice, uint64_t address, uint64_t bytes, CUmemLocation where) {
    const bool named =
        where.type == CU_MEM_LOCATION_TYPE_HOST || where.type == CU_MEM_LOCATION_TYPE_DEVICE;
    const CUdevice device = where.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : where.id;
    if (named || !FG_DRIVER(cuMemAdvise_v2)) // which a driver has from CUDA 12.2 on
        FG_DRIVER(cuMemAdvise)(address, bytes, advice, device);
    else
        FG_DRIVER(cuMemAdvise_v2)(address, bytes, advice, where);
}

constexpr CUmemLocation at_device(int device) {
    CUmemLocation where = {};
    where.type = CU_MEM_LOCATION_TYPE_DEVICE;
    where.id = device;
    return where;
}
constexpr CUmemLocation at_host() {
    CUmemLocation where = {};
    where.type = CU_MEM_LOCATION_TYPE_HOST;
    return where;
}

// The driver forgets hints with the memory. Ours may lie beside other memory on a page, as its own
// may: that loses them too (H100, driver 580).
void end_hints(Tract& tract, uint64_t address, uint64_t bytes) {
    const uint64_t begin = address / kPage * kPage, end = up(address + bytes, kPage);
    const auto next = tract.hints.lower_bound(end);
    if (next == tract.hints.begin() || std::prev(next)->second.end <= begin)
        return;
    change_hints(tract, begin, end - begin, [](Hints&) {});
    const auto first = tract.hints.lower_bound(begin), last = tract.hints.lower_bound(end);
    for (auto it = first; it != last; ++it) {
        const Hints& hints = it->second;
        const uint64_t size = hints.end - it->first;
        if (hints.read_mostly)
            set(CU_MEM_ADVISE_UNSET_READ_MOSTLY, it->first, size, at_device(0));
        if (hints.preferred.type != CU_MEM_LOCATION_TYPE_INVALID)
            set(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, it->first, size, at_device(0));
        if (hints.accessed_by_host)
            set(CU_MEM_ADVISE_UNSET_ACCESSED_BY, it->first, size, at_host());
        for (int device = 0; device < kMaxDevices; device++)
            if (hints.accessed_by >> device & 1)
                set(CU_MEM_ADVISE_UNSET_ACCESSED_BY, it->first, size, at_device(device));
    }
    tract.hints.erase(first, last);
}

// A hint that the driver does not take any more is none: what it was for goes on all the same.
void give_hints(const Tract& tract) {
    const replay::Current current(tract.context);
    if (current.result() != CUDA_SUCCESS)
        return;
    for (const auto& [at, hints] : tract.hints) {
        const uint64_t bytes = hints.end - at;
        if (hints.read_mostly)
            set(CU_MEM_ADVISE_SET_READ_MOSTLY, at, bytes, at_device(0));
        if (hints.preferred.type != CU_MEM_LOCATION_TYPE_INVALID)
            set(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, at, bytes, hints.preferred);
        if (hints.accessed_by_host)
            set(CU_MEM_ADVISE_SET_ACCESSED_BY, at, bytes, at_host());
        for (int device = 0; device < kMaxDevices; device++)
            if (hints.accessed_by >> device & 1)
                set(CU_MEM_ADVISE_SET_ACCESSED_BY, at, bytes, at_device(device));
        const CUmemLocation to = hints.prefetched;
        if (to.type == CU_MEM_LOCATION_TYPE_DEVICE || to.type == CU_MEM_LOCATION_TYPE_HOST)
            FG_DRIVER(cuMemPrefetchAsync)(
                at, bytes, to.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : to.id, nullptr);
        else if (to.type != CU_MEM_LOCATION_TYPE_INVALID && FG_DRIVER(cuMemPrefetchAsync_v2))
            FG_DRIVER(cuMemPrefetchAsync_v2)(at, bytes, to, 0, nullptr);
    }
    FG_DRIVER(cuStreamSynchronize)(nullptr);
}

bool move(void* from, void* to, size_t bytes) {
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

void become_homeless(Tract& tract) {
    tract.ends_with_context = false;
    tract.context = nullptr;
    move(std::exchange(tract.room, nullptr), pointer(tract.address), tract.bytes);
}

void forget(std::map<uint64_t, Tract>::iterator it) {
    address_map().remove(it->first, only(MemoryKind::tract));
    tracts().places.release(it->first, place_of(it->second.bytes));
    tracts().all.erase(it);
}

// One that has as much left, in the context and of the kind.
std::map<uint64_t, Tract>::iterator find_part(CUcontext context, unsigned flags, uint64_t granule,
                                              uint64_t bytes, uint64_t* address) {
    auto& all = tracts().all;
    return std::find_if(all.begin(), all.end(), [&](auto& row) {
        Tract& tract = row.second;
        if (!tract.parts || tract.context != context || tract.flags != flags ||
            tract.granule != granule)
            return false;
        *address = tract.parts->claim(bytes);
        return *address != 0;
    });
}

} // namespace

CUresult allocate(CUdevice device, CUcontext context, size_t bytes, unsigned flags,
                  CUdeviceptr* address, bool lasting) {
    int concurrent = 0;
    if (!replay::prepared() || bytes > kWindowBytes / 2 ||
        FG_REAL(cuDeviceGetAttribute)(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
                                      device) != CUDA_SUCCESS ||
        !concurrent)
        return CUDA_ERROR_NOT_SUPPORTED;
    const bool own = bytes >= kOwn || lasting;
    const uint64_t granule = own ? 0 : bytes < kLarge ? kSmallGranule : kLarge;
    const uint64_t rounded = up(bytes, own ? kLarge : granule);
    std::lock_guard<std::mutex> lock(tracts().mutex);
    uint64_t found = 0;
    auto it = own ? tracts().all.end() : find_part(context, flags, granule, rounded, &found);
    if (it == tracts().all.end()) {
        Tract tract;
        tract.bytes = own ? std::max(rounded, kPlace) : kShared;
        tract.flags = flags;
        tract.context = context;
        tract.lasting = lasting;
        const CUresult result = make(&tract);
        if (result != CUDA_SUCCESS)
            return result;
        found = tract.address;
        if (!own) {
            tract.granule = granule;
            tract.parts = std::make_unique<Ranges>(tract.address, tract.bytes);
            tract.parts->claim(rounded);
        }
        address_map().put(Region{tract.address, tract.bytes, MemoryKind::tract, device, context});
        tracts().all.emplace(found, std::move(tract));
    }
    address_map().put(
        Region{found, bytes, MemoryKind::managed, device, lasting ? nullptr : context});
    task().driver_memory_changed();
    *address = found;
    return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    Region region;
    if (!address_map().remove(address, only(MemoryKind::managed), &region))
        return CUDA_ERROR_INVALID_VALUE;
    task().driver_memory_changed();
    const auto it = std::prev(tracts().all.upper_bound(address));
    Tract& tract = it->second;
    if (tract.parts) {
        end_hints(tract, address, region.bytes);
        tract.parts->release(address, up(region.bytes, tract.granule));
        if (!tract.parts->all_free())
            return CUDA_SUCCESS;
    }
    CUresult result = CUDA_SUCCESS;
    if (tract.context) {
        result = FG_REAL(cuMemFree_v2)(it->first);
    } else {
        rewind::forget_data(range_of(tract));
        munmap(pointer(tract.address), tract.bytes);
    }
    forget(it);
    return result;
}

// The driver has freed the tracts with the context.
void end_of(CUcontext context) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    for (auto it = tracts().all.begin(); it != tracts().all.end();) {
        const auto tract = it++;
        if (tract->second.context != context)
            continue;
        if (tract->second.ends_with_context) {
            become_homeless(tract->second);
            continue;
        }
        for (const Region& region :
             address_map().all(only(MemoryKind::managed), tract->first, tract->second.bytes))
            address_map().remove(region.address, only(MemoryKind::managed));
        forget(tract);
    }
    task().driver_memory_changed();
}

Place place_of(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    const Tract* tract = tract_of(address);
    return tract ? Place{tract->address, !tract->parts} : Place{address, true};
}

void note_advice(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    Tract* tract = tract_of(address);
    if (!tract)
        return;
    const bool sets = advice == CU_MEM_ADVISE_SET_ACCESSED_BY;
    change_hints(*tract, address, bytes, [&](Hints& hints) {
        switch (advice) {
        case CU_MEM_ADVISE_SET_READ_MOSTLY:
        case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
            hints.read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
            break;
        case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
            hints.preferred = location;
            break;
        case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
            hints.preferred = {};
            break;
        case CU_MEM_ADVISE_SET_ACCESSED_BY:
        case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
            if (location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                hints.accessed_by_host = sets;
            else if (location.id < kMaxDevices)
                hints.accessed_by = (hints.accessed_by & ~(1ull << location.id)) |
                                    static_cast<uint64_t>(sets) << location.id;
            break;
        }
    });
}

void note_prefetch(CUdeviceptr address, size_t bytes, CUmemLocation location) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    if (Tract* tract = tract_of(address))
        change_hints(*tract, address, bytes, [&](Hints& hints) { hints.prefetched = location; });
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

void copy_used(const Tract& tract, uint64_t to, uint64_t from) {
    for (const Span& span : tract.used)
        for (uint64_t at = 0; at < span.bytes; at += kPage) {
            const uint64_t offset = span.address - tract.address + at;
            copy_page(to + offset, from + offset);
        }
}

void find_used(Tract& tract) {
    tract.used.clear();
    for (const Region& region :
         address_map().all(only(MemoryKind::managed), tract.address, tract.bytes)) {
        const uint64_t start = region.address / kPage * kPage;
        const uint64_t end = up(region.address + region.bytes, kPage);
        if (!tract.used.empty() && start <= tract.used.back().address + tract.used.back().bytes)
            tract.used.back().bytes = end - tract.used.back().address;
        else
            tract.used.push_back({start, end - start});
    }
}

// Waits for its end. What is not brought to the host is so by the copy, page by page.
void bring_to_host(const Tract& tract) {
    const replay::Current current(tract.context);
    if (current.result() != CUDA_SUCCESS)
        return;
    for (const Span& span : tract.used)
        FG_DRIVER(cuMemPrefetchAsync)(span.address, span.bytes, CU_DEVICE_CPU, nullptr);
    FG_DRIVER(cuStreamSynchronize)(nullptr);
}

// Pages that are read mostly would be copied, and stay on devices as well.
void set_read_mostly(const Tract& tract, CUmem_advise advice) {
    for (const auto& [at, hints] : tract.hints)
        if (hints.read_mostly)
            set(advice, at, hints.end - at, at_device(0));
}

// What the program has protected cannot be read, and would come back without that.
bool is_plain(const Tract& tract) {
    bool plain = true;
    proc::each_mapping([&](const proc::Mapping& mapping) {
        if (mapping.start < tract.address + tract.bytes && tract.address < mapping.end)
            plain = plain && memcmp(mapping.mode, "rw", 2) == 0;
    });
    return plain;
}

bool make_room(Tract& tract) {
    if (tract.room)
        return true;
    void* room = mmap(nullptr, tract.bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    tract.room = room == MAP_FAILED ? nullptr : room;
    return tract.room != nullptr;
}

// The thread in which the driver makes a tract anew. It waits within the driver's mmap until its
// pages have taken the place of those that are there: only then the program's threads are held, and
// whoever is held may have a lock that the driver, or malloc, waits for.
struct Arrival {
    std::mutex mutex; // guards what follows
    std::condition_variable changed;
    enum { none, asking, mapping, exchanged, ended } state = none;
    Tract* tract = nullptr;
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
    const Tract& tract = *a.tract;
    CUdeviceptr got = 0;
    CUresult result;
    {
        const replay::Current current(tract.context);
        rewind::Wish wish = {range_of(tract), take_place};
        rewind::wish(&wish);
        result = current.result();
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuMemAllocManaged)(&got, tract.bytes, tract.flags);
        rewind::wish(nullptr);
        if (result == CUDA_SUCCESS && got != tract.address)
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
bool take_back(Tract& tract, int protection, int flags, int fd) {
    void* const at = pointer(tract.address);
    void* const aside = std::exchange(tract.room, nullptr);
    // The program may have divided it meanwhile, and what is divided is not moved as one.
    mprotect(at, tract.bytes, PROT_READ | PROT_WRITE);
    if (!move(at, aside, tract.bytes))
        return false;
    if (mmap(at, tract.bytes, protection, flags, fd, static_cast<off_t>(tract.address)) != at) {
        move(aside, at, tract.bytes);
        return false;
    }
    madvise(at, tract.bytes, MADV_DONTFORK); // as the driver has it
    copy_used(tract, tract.address, reinterpret_cast<uint64_t>(aside));
    munmap(aside, tract.bytes);
    tract.away = false;
    tract.hints_are_due = true;
    tract.fd = fd;
    tract.generation = flowgpu_page.generation.load();
    return true;
}

Tract* taken_in; // whose pages take_place_now exchanges; the lock is held

void* take_place_now(void* at, size_t, int protection, int flags, int fd, long) {
    return take_back(*taken_in, protection, flags, fd) ? at : MAP_FAILED;
}

Tract* coming; // that come() is for

constexpr char kLetGo[] = "the program's threads were not held";

} // namespace

bool away() {
    const auto& all = tracts().all;
    return std::any_of(all.begin(), all.end(), [](const auto& row) { return row.second.away; });
}

// What the driver unmaps there from now on is left as it is (rewind::hold_data).
void before_end_of(CUcontext context) {
    if (!context)
        return;
    std::lock_guard<std::mutex> lock(tracts().mutex);
    for (auto& [address, tract] : tracts().all) {
        if (!tract.lasting || tract.context != context)
            continue;
        find_used(tract);
        {
            const replay::Current current(context);
            if (current.result() == CUDA_SUCCESS)
                FG_DRIVER(cuCtxSynchronize)();
        }
        if (!make_room(tract) || !rewind::hold_data(range_of(tract)))
            continue;
        copy_used(tract, reinterpret_cast<uint64_t>(tract.room), address);
        tract.ends_with_context = true;
    }
}

void goes_on(CUcontext context) {
    if (!context)
        return;
    std::lock_guard<std::mutex> lock(tracts().mutex);
    for (auto& [address, tract] : tracts().all) {
        if (tract.context != context || !std::exchange(tract.ends_with_context, false))
            continue;
        rewind::forget_data(range_of(tract));
        munmap(std::exchange(tract.room, nullptr), tract.bytes);
    }
}

bool take_in(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(tracts().mutex);
    Tract* tract = tract_of(address);
    CUcontext context = nullptr;
    if (!tract || tract->context)
        return tract != nullptr;
    if (FG_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS || !context || !make_room(*tract))
        return false;
    find_used(*tract);
    taken_in = tract;
    rewind::Wish wish = {range_of(*tract), take_place_now};
    rewind::wish(&wish);
    CUdeviceptr got = 0;
    const CUresult result = FG_DRIVER(cuMemAllocManaged)(&got, tract->bytes, tract->flags);
    rewind::wish(nullptr);
    if (result == CUDA_SUCCESS && got != tract->address)
        FG_DRIVER(cuMemFree_v2)(got);
    if (result != CUDA_SUCCESS || got != tract->address)
        return false;
    rewind::forget_data(range_of(*tract));
    tract->context = context;
    give_hints(*tract);
    tract->hints_are_due = false;
    return true;
}

Step begin_leaving(bool* held, char* detail, size_t bytes) {
    for (auto& [address, tract] : tracts().all) {
        if (tract.away || !tract.context)
            continue;
        if (!is_plain(tract))
            return fail(detail, bytes, "the program has protected pages of it", address);
        find_used(tract);
        bring_to_host(tract);
        if (!make_room(tract))
            return fail(detail, bytes, "there is no memory of the host for it", address);
        // Now: one of the driver's threads that is held may have the lock that this takes.
        rewind::forget_data(range_of(tract));
        if (!rewind::hold_data(range_of(tract)))
            return fail(detail, bytes, "there are too many ranges of it", address);
        *held = true;
    }
    return Step::done;
}

Step leave(char* detail, size_t bytes) {
    for (auto& [address, tract] : tracts().all) {
        if (tract.away || !tract.room)
            continue;
        const Held held;
        if (!held.all())
            return fail(detail, bytes, kLetGo, address);
        copy_used(tract, reinterpret_cast<uint64_t>(tract.room), address);
        const bool moved = held.still() && move(tract.room, pointer(address), tract.bytes);
        if (!moved)
            return fail(detail, bytes, held.still() ? "its pages cannot be exchanged" : kLetGo,
                        address);
        tract.room = nullptr;
        tract.away = true;
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
        const uint64_t address = a.tract->address;
        if (a.result != CUDA_SUCCESS) {
            const Step step = fail(detail, bytes, "it cannot be made again", address, a.result);
            return a.replaced ? Step::lost : step;
        }
    }
    if (a.state == Arrival::mapping) { // who asked has not come back
        *held = true;
        return Step::done;
    }
    auto& all = tracts().all;
    const auto it =
        std::find_if(all.begin(), all.end(), [](const auto& row) { return row.second.away; });
    if (it == all.end()) {
        for (auto& [address, tract] : all) {
            if (!tract.context)
                continue;
            rewind::forget_data(range_of(tract));
            if (std::exchange(tract.hints_are_due, false))
                give_hints(tract);
        }
        return Step::done;
    }
    coming = &it->second;
    if (!make_room(*coming))
        return fail(detail, bytes, "there are no addresses for a copy of it", it->first);
    *held = true;
    if (coming->generation == flowgpu_page.generation.load())
        return Step::done;
    a.tract = coming;
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
    Tract& tract = *coming;
    const Held held;
    if (!held.all())
        return fail(detail, bytes, kLetGo, tract.address);
    const bool stayed = tract.generation == flowgpu_page.generation.load();
    std::unique_lock<std::mutex> lock(a.mutex);
    const bool replaced =
        stayed ? take_back(tract, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, tract.fd)
               : a.state == Arrival::mapping && take_back(tract, a.protection, a.flags, a.fd);
    if (!stayed) {
        a.replaced = replaced;
        a.state = Arrival::exchanged;
        a.changed.notify_all();
    }
    if (!replaced)
        return fail(detail, bytes, "the driver's mapping could not take its place", tract.address);
    if (!held.still()) {
        fail(detail, bytes, kLetGo, tract.address);
        return Step::lost;
    }
    return Step::done;
}

void to_host() {
    for (auto& [address, tract] : tracts().all) {
        const replay::Current current(tract.context);
        if (!tract.context || current.result() != CUDA_SUCCESS)
            continue;
        find_used(tract);
        set_read_mostly(tract, CU_MEM_ADVISE_UNSET_READ_MOSTLY);
        bring_to_host(tract);
        set_read_mostly(tract, CU_MEM_ADVISE_SET_READ_MOSTLY);
        tract.hints_are_due = true;
    }
    for (const Region& region : address_map().all(only(MemoryKind::unplaced))) {
        const replay::Current current(region.context);
        if (!region.context || current.result() != CUDA_SUCCESS)
            continue;
        FG_DRIVER(cuMemPrefetchAsync)(region.address, region.bytes, CU_DEVICE_CPU, nullptr);
        FG_DRIVER(cuStreamSynchronize)(nullptr);
    }
}

void lock() {
    tracts().mutex.lock();
}

void unlock() {
    tracts().mutex.unlock();
}

} // namespace flowgpu::managed
