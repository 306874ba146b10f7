// Modules, libraries, functions and their attributes.
#include "jit.h"

#include <algorithm>
#include <cstdio>
#include <elf.h>
#include <map>
#include <sys/uio.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

constexpr uint32_t kFatbinWrapperMagic = 0x466243b1;
constexpr uint32_t kFatbinMagic = 0xBA55ED50;

// An ELF file as far as its section headers, which end those that the emulated linker writes. Any
// other is refused by what its header says, wherever in memory that points to.
std::string_view elf_bytes(const char* bytes, std::string* copy) {
    Elf64_Ehdr header;
    std::memcpy(&header, bytes, sizeof header);
    const uint64_t table = uint64_t{header.e_shnum} * sizeof(Elf64_Shdr);
    if (header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_shoff < kMaxMessage / 2) {
        copy->resize(header.e_shoff + table);
        iovec to{copy->data(), copy->size()};
        iovec from{const_cast<char*>(bytes), copy->size()};
        if (copy->size() > sizeof header && ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) ==
                                                static_cast<ssize_t>(copy->size())) {
            return *copy;
        }
    }
    return {bytes, sizeof header};
}

// How many bytes of the image the device needs; only a text is bounded by its terminator.
std::string_view image_bytes(const void* image, std::string* copy) {
    const auto* bytes = static_cast<const char*>(image);
    uint32_t magic;
    std::memcpy(&magic, bytes, sizeof magic);
    if (magic == kFatbinWrapperMagic) {
        const void* data;
        std::memcpy(&data, bytes + 8, sizeof data);
        return data == nullptr ? std::string_view() : image_bytes(data, copy);
    }
    if (magic == kFatbinMagic) {
        uint16_t header;
        uint64_t size;
        std::memcpy(&header, bytes + 6, sizeof header);
        std::memcpy(&size, bytes + 8, sizeof size);
        return {bytes, header + size};
    }
    if (std::memcmp(bytes, ELFMAG, SELFMAG) == 0) {
        return elf_bytes(bytes, copy);
    }
    return {bytes, std::strlen(bytes)};
}

CUresult load(Op op, uint64_t* out, const void* image, unsigned int count,
              const CUjit_option* options, void** values) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (image == nullptr || (count != 0 && (options == nullptr || values == nullptr))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    JitLogs logs(count, options, values);
    std::string copy;
    const std::string_view bytes = image_bytes(image, &copy);
    Call call(op);
    call.in_blob(bytes.data(), bytes.size());
    const CUresult r = call.go();
    logs.info.write("");
    if (r == CUDA_SUCCESS) {
        *out = call.take<uint64_t>();
        logs.error.write("");
    } else {
        logs.error.write(call.take_string());
    }
    return r;
}

// The name stays valid with the function's module; it is kept as long as the process.
CUresult function_name(uint64_t function, const char** name) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (name == nullptr || function == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::FuncInfo);
    call.in(function);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        static std::mutex mutex;
        static auto* names = new std::map<std::string, std::string>;
        std::lock_guard<std::mutex> lock(mutex);
        const std::string text = call.take_string();
        *name = names->emplace(text, text).first->second.c_str();
    }
    return r;
}

CUresult handles(Op op, uint64_t parent, unsigned int capacity, uint64_t* out, uint32_t* total) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    Call call(op);
    call.in(parent);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        *total = call.take<uint32_t>();
        for (uint32_t i = 0; i < *total; ++i) {
            const auto handle = call.take<uint64_t>();
            if (i < capacity) {
                out[i] = handle;
            }
        }
    }
    return r;
}

CUresult global_of(CUdeviceptr* pointer, size_t* size, CUmodule module, const char* name,
                   bool managed) {
    Entry entry;
    if (name == nullptr || (pointer == nullptr && size == nullptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::ModuleGetGlobal);
    call.in(handle_of(module)).in_string(name);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        const auto address = call.take<uint64_t>();
        const auto bytes = call.take<uint64_t>();
        if (managed && call.take<uint8_t>() == 0) {
            return CUDA_ERROR_NOT_FOUND;
        }
        if (pointer != nullptr) {
            *pointer = address;
        }
        if (size != nullptr) {
            *size = bytes;
        }
    }
    return r;
}

} // namespace

void JitLog::write(const std::string& text) const {
    size_t written = 0;
    if (buffer != nullptr && size > 0) {
        written = std::min(text.size(), size - 1);
        std::memcpy(buffer, text.data(), written);
        buffer[written] = '\0';
    }
    if (size_out != nullptr) {
        *size_out = reinterpret_cast<void*>(written);
    }
}

JitLogs::JitLogs(unsigned int count, const CUjit_option* options, void** values) {
    for (unsigned int i = 0; i < count; ++i) {
        JitLog& log = options[i] == CU_JIT_ERROR_LOG_BUFFER ||
                              options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
                          ? error
                          : info;
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER || options[i] == CU_JIT_INFO_LOG_BUFFER) {
            log.buffer = static_cast<char*>(values[i]);
        } else if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES ||
                   options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) {
            log.size = reinterpret_cast<size_t>(values[i]);
            log.size_out = &values[i];
        }
    }
}

bool read_file(const char* path, std::string* content) {
    std::FILE* file = std::fopen(path, "rbe");
    if (file == nullptr) {
        return false;
    }
    char buffer[65536];
    size_t got;
    while ((got = std::fread(buffer, 1, sizeof buffer, file)) > 0) {
        content->append(buffer, got);
    }
    std::fclose(file);
    // A header that is cut short must not be read past its end.
    content->append(sizeof(Elf64_Ehdr), '\0');
    return true;
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count,
                                    CUjit_option* options, void** values) {
    uint64_t handle = 0;
    if (module == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = load(Op::ModuleLoad, &handle, image, count, options, values);
    if (r == CUDA_SUCCESS) {
        *module = reinterpret_cast<CUmodule>(handle);
    }
    return r;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule* module, const void* image) {
    return cuModuleLoadData(module, image);
}

CUresult CUDAAPI cuModuleLoad(CUmodule* module, const char* path) {
    std::string content;
    if (path == nullptr || module == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return read_file(path, &content) ? cuModuleLoadData(module, content.data())
                                     : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
    return rpc(Op::ModuleUnload, outs(), handle_of(module));
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    Entry entry;
    if (function == nullptr || name == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::ModuleGetFunction);
    call.in(handle_of(module)).in_string(name);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        *function = call.take<CUfunction>();
    }
    return r;
}

CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int* count, CUmodule module) {
    return count == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : handles(Op::ModuleFunctions, handle_of(module), 0, nullptr, count);
}

CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction* functions, unsigned int count,
                                            CUmodule module) {
    uint32_t total = 0;
    return functions == nullptr || count == 0
               ? CUDA_ERROR_INVALID_VALUE
               : handles(Op::ModuleFunctions, handle_of(module), count,
                         reinterpret_cast<uint64_t*>(functions), &total);
}

CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr* pointer, size_t* size, CUmodule module,
                                      const char* name) {
    return global_of(pointer, size, module, name, false);
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit,
                                   void** jit_values, unsigned int jit_count, CUlibraryOption*,
                                   void**, unsigned int) {
    uint64_t handle = 0;
    if (library == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = load(Op::LibraryLoad, &handle, code, jit_count, jit, jit_values);
    if (r == CUDA_SUCCESS) {
        *library = reinterpret_cast<CUlibrary>(handle);
    }
    return r;
}

CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option* jit,
                                       void** jit_values, unsigned int jit_count,
                                       CUlibraryOption* options, void** values,
                                       unsigned int count) {
    std::string content;
    if (library == nullptr || path == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return read_file(path, &content) ? cuLibraryLoadData(library, content.data(), jit, jit_values,
                                                         jit_count, options, values, count)
                                     : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    return library == nullptr ? CUDA_ERROR_INVALID_HANDLE
                              : rpc(Op::LibraryUnload, outs(), handle_of(library));
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    Entry entry;
    if (kernel == nullptr || name == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (library == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Call call(Op::LibraryGetKernel);
    call.in(handle_of(library)).in_string(name);
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        *kernel = call.take<CUkernel>();
    }
    return r;
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned int* count, CUlibrary library) {
    if (count == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return library == nullptr ? CUDA_ERROR_INVALID_HANDLE
                              : handles(Op::LibraryKernels, handle_of(library), 0, nullptr, count);
}

CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count,
                                           CUlibrary library) {
    uint32_t total = 0;
    return kernels == nullptr || count == 0 ? CUDA_ERROR_INVALID_VALUE
                                            : handles(Op::LibraryKernels, handle_of(library), count,
                                                      reinterpret_cast<uint64_t*>(kernels), &total);
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule* module, CUlibrary library) {
    return module == nullptr ? CUDA_ERROR_INVALID_VALUE
                             : rpc(Op::LibraryGetModule, outs(module), handle_of(library));
}

CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr* pointer, size_t* size, CUlibrary library,
                                    const char* name) {
    CUmodule module = nullptr;
    const CUresult r = cuLibraryGetModule(&module, library);
    return r != CUDA_SUCCESS ? r : cuModuleGetGlobal_v2(pointer, size, module, name);
}

CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr* pointer, size_t* size, CUlibrary library,
                                     const char* name) {
    CUcontext current = nullptr;
    CUmodule module = nullptr;
    CUresult r = cuCtxGetCurrent(&current);
    // A real driver needs none (measured), and the variable is the same in each.
    const bool borrowed = r == CUDA_SUCCESS && current == nullptr;
    if (borrowed) {
        r = cuDevicePrimaryCtxRetain(&current, 0);
        if (r != CUDA_SUCCESS) {
            return r;
        }
        r = cuCtxPushCurrent_v2(current);
    }
    if (r == CUDA_SUCCESS) {
        r = cuLibraryGetModule(&module, library);
    }
    if (r == CUDA_SUCCESS) {
        r = global_of(pointer, size, module, name, true);
    }
    if (borrowed) {
        cuCtxPopCurrent_v2(&current);
        cuDevicePrimaryCtxRelease_v2(0);
    }
    return r;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    return function == nullptr ? CUDA_ERROR_INVALID_VALUE
                               : rpc(Op::KernelGetFunction, outs(function), handle_of(kernel));
}

CUresult CUDAAPI cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
    return library == nullptr ? CUDA_ERROR_INVALID_VALUE
                              : rpc(Op::KernelGetLibrary, outs(library), handle_of(kernel));
}

CUresult CUDAAPI cuKernelGetName(const char** name, CUkernel kernel) {
    return function_name(handle_of(kernel), name);
}

CUresult CUDAAPI cuFuncGetName(const char** name, CUfunction function) {
    return function == nullptr ? CUDA_ERROR_INVALID_VALUE
                               : function_name(handle_of(function), name);
}

CUresult CUDAAPI cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel,
                                      CUdevice) {
    return cuFuncGetAttribute(value, attribute, reinterpret_cast<CUfunction>(kernel));
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                      CUdevice) {
    return cuFuncSetAttribute(reinterpret_cast<CUfunction>(kernel), attribute, value);
}

CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice) {
    return cuFuncSetCacheConfig(reinterpret_cast<CUfunction>(kernel), config);
}

CUresult CUDAAPI cuFuncGetModule(CUmodule* module, CUfunction function) {
    return module == nullptr ? CUDA_ERROR_INVALID_VALUE
                             : rpc(Op::FuncGetModule, outs(module), handle_of(function));
}

CUresult CUDAAPI cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                    CUfunction function) {
    if (value == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return function == nullptr ? CUDA_ERROR_INVALID_HANDLE
                               : rpc(Op::FuncGetAttribute, outs(value), handle_of(function),
                                     static_cast<int>(attribute));
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute,
                                    int value) {
    return rpc(Op::FuncSetAttribute, outs(), handle_of(function), static_cast<int>(attribute),
               value);
}

// A preference without an effect here: it only checks the handle.
CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache) {
    int ignored = 0;
    return cuFuncGetAttribute(&ignored, CU_FUNC_ATTRIBUTE_NUM_REGS, function);
}

CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig config) {
    return config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE
               ? CUDA_ERROR_INVALID_VALUE
               : cuFuncSetCacheConfig(function, CU_FUNC_CACHE_PREFER_NONE);
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
    uint8_t loaded = 0;
    if (state == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = rpc(Op::FuncLoaded, outs(&loaded), handle_of(function), uint8_t{0});
    if (r == CUDA_SUCCESS) {
        *state = loaded != 0 || process().eager ? CU_FUNCTION_LOADING_STATE_LOADED
                                                : CU_FUNCTION_LOADING_STATE_UNLOADED;
    }
    return r;
}

CUresult CUDAAPI cuFuncLoad(CUfunction function) {
    uint8_t loaded = 0;
    return rpc(Op::FuncLoaded, outs(&loaded), handle_of(function), uint8_t{1});
}

} // extern "C"
