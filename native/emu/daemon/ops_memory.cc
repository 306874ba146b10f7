// Allocations, host memory, pools and pointers.
#include "state.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

namespace flowgpu::emu {

int32_t op_MemGetInfo(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const auto context = s.context(&error)) {
        s.out.put(context->device->free());
        s.out.put(context->device->total);
    }
    return error;
}

int32_t op_MemAlloc(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto size = s.in.take<uint64_t>();
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    uint64_t address = 0;
    uint64_t bytes = 0;
    const int32_t r = s.client.allocate(*context, MapKind::kAlloc, size, &address, &bytes);
    if (r == kNeedAddresses) {
        return s.need(bytes);
    }
    s.out.put(address);
    return r;
}

int32_t op_MemFree(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    // Measured: no context need be the current one.
    if (s.context(&error) == nullptr && error != CUDA_ERROR_INVALID_CONTEXT) {
        return error;
    }
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    if (const CUresult r = s.unsafe_call(); r != CUDA_SUCCESS) {
        return r;
    }
    if (s.client.space.is_managed(address)) {
        return free_managed(s, address);
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr || map->begin != address || map->kind != MapKind::kAlloc) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // Freeing waits for the device: a kernel that still uses the memory ends first.
    const auto owner = s.client.find<Context>(map->context);
    if (owner != nullptr) {
        if (const CUresult r = s.wait_idle(*owner); r != CUDA_SUCCESS) {
            return r;
        }
    }
    map = s.client.space.at(address);
    if (map == nullptr || map->begin != address) {
        return CUDA_ERROR_INVALID_VALUE; // another thread freed it meanwhile
    }
    s.client.release(address);
    return CUDA_SUCCESS;
}

namespace {

int32_t no_memory_nodes(Session& s, const Stream& stream, const char* what) {
    s.machine().count_unsupported(what);
    s.breaks_capture(stream);
    return CUDA_ERROR_NOT_SUPPORTED;
}

} // namespace

int32_t op_MemAllocAsync(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto size = s.in.take<uint64_t>();
    auto pool = s.in.take<uint64_t>();
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return no_memory_nodes(s, *stream, "cuMemAllocAsync in a capture");
    }
    if (pool == 0) {
        pool = current_pool(s.client, stream->context->device->index);
    }
    const auto from = s.client.find<Pool>(pool);
    if (from != nullptr && from->device == kOnHost) {
        s.machine().count_unsupported("memory of a pool of the host");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (from == nullptr || from->device != stream->context->device->index) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t address = 0;
    uint64_t bytes = 0;
    if (size == 0) {
        s.out.put(address); // measured: none, without an error
        return CUDA_SUCCESS;
    }
    const int32_t r = s.client.allocate(*stream->context, MapKind::kAlloc, size, &address, &bytes);
    if (r == kNeedAddresses) {
        return s.need(bytes);
    }
    if (r == CUDA_SUCCESS) {
        Mapping& map = s.client.space.maps.find(address)->second;
        map.pool = pool;
        map.readers |= from->readers;
        map.writers |= from->writers;
        s.client.space.changed();
    }
    s.out.put(address);
    return r;
}

int32_t op_MemFreeAsync(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return no_memory_nodes(s, *stream, "cuMemFreeAsync in a capture");
    }
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr || map->begin != address || map->kind != MapKind::kAlloc) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    submit(s.client, stream, [self = s.client.shared_from_this(), address] {
        std::lock_guard<std::mutex> guard(self->mutex);
        self->release(address);
    });
    return CUDA_SUCCESS;
}

int32_t op_MemAddressRange(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr || (map->readers & 1u << context->device->index) == 0) {
        return CUDA_ERROR_NOT_FOUND;
    }
    s.out.put(map->begin);
    s.out.put(map->size());
    return CUDA_SUCCESS;
}

namespace {

template <class T> int32_t answer(Session& s, T value) {
    s.out.put_blob(&value, sizeof value);
    return CUDA_SUCCESS;
}

int32_t host_attribute(Session& s, int key, uint64_t address, uint64_t begin, uint64_t size) {
    switch (key) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return answer(s, static_cast<uint32_t>(CU_MEMORYTYPE_HOST));
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return answer(s, address);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return answer(s, begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return answer(s, size);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return answer(s, uint8_t{0});
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return answer(s, uint64_t{0});
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return answer(s, uint8_t{1});
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

// Where it begins and its bytes. Measured: of what a program maps, the whole reservation.
std::pair<uint64_t, uint64_t> range_of(Session& s, const Mapping& map) {
    if (map.kind != MapKind::kVmm) {
        return {map.begin, map.size()};
    }
    const auto around = s.client.space.reservation_from(map.begin); // a mapping lies in one
    return {around->first, around->second - around->first};
}

int32_t device_attribute(Session& s, int key, uint64_t address, const Mapping& map) {
    const int device = s.client.ordinal(*map.phys->device());
    switch (key) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return answer(s, map.pool != 0 ? uint64_t{0} : map.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return answer(s, static_cast<uint32_t>(CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return answer(s, address);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return map.kind == MapKind::kManaged ? answer(s, address)
                                             : int32_t{CUDA_ERROR_INVALID_VALUE};
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return answer(s, map.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return answer(s, device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return answer(s, range_of(s, map).first);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return answer(s, range_of(s, map).second);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        return answer(s, uint8_t{map.kind == MapKind::kAlloc && map.pool == 0});
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return answer(s, uint8_t{1});
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return answer(s, uint8_t{map.kind == MapKind::kManaged});
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        return answer(s, uint8_t{0});
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
        const auto handle = s.client.find<MemHandle>(map.handle);
        return answer(s, uint64_t{handle != nullptr ? handle->handle_types : 0});
    }
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return answer(s, uint32_t{(map.writers >> device & 1) != 0
                                      ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                  : (map.readers >> device & 1) != 0
                                      ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ
                                      : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE});
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return answer(s, map.pool);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

} // namespace

int32_t op_PointerAttribute(Session& s) {
    const auto key = s.in.take<int32_t>();
    const auto address = s.in.take<uint64_t>();
    if (const Mapping* map = s.client.space.at(address)) {
        return device_attribute(s, key, address, *map);
    }
    const auto& ranges = s.client.host_ranges;
    const auto next = ranges.upper_bound(address);
    if (next != ranges.begin()) {
        const auto& [begin, range] = *std::prev(next);
        if (address < begin + range.size) {
            return host_attribute(s, key, address, begin, range.size);
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

// Linux lets nobody pin pages for long that it may write back to a file: it could not tell any more
// when they change. Files in memory (tmpfs, hugetlbfs) are not written back.
bool is_written_back(pid_t pid, uint64_t start, uint64_t end) {
    char path[80];
    std::snprintf(path, sizeof path, "/proc/%d/map_files/%lx-%lx", pid, start, end);
    struct statfs system{};
    return ::statfs(path, &system) == 0 && system.f_type != TMPFS_MAGIC &&
           system.f_type != HUGETLBFS_MAGIC;
}

bool can_be_pinned(pid_t pid, uint64_t address, const HostRange& range) {
    const bool reads = (range.flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0 && !range.owned;
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    uint64_t next = address;
    for (std::string line; next < address + range.size && std::getline(maps, line);) {
        uint64_t start = 0;
        uint64_t end = 0;
        char mode[5] = {};
        if (std::sscanf(line.c_str(), "%lx-%lx %4s", &start, &end, mode) != 3 || end <= next) {
            continue;
        }
        // The last page that is wanted of a mapping may lie past the end of its file.
        uint8_t probe;
        const uint64_t last = std::min(end, address + range.size) - 1;
        if (start > next || mode[0] != 'r' || (mode[1] != 'w' && !reads) ||
            (mode[3] == 's' && !reads && is_written_back(pid, start, end)) ||
            !read_client(pid, last, &probe, 1)) {
            return false;
        }
        next = end;
    }
    return next >= address + range.size;
}

int32_t op_HostRegister(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto flags = s.in.take<uint32_t>();
    const auto owned = s.in.take<uint8_t>();
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    auto& ranges = s.client.host_ranges;
    const auto next = ranges.lower_bound(address);
    if ((next != ranges.end() && next->first < address + size) ||
        (next != ranges.begin() &&
         std::prev(next)->first + std::prev(next)->second.size > address)) {
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    const HostRange range{size, flags, owned != 0, context->handle};
    if (!can_be_pinned(s.client.pid, address, range)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    ranges[address] = range;
    return CUDA_SUCCESS;
}

int32_t op_HostUnregister(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const bool owned = s.in.take<uint8_t>() != 0;
    const auto found = s.client.host_ranges.find(address);
    if (found == s.client.host_ranges.end()) {
        if (owned && s.current_has_ended()) {
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        return owned ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    if (found->second.owned != owned) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = s.wait_idle(*context); r != CUDA_SUCCESS) {
        return r;
    }
    s.client.host_ranges.erase(address);
    return CUDA_SUCCESS;
}

// A process that maps memory for itself alone gives no file to map: then kernels do not reach it.
std::shared_ptr<Phys> Client::reach_host(uint64_t address, uint64_t* begin) {
    const auto next = host_ranges.upper_bound(address);
    if (next == host_ranges.begin()) {
        return nullptr;
    }
    HostRange& range = std::prev(next)->second;
    *begin = std::prev(next)->first;
    const uint64_t last = *begin + range.size;
    if (address >= last) {
        return nullptr;
    }
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    for (std::string line; range.phys == nullptr && std::getline(maps, line);) {
        uint64_t start = 0;
        uint64_t end = 0;
        uint64_t offset = 0;
        char mode[5] = {};
        if (std::sscanf(line.c_str(), "%lx-%lx %4s %lx", &start, &end, mode, &offset) != 4 ||
            *begin < start || last > end || std::string_view(mode) != "rw-s") {
            continue;
        }
        char path[80];
        std::snprintf(path, sizeof path, "/proc/%d/map_files/%lx-%lx", pid, start, end);
        const UniqueFd file(::open(path, O_RDWR | O_CLOEXEC));
        if (file) {
            range.phys = Machine::create_managed(file.get(), offset + *begin - start, range.size,
                                                 device(0), owner);
        }
    }
    return range.phys;
}

int32_t op_HostPointer(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    uint64_t begin = 0;
    if (s.context_by(0, &error) == nullptr) {
        return error;
    }
    if (s.client.host_range(address, 1) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return s.client.reach_host(address, &begin) ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

int32_t op_HostFlags(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const HostRange* range = s.client.host_range(s.in.take<uint64_t>(), 1);
    if (s.context_by(0, &error) == nullptr) {
        return error;
    }
    if (range == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(range->flags | CU_MEMHOSTALLOC_DEVICEMAP);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
