#include "driver.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

#include <dlfcn.h>

extern "C" const char flowgpu_nccl_ptx[];

namespace flowgpu::nccl {

namespace {

thread_local char error_text[512];

using Resolve = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

bool load(Driver* driver) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    auto resolve =
        library ? reinterpret_cast<Resolve>(dlsym(library, "cuGetProcAddress_v2")) : nullptr;
    if (!resolve) {
        failed(kSystemError, "no libcuda.so.1: %s", dlerror());
        return false;
    }
    // Versions whose signatures this file has.
    constexpr int kWanted = 12000;
#define FN_RESOLVE(name)                                                                           \
    if (resolve(#name, &driver->name##_address, kWanted, 0, nullptr) != CUDA_SUCCESS ||            \
        !driver->name##_address) {                                                                 \
        failed(kSystemError, "the driver has no " #name);                                          \
        return false;                                                                              \
    }
    FN_DRIVER_FUNCTIONS(FN_RESOLVE)
    return true;
}

bool load_kernel(Driver* driver) {
    CUlibrary library = nullptr;
    const auto load_data =
        reinterpret_cast<decltype(&::cuLibraryLoadData)>(driver->cuLibraryLoadData_address);
    const auto get_kernel =
        reinterpret_cast<decltype(&::cuLibraryGetKernel)>(driver->cuLibraryGetKernel_address);
    CUresult result =
        load_data(&library, flowgpu_nccl_ptx, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result == CUDA_SUCCESS)
        result = get_kernel(&driver->kernel, library, "ncclDevKernel_Generic");
    if (result != CUDA_SUCCESS)
        failed(kUnhandledCudaError, "the kernel cannot be loaded: CUDA error %d", result);
    return result == CUDA_SUCCESS;
}

} // namespace

Result failed(Result result, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return result;
}

const char* last_error() {
    return error_text;
}

Result cuda_failed(const char* call, CUresult result) {
    const char* name = nullptr;
    FN_CU(cuGetErrorName, result, &name);
    return failed(kUnhandledCudaError, "%s: %s", call, name ? name : "unknown error");
}

const Driver* driver() {
    static std::mutex mutex;
    static Driver table;
    static bool known = false;
    if (__atomic_load_n(&known, __ATOMIC_ACQUIRE))
        return &table;
    std::lock_guard<std::mutex> lock(mutex);
    if (!known) {
        if (!load(&table))
            return nullptr;
        reinterpret_cast<decltype(&::cuInit)>(table.cuInit_address)(0);
        if (!load_kernel(&table))
            return nullptr;
        __atomic_store_n(&known, true, __ATOMIC_RELEASE);
    }
    return &table;
}

Result map(CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes, Memory* memory) {
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    FN_CU_TRY(cuMemAddressReserve, &memory->address, bytes, 0, 0, 0);
    if (const CUresult result = FN_CU(cuMemMap, memory->address, bytes, 0, handle, 0);
        result != CUDA_SUCCESS) {
        FN_CU(cuMemAddressFree, memory->address, bytes);
        return cuda_failed("cuMemMap", result);
    }
    memory->bytes = bytes;
    memory->handle = handle;
    if (const CUresult result = FN_CU(cuMemSetAccess, memory->address, bytes, &access, 1);
        result != CUDA_SUCCESS) {
        unmap(*memory, false);
        return cuda_failed("cuMemSetAccess", result);
    }
    return kSuccess;
}

void unmap(const Memory& memory, bool with_handle) {
    FN_CU(cuMemUnmap, memory.address, memory.bytes);
    FN_CU(cuMemAddressFree, memory.address, memory.bytes);
    if (with_handle)
        FN_CU(cuMemRelease, memory.handle);
}

Result allocate(CUdevice device, size_t bytes, Memory* memory) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    size_t granularity = 0;
    FN_CU_TRY(cuMemGetAllocationGranularity, &granularity, &properties,
              CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    bytes = (bytes + granularity - 1) / granularity * granularity;
    CUmemGenericAllocationHandle handle = 0;
    FN_CU_TRY(cuMemCreate, &handle, bytes, &properties, 0);
    const Result result = map(device, handle, bytes, memory);
    if (result != kSuccess)
        FN_CU(cuMemRelease, handle);
    return result;
}

} // namespace flowgpu::nccl
