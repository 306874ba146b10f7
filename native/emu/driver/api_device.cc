// Devices, contexts, errors and the entry-point table.
#include "client.h"

#include <algorithm>
#include <cstdio>

namespace flowgpu::emu {

namespace {

struct ProcRow {
    const char* symbol;
    int version;
    bool per_thread;
    void* function;
};

const ProcRow kProcTable[] = {
#include "proc_table.inc"
};

struct ErrorRow {
    int code;
    const char* name;
    const char* text;
};

const ErrorRow kErrorTable[] = {
#include "error_table.inc"
};

const ErrorRow* find_error(CUresult error) {
    const auto* found =
        std::find_if(std::begin(kErrorTable), std::end(kErrorTable),
                     [&](const ErrorRow& row) { return row.code == static_cast<int>(error); });
    return found == std::end(kErrorTable) ? nullptr : found;
}

// The newest entry that the caller's version knows; per-thread entries first if asked for.
CUresult find_proc(const char* symbol, int version, cuuint64_t flags, void** function,
                   CUdriverProcAddressQueryResult* status) {
    const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    void* best[2] = {nullptr, nullptr};
    bool known = false;
    for (const ProcRow& row : kProcTable) {
        if (std::strcmp(row.symbol, symbol) != 0) {
            continue;
        }
        known = true;
        if (row.version <= version) {
            best[row.per_thread ? 1 : 0] = row.function; // rows of a symbol ascend by version
        }
    }
    *function = per_thread && best[1] != nullptr ? best[1] : best[0];
    if (status != nullptr) {
        *status = *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known              ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                       : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult require_init() {
    Entry entry;
    return entry.status();
}

// A context that the device just made: maps its pages.
CUresult adopt_context(Call& call, CUcontext* context) {
    const auto handle = call.take<uint64_t>();
    if (call.received_fd() && !map_context_pages(handle, call.received_fd().get())) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *context = reinterpret_cast<CUcontext>(handle);
    return reserve_own_range() ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult create_context(CUcontext* context, unsigned int flags, CUdevice device) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (context == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    ThreadState& thread = thread_state();
    if (thread.depth == ThreadState::kMaxDepth) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Call call(Op::CtxCreate);
    call.in(flags).in(device);
    if (const CUresult r = call.go(); r != CUDA_SUCCESS) {
        return r;
    }
    const CUresult r = adopt_context(call, context);
    if (r == CUDA_SUCCESS) {
        thread.contexts[thread.depth++] = reinterpret_cast<uint64_t>(*context);
    }
    return r;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuGetProcAddress_v2(const char* symbol, void** pfn, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult* status) {
    if (symbol == nullptr || pfn == nullptr ||
        flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return find_proc(symbol, version, flags, pfn, status);
}

CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** pfn, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, pfn, version, flags, nullptr);
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
    if (text == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const ErrorRow* row = find_error(error);
    *text = row == nullptr ? nullptr : row->name;
    return row == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
    if (text == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const ErrorRow* row = find_error(error);
    *text = row == nullptr ? nullptr : row->text;
    return row == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    return count == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::DeviceCount, outs(count));
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    int count = 0;
    if (const CUresult r = cuDeviceGetCount(&count); r != CUDA_SUCCESS) {
        return r;
    }
    if (device == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (ordinal < 0 || ordinal >= count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int size, CUdevice device) {
    if (name == nullptr || size <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::DeviceName);
    call.in(device);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        std::snprintf(name, static_cast<size_t>(size), "%s", call.take_string().c_str());
    }
    return r;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    return uuid == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::DeviceUuid, outs(uuid), device);
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    return cuDeviceGetUuid(uuid, device);
}

CUresult CUDAAPI cuDeviceGetLuid(char*, unsigned int*, CUdevice) {
    return CUDA_ERROR_NOT_SUPPORTED; // as on every Linux driver
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    return bytes == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::DeviceTotalMem, outs(bytes), device);
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    const CUresult r = value == nullptr ? CUDA_ERROR_INVALID_VALUE
                                        : rpc(Op::DeviceAttribute, outs(value),
                                              static_cast<int>(attribute), device);
    if (r == CUDA_SUCCESS && attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED) {
        *value = !process().service.empty();
    }
    return r;
}

CUresult CUDAAPI cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
    if (major == nullptr || minor == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r =
        cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    return r != CUDA_SUCCESS
               ? r
               : cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* id, int size, CUdevice device) {
    int bus = 0;
    if (id == nullptr || size <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device);
    if (r == CUDA_SUCCESS) {
        std::snprintf(id, static_cast<size_t>(size), "0000:%02X:00.0", bus);
    }
    return r;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
    int count = 0;
    if (device == nullptr || id == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = cuDeviceGetCount(&count); r != CUDA_SUCCESS) {
        return r;
    }
    for (int i = 0; i < count; ++i) {
        char own[16];
        if (cuDeviceGetPCIBusId(own, sizeof own, i) == CUDA_SUCCESS && strcasecmp(own, id) == 0) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return can == nullptr ? CUDA_ERROR_INVALID_VALUE
                          : rpc(Op::DeviceReaches, outs(can), device, peer);
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute,
                                         CUdevice device, CUdevice peer) {
    int can = 0;
    if (value == nullptr || device == peer) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = cuDeviceCanAccessPeer(&can, device, peer);
    if (r == CUDA_SUCCESS) {
        *value = can && (attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
                         attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    }
    return r;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (context == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::PrimaryRetain);
    call.in(device);
    const CUresult r = call.go();
    return r != CUDA_SUCCESS ? r : adopt_context(call, context);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    uint64_t destroyed = 0;
    const CUresult r = rpc(Op::PrimaryRelease, outs(&destroyed), device);
    end_context(destroyed);
    return r;
}

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device) {
    uint64_t destroyed = 0;
    const CUresult r = rpc(Op::PrimaryReset, outs(&destroyed), device);
    end_context(destroyed);
    return r;
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    return rpc(Op::PrimarySetFlags, outs(), device, flags);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
    return rpc(Op::PrimaryGetState, outs(flags, active), device);
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext* context, unsigned int flags, CUdevice device) {
    return create_context(context, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam*, int affinities,
                                unsigned int flags, CUdevice device) {
    return affinities != 0 ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
                           : create_context(context, flags, device);
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* params, unsigned int flags,
                                CUdevice device) {
    if (params != nullptr && (params->numExecAffinityParams != 0 || params->cigParams != nullptr)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return create_context(context, flags, device);
}

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext context) {
    Entry entry;
    const auto handle = reinterpret_cast<uint64_t>(context);
    const CUresult r = rpc(Op::CtxDestroy, outs(), handle);
    if (r == CUDA_SUCCESS) {
        end_context(handle);
        ThreadState& thread = thread_state();
        if (thread.current() == handle) {
            --thread.depth;
        }
    }
    return r;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
    if (const CUresult r = require_init(); r != CUDA_SUCCESS) {
        return r;
    }
    if (context == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *context = reinterpret_cast<CUcontext>(thread_state().current());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    const auto handle = reinterpret_cast<uint64_t>(context);
    ThreadState& thread = thread_state();
    const CUresult r = handle == 0 || handle == thread.current()
                           ? require_init()
                           : rpc(Op::CtxCheck, outs(), handle);
    if (r != CUDA_SUCCESS) {
        return r;
    }
    if (handle == 0) {
        thread.depth -= thread.depth > 0 ? 1 : 0;
    } else if (thread.depth > 0) {
        thread.contexts[thread.depth - 1] = handle;
    } else {
        thread.contexts[thread.depth++] = handle;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context) {
    const auto handle = reinterpret_cast<uint64_t>(context);
    const CUresult r = handle == 0 ? require_init() : rpc(Op::CtxCheck, outs(), handle);
    if (r != CUDA_SUCCESS || handle == 0) {
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    }
    ThreadState& thread = thread_state();
    if (thread.depth == ThreadState::kMaxDepth) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    thread.contexts[thread.depth++] = handle;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext* context) {
    if (const CUresult r = require_init(); r != CUDA_SUCCESS) {
        return r;
    }
    ThreadState& thread = thread_state();
    if (thread.depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context != nullptr) {
        *context = reinterpret_cast<CUcontext>(thread.current());
    }
    --thread.depth;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    return device == nullptr ? CUDA_ERROR_INVALID_VALUE
                             : rpc(Op::CtxGetDevice, outs(device), uint64_t{0});
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
    return device == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::CtxGetDevice, outs(device), reinterpret_cast<uint64_t>(context));
}

CUresult CUDAAPI cuCtxSynchronize(void) {
    return rpc(Op::CtxSynchronize, outs(), uint64_t{0});
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext context) {
    return rpc(Op::CtxSynchronize, outs(), reinterpret_cast<uint64_t>(context));
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int* flags) {
    return flags == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::CtxGetFlags, outs(flags));
}

CUresult CUDAAPI cuCtxSetFlags(unsigned int flags) {
    return rpc(Op::CtxSetFlags, outs(), flags);
}

CUresult CUDAAPI cuCtxGetId(CUcontext context, unsigned long long* id) {
    return id == nullptr ? CUDA_ERROR_INVALID_VALUE
                         : rpc(Op::CtxGetId, outs(id), reinterpret_cast<uint64_t>(context));
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext context, unsigned int* version) {
    return version == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::CtxGetApiVersion, outs(version), reinterpret_cast<uint64_t>(context));
}

CUresult CUDAAPI cuCtxGetLimit(size_t* value, CUlimit limit) {
    return value == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::CtxGetLimit, outs(value), static_cast<int>(limit));
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    return rpc(Op::CtxSetLimit, outs(), static_cast<int>(limit), value);
}

CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache* config) {
    return config == nullptr ? CUDA_ERROR_INVALID_VALUE : rpc(Op::CtxGetCacheConfig, outs(config));
}

CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache config) {
    return rpc(Op::CtxSetCacheConfig, outs(), config);
}

// The width of banks is fixed.
CUresult CUDAAPI cuCtxGetSharedMemConfig(CUsharedconfig* config) {
    if (config == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
    return rpc(Op::CtxCheck, outs(), uint64_t{0});
}

CUresult CUDAAPI cuCtxSetSharedMemConfig(CUsharedconfig config) {
    return config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::CtxCheck, outs(), uint64_t{0});
}

CUresult CUDAAPI cuCtxResetPersistingL2Cache(void) {
    return rpc(Op::CtxCheck, outs(), uint64_t{0});
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    if (const CUresult r = rpc(Op::CtxCheck, outs(), uint64_t{0}); r != CUDA_SUCCESS) {
        return r;
    }
    if (least != nullptr) {
        *least = 0;
    }
    if (greatest != nullptr) {
        *greatest = -5;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE
                      : rpc(Op::CtxEnablePeer, outs(), reinterpret_cast<uint64_t>(peer));
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peer) {
    return rpc(Op::CtxDisablePeer, outs(), reinterpret_cast<uint64_t>(peer));
}

CUresult CUDAAPI cuProfilerStart(void) {
    return rpc(Op::CtxCheck, outs(), uint64_t{0});
}

CUresult CUDAAPI cuProfilerStop(void) {
    return rpc(Op::CtxCheck, outs(), uint64_t{0});
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
    if (mode == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *mode = process().eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return require_init();
}

} // extern "C"
