// Virtual memory management, stricter than the driver where the driver leaves it open.
#include "state.h"

namespace flowgpu::emu {

namespace {

bool whole_granules(uint64_t address, uint64_t size) {
    return size != 0 && address % kGranularity == 0 && size % kGranularity == 0;
}

// A handle that the client holds: one that it has released is known while a mapping is left,
// because cuMemRetainAllocationHandle gives that very handle again, but is good for nothing else.
std::shared_ptr<MemHandle> held(const Client& client, uint64_t handle) {
    auto found = client.find<MemHandle>(handle);
    return found != nullptr && found->references > 0 ? found : nullptr;
}

// Devices, and CUmemAccess_flags for each.
// Devices, null for one that there is not, and flags.
using Access = std::vector<std::pair<const Device*, uint32_t>>;

Access take_access(Session& s, uint64_t count) {
    Access access;
    for (uint64_t i = 0; i < count && s.in.good(); ++i) {
        const Device* device = s.client.device(s.in.take<int32_t>());
        access.emplace_back(device, s.in.take<uint32_t>());
    }
    return access;
}

bool are_flags(uint32_t flags) {
    return flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
           flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

// `Memory` is a Mapping or a Pool.
template <class Memory> void allow(Memory& memory, const Access& access) {
    for (const auto& [device, flags] : access) {
        const uint32_t bit = 1u << device->index;
        const bool read = flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
        const bool write = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        memory.readers = read ? memory.readers | bit : memory.readers & ~bit;
        memory.writers = write ? memory.writers | bit : memory.writers & ~bit;
    }
}

template <class Memory> uint64_t access_of(const Memory& memory, const Device& device) {
    const uint32_t bit = 1u << device.index;
    return (memory.writers & bit) != 0   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : (memory.readers & bit) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                         : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

void drop_if_unused(Client& client, const std::shared_ptr<MemHandle>& handle) {
    if (handle->references == 0 && handle->mappings == 0) {
        client.objects.erase(handle->handle);
    }
}

} // namespace

int32_t op_AddressReserve(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    return s.client.space.reserve(begin, s.in.take<uint64_t>()) ? CUDA_SUCCESS
                                                                : CUDA_ERROR_INVALID_VALUE;
}

int32_t op_AddressFree(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    return s.client.space.unreserve(begin, s.in.take<uint64_t>());
}

int32_t op_MemCreate(Session& s) {
    const auto size = s.in.take<uint64_t>();
    Device* device = s.client.device(s.in.take<int32_t>());
    const auto types = s.in.take<uint32_t>();
    const auto rdma = s.in.take<uint8_t>();
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    auto phys = s.machine().create(device, size, s.client.owner);
    if (phys == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    auto handle = s.client.make<MemHandle>();
    handle->phys = std::move(phys);
    handle->handle_types = types;
    handle->rdma = rdma;
    s.out.put(handle->handle);
    return CUDA_SUCCESS;
}

int32_t op_MemRelease(Session& s) {
    const auto handle = held(s.client, s.in.take<uint64_t>());
    if (handle == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    --handle->references;
    drop_if_unused(s.client, handle);
    return CUDA_SUCCESS;
}

int32_t op_MemMap(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto offset = s.in.take<uint64_t>();
    const auto handle = held(s.client, s.in.take<uint64_t>());
    if (handle == nullptr || !s.client.space.inside_reservation(begin, kGranularity)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // Measured: a part of a handle cannot be mapped, and this is looked at before the range.
    if (offset != 0 || size != handle->phys->size()) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (!whole_granules(begin, size) || !s.client.space.inside_reservation(begin, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Mapping mapping;
    mapping.begin = begin;
    mapping.end = begin + size;
    mapping.phys = handle->phys;
    mapping.kind = MapKind::kVmm;
    mapping.handle = handle->handle;
    mapping.id = ++s.client.next_id;
    if (!s.client.space.map(std::move(mapping))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    ++handle->mappings;
    return CUDA_SUCCESS;
}

int32_t op_MemUnmap(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    if (size != 0 && s.client.space.inside_reservation(begin, size) &&
        !s.client.space.any(begin, size)) {
        return CUDA_SUCCESS; // measured
    }
    const auto maps = s.client.space.exactly(begin, size);
    if (!whole_granules(begin, size) || maps.empty()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (const Mapping* map : maps) {
        const auto handle = s.client.find<MemHandle>(map->handle);
        s.client.space.unmap(map->begin);
        --handle->mappings;
        drop_if_unused(s.client, handle);
    }
    return CUDA_SUCCESS;
}

int32_t op_MemSetAccess(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto count = s.in.take<uint64_t>();
    const auto maps = s.client.space.exactly(begin, size);
    if (!whole_granules(begin, size) || maps.empty()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Access access = take_access(s, count);
    for (const auto& [device, flags] : access) {
        if (device == nullptr || !are_flags(flags)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    // After cuda.h, not measured: a device that does not reach the memory's is none for it.
    for (const Mapping* map : maps) {
        for (const auto& [device, flags] : access) {
            if (!s.machine().reaches(*device, *map->phys->device())) {
                return CUDA_ERROR_INVALID_DEVICE;
            }
        }
    }
    for (Mapping* map : maps) {
        allow(*map, access);
    }
    s.client.space.changed();
    return CUDA_SUCCESS;
}

int32_t op_MemGetAccess(Session& s) {
    const Device* device = s.client.device(s.in.take<int32_t>());
    const Mapping* map = s.client.space.at(s.in.take<uint64_t>());
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (map == nullptr || map->kind != MapKind::kVmm) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(access_of(*map, *device));
    return CUDA_SUCCESS;
}

int32_t op_MemExport(Session& s) {
    const auto handle = held(s.client, s.in.take<uint64_t>());
    // An imported handle has no types, so it cannot be exported again: measured on a real driver.
    if (handle == nullptr ||
        (handle->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.fd_out_owned = handle->phys->export_fd();
    s.fd_out = s.fd_out_owned.get();
    return s.fd_out_owned ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

int32_t op_MemImport(Session& s) {
    CUresult error = CUDA_ERROR_UNKNOWN;
    auto phys = s.fd_in ? s.machine().import(s.fd_in.get(), &error) : nullptr;
    if (phys == nullptr) {
        return error;
    }
    // One that it does not see is fine.
    if (s.client.moved_in_part && s.client.ordinal(*phys->device()) != CU_DEVICE_INVALID) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    auto handle = s.client.make<MemHandle>();
    handle->phys = std::move(phys);
    s.out.put(handle->handle);
    return CUDA_SUCCESS;
}

int32_t op_MemRetainHandle(Session& s) {
    const auto address = s.in.take<uint64_t>();
    const auto found = s.client.space.maps.upper_bound(address);
    if (found == s.client.space.maps.begin()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Mapping& map = std::prev(found)->second;
    if (address >= map.end || map.kind != MapKind::kVmm) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto handle = s.client.find<MemHandle>(map.handle);
    ++handle->references;
    s.out.put(handle->handle);
    return CUDA_SUCCESS;
}

int32_t op_MemHandleProperties(Session& s) {
    const auto handle = held(s.client, s.in.take<uint64_t>());
    if (handle == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(s.client.ordinal(*handle->phys->device()));
    s.out.put(handle->handle_types);
    s.out.put(handle->rdma);
    return CUDA_SUCCESS;
}

namespace {

std::shared_ptr<Pool> make_pool(Client& client, int device) {
    auto pool = client.make<Pool>();
    pool->device = device;
    pool->readers = pool->writers = device == kOnHost ? 0 : 1u << device;
    pool->attributes = {{CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, 1},
                        {CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 1},
                        {CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 1},
                        {CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0}};
    return pool;
}

std::shared_ptr<Pool> default_pool(Client& client, int device) {
    uint64_t& handle = client.default_pools[device];
    if (auto known = client.find<Pool>(handle)) {
        return known;
    }
    const auto pool = make_pool(client, device);
    handle = pool->handle;
    client.current_pools.emplace(device, handle);
    return pool;
}

} // namespace

uint64_t current_pool(Client& client, int device) {
    default_pool(client, device);
    return client.current_pools[device];
}

int32_t op_PoolCreate(Session& s) {
    const auto location = s.in.take<CUmemLocation>();
    const bool on_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (on_device && s.client.device(location.id) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(make_pool(s.client, on_device ? location.id : kOnHost)->handle);
    return CUDA_SUCCESS;
}

// Memory that is still in use stays until it is freed.
int32_t op_PoolDestroy(Session& s) {
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    if (pool == nullptr ||
        (pool->device != kOnHost && pool == default_pool(s.client, pool->device))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (auto& [device, current] : s.client.current_pools) {
        if (current == pool->handle) {
            current = s.client.default_pools[device];
        }
    }
    s.client.objects.erase(pool->handle);
    return CUDA_SUCCESS;
}

int32_t op_DefaultPool(Session& s) {
    const Device* device = s.client.device(s.in.take<int32_t>());
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    s.out.put(default_pool(s.client, device->index)->handle);
    return CUDA_SUCCESS;
}

int32_t op_CurrentPool(Session& s) {
    const Device* device = s.client.device(s.in.take<int32_t>());
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_VALUE; // measured: not as cuDeviceGetDefaultMemPool says it
    }
    s.out.put(current_pool(s.client, device->index));
    return CUDA_SUCCESS;
}

int32_t op_SetCurrentPool(Session& s) {
    const Device* device = s.client.device(s.in.take<int32_t>());
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (pool == nullptr || pool->device != device->index) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.client.current_pools[device->index] = pool->handle;
    return CUDA_SUCCESS;
}

int32_t op_PoolGetAttribute(Session& s) {
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    const auto key = s.in.take<int32_t>();
    if (pool == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto set = pool->attributes.find(key);
    if (set != pool->attributes.end()) {
        s.out.put(set->second);
        return CUDA_SUCCESS;
    }
    // The four that count: reserved and used, now and at most. Nothing is held back for reuse.
    if (key < CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || key > CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t used = 0;
    for (const Mapping* map : s.client.space.all()) {
        used += map->pool == pool->handle ? map->size() : 0;
    }
    s.out.put(used);
    return CUDA_SUCCESS;
}

int32_t op_PoolSetAttribute(Session& s) {
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    const auto key = s.in.take<int32_t>();
    if (pool == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto set = pool->attributes.find(key);
    if (set != pool->attributes.end()) {
        set->second = s.in.take<uint64_t>();
        return CUDA_SUCCESS;
    }
    const bool high =
        key == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || key == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    return high && s.in.take<uint64_t>() == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Memory that the pool has given is reached by the same devices from now on.
int32_t op_PoolSetAccess(Session& s) {
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    const auto count = s.in.take<uint64_t>();
    if (pool == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Access access = take_access(s, count);
    for (const auto& [device, flags] : access) { // measured, as is the order of the checks
        if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        const bool own = device != nullptr && device->index == pool->device;
        if (device == nullptr || (own && flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) ||
            (!own && !s.machine().config().peers)) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        if (!are_flags(flags)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    allow(*pool, access);
    for (Mapping* map : s.client.space.all()) {
        if (map->pool == pool->handle) {
            allow(*map, access);
        }
    }
    s.client.space.changed();
    return CUDA_SUCCESS;
}

int32_t op_PoolGetAccess(Session& s) {
    const auto pool = s.client.find<Pool>(s.in.take<uint64_t>());
    const Device* device = s.client.device(s.in.take<int32_t>());
    if (pool == nullptr || device == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(static_cast<uint32_t>(access_of(*pool, *device)));
    return CUDA_SUCCESS;
}

int32_t op_PoolTrim(Session& s) {
    return s.client.find<Pool>(s.in.take<uint64_t>()) != nullptr ? CUDA_SUCCESS
                                                                 : CUDA_ERROR_INVALID_VALUE;
}

} // namespace flowgpu::emu
