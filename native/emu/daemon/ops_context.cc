// Devices and contexts.
#include "state.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

struct Attribute {
    CUdevice_attribute key;
    int value;
};

// A plausible device of compute capability 8.0. What is not listed is 0: "no".
const Attribute kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 64 << 10},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, kTextureAlignment},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, kPitchAlignment},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH, kLinearWidth},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS, 2048},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH, kPitchWidth},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT, kPitchHeight},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH, kMostPitch},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS, 2048},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE, 8192},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE, 8192},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS, 2046},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS, 2048},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS, 2048},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS, 2046},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 256},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4 << 20},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 164 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 163 << 10},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
};

// A handle of this client names a device; the daemon's own answer to a bad one.
Device* device_of(Session& s, CUresult* error) {
    Device* device = s.client.device(s.in.take<int32_t>());
    if (device == nullptr) {
        *error = CUDA_ERROR_INVALID_DEVICE;
    }
    return device;
}

int32_t reply_context(Session& s, const Context& context) {
    s.out.put(context.handle);
    s.fd_out = s.machine().device_page();
    return CUDA_SUCCESS;
}

int32_t end_primary(Session& s, Primary& primary) {
    if (auto context = s.client.find<Context>(primary.context)) {
        s.wait_idle(*context);
        s.client.destroy_context(context);
        s.out.put(context->handle);
    } else {
        s.out.put(uint64_t{0});
    }
    primary.context = 0;
    return CUDA_SUCCESS;
}

} // namespace

int32_t op_Unsupported(Session& s) {
    s.machine().count_unsupported(s.in.take_string());
    return CUDA_SUCCESS;
}

int32_t op_AddAddresses(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    s.client.space.add_internal(begin, size);
    return CUDA_SUCCESS;
}

int32_t op_DeviceCount(Session& s) {
    s.out.put(static_cast<int32_t>(s.client.visible.size()));
    return CUDA_SUCCESS;
}

int32_t op_DeviceName(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (device_of(s, &error) == nullptr) {
        return error;
    }
    s.out.put_string(s.machine().config().name);
    return CUDA_SUCCESS;
}

int32_t op_DeviceUuid(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const Device* device = device_of(s, &error);
    if (device != nullptr) {
        s.out.put(s.machine().uuid(device->index));
    }
    return error;
}

int32_t op_DeviceTotalMem(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const Device* device = device_of(s, &error);
    if (device != nullptr) {
        s.out.put(device->total);
    }
    return error;
}

int32_t op_DeviceAttribute(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto key = s.in.take<int32_t>();
    const Device* device = device_of(s, &error);
    if (device == nullptr) {
        return error;
    }
    if (key < 1 || key >= CU_DEVICE_ATTRIBUTE_MAX) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (key == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
        s.out.put(device->index + 1);
        return CUDA_SUCCESS;
    }
    const auto architecture = static_cast<int32_t>(s.machine().config().architecture);
    if (key == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
        s.out.put(architecture / 10);
        return CUDA_SUCCESS;
    }
    if (key == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
        s.out.put(architecture % 10);
        return CUDA_SUCCESS;
    }
    const auto* found = std::find_if(std::begin(kAttributes), std::end(kAttributes),
                                     [&](const Attribute& a) { return a.key == key; });
    s.out.put(found == std::end(kAttributes) ? 0 : found->value);
    return CUDA_SUCCESS;
}

int32_t op_DeviceReaches(Session& s) {
    const Device* device = s.client.device(s.in.take<int32_t>());
    const Device* peer = s.client.device(s.in.take<int32_t>());
    if (device == nullptr || peer == nullptr) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    s.out.put(static_cast<int32_t>(device != peer && s.machine().reaches(*device, *peer)));
    return CUDA_SUCCESS;
}

int32_t op_PrimaryHandle(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (Device* device = device_of(s, &error)) {
        Primary& primary = s.client.primaries[device->index];
        if (primary.handle == 0) {
            primary.handle = s.client.new_handle();
        }
        s.out.put(primary.handle);
    }
    return error;
}

int32_t op_PrimaryRetain(Session& s) {
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    if (device == nullptr) {
        return error;
    }
    Primary& primary = s.client.primaries[device->index];
    auto context = s.client.find<Context>(primary.context);
    if (context == nullptr) {
        context = s.client.make_primary(device, primary);
        if (context == nullptr) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    ++primary.references;
    return reply_context(s, *context);
}

int32_t op_PrimaryRelease(Session& s) {
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    if (device == nullptr) {
        return error;
    }
    Primary& primary = s.client.primaries[device->index];
    if (primary.references == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (--primary.references > 0) {
        s.out.put(uint64_t{0});
        return CUDA_SUCCESS;
    }
    return end_primary(s, primary);
}

int32_t op_PrimaryReset(Session& s) {
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    // Measured: who has retained it still has to release it.
    return device == nullptr ? int32_t{error} : end_primary(s, s.client.primaries[device->index]);
}

int32_t op_PrimarySetFlags(Session& s) {
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    if (device == nullptr) {
        return error;
    }
    const auto flags = s.in.take<uint32_t>();
    if ((flags & ~uint32_t{CU_CTX_FLAGS_MASK}) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Primary& primary = s.client.primaries[device->index];
    primary.flags = flags;
    if (auto context = s.client.find<Context>(primary.context)) {
        context->flags = flags;
    }
    return CUDA_SUCCESS;
}

int32_t op_PrimaryGetState(Session& s) {
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    if (device != nullptr) {
        const Primary& primary = s.client.primaries[device->index];
        s.out.put(primary.flags);
        s.out.put(int32_t{primary.context != 0 ? 1 : 0});
    }
    return error;
}

int32_t op_CtxCreate(Session& s) {
    const auto flags = s.in.take<uint32_t>();
    CUresult error = CUDA_SUCCESS;
    Device* device = device_of(s, &error);
    if (device == nullptr) {
        return error;
    }
    if ((flags & ~uint32_t{CU_CTX_FLAGS_MASK}) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto current = s.client.find<Context>(s.header.context);
    if (current != nullptr && current->sticky != CUDA_SUCCESS) {
        return current->sticky;
    }
    const auto context = s.client.make_context(device, flags);
    return context == nullptr ? int32_t{CUDA_ERROR_OUT_OF_MEMORY} : reply_context(s, *context);
}

int32_t op_CtxDestroy(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto handle = s.in.take<uint64_t>();
    if (handle == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (s.client.ended_primary(handle) != nullptr) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    const auto context = s.context_by(handle, &error);
    if (context == nullptr) {
        return error;
    }
    if (context->primary) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    s.wait_idle(*context);
    s.client.destroy_context(context);
    return CUDA_SUCCESS;
}

// Measured: a primary context that was released can be made current, and tells its device.
int32_t op_CtxCheck(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto handle = s.in.take<uint64_t>();
    if (s.client.ended_primary(handle) == nullptr) {
        s.context_by(handle, &error);
    }
    return error;
}

int32_t op_CtxSynchronize(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context_by(s.in.take<uint64_t>(), &error);
    if (context == nullptr) {
        return error;
    }
    CUresult r = s.breaks_captures(*context);
    if (r == CUDA_SUCCESS) {
        r = s.wait_idle(*context);
    }
    if (r == CUDA_SUCCESS) {
        free_numbers(*context);
    }
    return r;
}

int32_t op_CtxGetDevice(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto handle = s.in.take<uint64_t>();
    const Device* device = s.client.ended_primary(handle == 0 ? s.header.context : handle);
    if (device == nullptr) {
        const auto context = s.context_by(handle, &error);
        device = context == nullptr ? nullptr : context->device;
    }
    if (device != nullptr) {
        s.out.put(s.client.ordinal(*device));
    }
    return error;
}

int32_t op_CtxGetFlags(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const Device* device = s.client.ended_primary(s.header.context)) {
        s.out.put(s.client.primaries[device->index].flags);
    } else if (const auto context = s.context_by(0, &error)) {
        // Measured: of a primary context alone, and not in cuDevicePrimaryCtxGetState.
        s.out.put(context->flags | (context->primary ? uint32_t{CU_CTX_MAP_HOST} : 0));
    }
    return error;
}

int32_t op_CtxSetFlags(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto flags = s.in.take<uint32_t>();
    if ((flags & ~uint32_t{CU_CTX_FLAGS_MASK}) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const auto context = s.context_by(0, &error)) {
        context->flags = flags;
    }
    return error;
}

int32_t op_CtxGetId(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const auto context = s.context_by(s.in.take<uint64_t>(), &error)) {
        s.out.put(context->id);
    }
    return error;
}

int32_t op_CtxGetApiVersion(Session& s) {
    constexpr uint32_t kCtxCreateV2 = 3020;
    CUresult error = CUDA_SUCCESS;
    const auto handle = s.in.take<uint64_t>();
    if (s.client.ended_primary(handle) != nullptr) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if ((handle == 0 ? s.context(&error) : s.context_by(handle, &error)) != nullptr) {
        s.out.put(kCtxCreateV2);
    }
    return error;
}

namespace {

int32_t no_limit(int key) {
    return key < 0 || key >= CU_LIMIT_MAX ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_UNSUPPORTED_LIMIT;
}

} // namespace

int32_t op_CtxGetLimit(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto key = s.in.take<int32_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    const auto found = context->limits.find(key);
    if (found == context->limits.end()) {
        return no_limit(key);
    }
    s.out.put(found->second);
    return CUDA_SUCCESS;
}

int32_t op_CtxSetLimit(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto key = s.in.take<int32_t>();
    const auto value = s.in.take<uint64_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    const auto found = context->limits.find(key);
    if (found == context->limits.end()) {
        return no_limit(key);
    }
    found->second = value;
    return CUDA_SUCCESS;
}

int32_t op_CtxGetCacheConfig(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const auto context = s.context(&error)) {
        s.out.put(context->cache_config);
    }
    return error;
}

int32_t op_CtxSetCacheConfig(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto config = s.in.take<int32_t>();
    if (const auto context = s.context(&error)) {
        context->cache_config = config;
    }
    return error;
}

namespace {

void set_peer_access(Client& client, const Context& reader, const Context& owner, bool allow) {
    const uint32_t bit = 1u << reader.device->index;
    for (Mapping* map : client.space.all()) {
        if ((map->kind == MapKind::kAlloc || map->kind == MapKind::kGlobal) &&
            map->context == owner.handle) {
            map->readers = allow ? map->readers | bit : map->readers & ~bit;
            map->writers = map->readers;
        }
    }
    client.space.changed();
}

} // namespace

int32_t op_CtxEnablePeer(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    const auto peer = s.client.find<Context>(s.in.take<uint64_t>());
    if (context == nullptr) {
        return error;
    }
    if (peer == nullptr || peer->device == context->device) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!s.machine().config().peers) {
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    }
    if (!context->peers.insert(peer->handle).second) {
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    }
    set_peer_access(s.client, *context, *peer, true);
    return CUDA_SUCCESS;
}

int32_t op_CtxDisablePeer(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    const auto peer = s.client.find<Context>(s.in.take<uint64_t>());
    if (context == nullptr) {
        return error;
    }
    if (peer == nullptr || context->peers.erase(peer->handle) == 0) {
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    }
    set_peer_access(s.client, *context, *peer, false);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
