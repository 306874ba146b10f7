// Modules, libraries, kernels and functions.
#include <vector>

#include "arguments.h"
#include "image.h"
#include "recorded.h"
#include "registry.h"

namespace flowgpu::replay::recorded {

namespace {

// Loads from memory: modules and libraries alike.
template <class H> using Load = std::function<CUresult(H*, const void*)>;

template <class H> CUresult load(H* out, CUresult result, H made, Image read, Load<H> again) {
    if (result != CUDA_SUCCESS)
        return result;
    *out = note(made, true, [&](Object& object) {
        object.variables = std::move(read.variables);
        object.why = read.why;
        if (!read.why.empty())
            return;
        object.make = maker<H>([again, kept = std::make_shared<Image>(std::move(read))](H* handle) {
            return again(handle, kept->data);
        });
    });
    return result;
}

CUresult load_plain(CUmodule* made, const void* image) {
    return FG_DRIVER(cuModuleLoadData)(made, image);
}

Load<CUlibrary> load_library(Options<CUjit_option> jit, Options<CUlibraryOption> library) {
    return [jit, library](CUlibrary* made, const void* image) mutable {
        return FG_DRIVER(cuLibraryLoadData)(made, image, jit.names.data(), jit.values.data(),
                                            static_cast<unsigned>(jit.names.size()),
                                            library.names.data(), library.values.data(),
                                            static_cast<unsigned>(library.names.size()));
    };
}

// Notes what the driver finds in `owner`; `find` asks it again.
template <class H, class Owner, class Find> H found(H driver, Owner owner, Find find) {
    return note(driver, false, [&](Object& object) {
        object.parent = object_of(owner);
        if constexpr (std::is_same_v<H, CUkernel>)
            object.context = nullptr;
        object.make = maker<H>([owner, find](H* handle) { return find(handle, to_driver(owner)); });
    });
}

template <class H, class Owner, class F>
CUresult find_named(H* out, Owner owner, const char* name, F function) {
    H driver = nullptr;
    CUresult result = function(out ? &driver : nullptr, to_driver(owner), name);
    if (result == CUDA_SUCCESS)
        *out = found(driver, owner, [function, kept = std::string(name)](H* again, Owner in) {
            return function(again, in, kept.c_str());
        });
    return result;
}

template <class H, class Owner, class F, class Name, class Find>
CUresult enumerate(H* out, unsigned count, Owner owner, F function, Name name, Find find) {
    CUresult result = function(out, count, to_driver(owner));
    for (unsigned i = 0; result == CUDA_SUCCESS && out && i < count && out[i]; i++) {
        const char* given = nullptr;
        if (name(&given, out[i]) != CUDA_SUCCESS || !given) {
            out[i] = to_program(out[i]);
            continue;
        }
        out[i] = found(out[i], owner, [find, kept = std::string(given)](H* again, Owner in) {
            return find(again, in, kept.c_str());
        });
    }
    return result;
}

// The program has the address of a variable from here on.
void asked(const void* handle, const char* name) {
    with_object(handle, [&](Object& object) {
        Object* owner = &object; // the library that a module was got from
        while (owner->parent)
            owner = owner->parent;
        owner->marked.store(true);
        for (Variable& variable : owner->variables) {
            if (variable.name == name) {
                variable.asked = true;
                return;
            }
        }
        owner->variables.push_back(Variable{name, true, {}});
    });
}

} // namespace

CUresult cuModuleLoad(CUmodule* module, const char* fname) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoad)(module ? &made : nullptr, fname);
    Image image = result == CUDA_SUCCESS ? Image::of_file(fname) : Image();
    return load<CUmodule>(module, result, made, std::move(image), load_plain);
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoadData)(module ? &made : nullptr, image);
    Image read = result == CUDA_SUCCESS ? Image::of_memory(image) : Image();
    return load<CUmodule>(module, result, made, std::move(read), load_plain);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned count,
                            CUjit_option* options, void** values) {
    CUmodule made = nullptr;
    CUresult result =
        FG_DRIVER(cuModuleLoadDataEx)(module ? &made : nullptr, image, count, options, values);
    if (result != CUDA_SUCCESS)
        return result;
    Options<CUjit_option> jit(options, values, count);
    return load<CUmodule>(module, result, made, Image::of_memory(image),
                          [jit](CUmodule* again, const void* from) mutable {
                              return FG_DRIVER(cuModuleLoadDataEx)(
                                  again, from, static_cast<unsigned>(jit.names.size()),
                                  jit.names.data(), jit.values.data());
                          });
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoadFatBinary)(module ? &made : nullptr, fatCubin);
    Image read = result == CUDA_SUCCESS ? Image::of_memory(fatCubin) : Image();
    return load<CUmodule>(module, result, made, std::move(read), load_plain);
}

CUresult cuModuleUnload(CUmodule hmod) {
    return destroy(hmod, FG_DRIVER(cuModuleUnload));
}

CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
    return find_named(hfunc, hmod, name, FG_DRIVER(cuModuleGetFunction));
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule mod) {
    return enumerate(functions, count, mod, FG_DRIVER(cuModuleEnumerateFunctions),
                     FG_DRIVER(cuFuncGetName), FG_DRIVER(cuModuleGetFunction));
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1* dptr, unsigned* bytes, CUmodule hmod, const char* name) {
    CUresult result = FG_DRIVER(cuModuleGetGlobal)(dptr, bytes, to_driver(hmod), name);
    if (result == CUDA_SUCCESS)
        asked(hmod, name);
    return result;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
    CUresult result = FG_DRIVER(cuModuleGetGlobal_v2)(dptr, bytes, to_driver(hmod), name);
    if (result == CUDA_SUCCESS)
        asked(hmod, name);
    return result;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jitOptions,
                           void** jitOptionsValues, unsigned numJitOptions,
                           CUlibraryOption* libraryOptions, void** libraryOptionValues,
                           unsigned numLibraryOptions) {
    CUlibrary made = nullptr;
    CUresult result = FG_DRIVER(cuLibraryLoadData)(library ? &made : nullptr, code, jitOptions,
                                                   jitOptionsValues, numJitOptions, libraryOptions,
                                                   libraryOptionValues, numLibraryOptions);
    if (result != CUDA_SUCCESS)
        return result;
    Options<CUjit_option> jit(jitOptions, jitOptionsValues, numJitOptions);
    Options<CUlibraryOption> options(libraryOptions, libraryOptionValues, numLibraryOptions);
    return load(library, result, made, Image::of_memory(code), load_library(jit, options));
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option* jitOptions,
                               void** jitOptionsValues, unsigned numJitOptions,
                               CUlibraryOption* libraryOptions, void** libraryOptionValues,
                               unsigned numLibraryOptions) {
    CUlibrary made = nullptr;
    CUresult result = FG_DRIVER(cuLibraryLoadFromFile)(
        library ? &made : nullptr, fileName, jitOptions, jitOptionsValues, numJitOptions,
        libraryOptions, libraryOptionValues, numLibraryOptions);
    if (result != CUDA_SUCCESS)
        return result;
    Options<CUjit_option> jit(jitOptions, jitOptionsValues, numJitOptions);
    Options<CUlibraryOption> options(libraryOptions, libraryOptionValues, numLibraryOptions);
    return load(library, result, made, Image::of_file(fileName), load_library(jit, options));
}

CUresult cuLibraryUnload(CUlibrary library) {
    return destroy(library, FG_DRIVER(cuLibraryUnload));
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
    return find_named(pKernel, library, name, FG_DRIVER(cuLibraryGetKernel));
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned count, CUlibrary lib) {
    return enumerate(kernels, count, lib, FG_DRIVER(cuLibraryEnumerateKernels),
                     FG_DRIVER(cuKernelGetName), FG_DRIVER(cuLibraryGetKernel));
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
    CUmodule driver = nullptr;
    CUresult result = FG_DRIVER(cuLibraryGetModule)(pMod ? &driver : nullptr, to_driver(library));
    if (result != CUDA_SUCCESS)
        return result;
    *pMod = found(driver, library, FG_DRIVER(cuLibraryGetModule));
    with_object(library, [](Object& object) { object.marked.store(true); });
    return result;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
    CUresult result = FG_DRIVER(cuLibraryGetGlobal)(dptr, bytes, to_driver(library), name);
    if (result == CUDA_SUCCESS)
        asked(library, name);
    return result;
}

CUresult cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
    CUmodule driver = nullptr;
    CUresult result = FG_DRIVER(cuFuncGetModule)(hmod ? &driver : nullptr, to_driver(hfunc));
    if (result == CUDA_SUCCESS)
        *hmod = found(driver, hfunc, FG_DRIVER(cuFuncGetModule));
    return result;
}

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
    CUfunction driver = nullptr;
    CUresult result = FG_DRIVER(cuKernelGetFunction)(pFunc ? &driver : nullptr, to_driver(kernel));
    if (result != CUDA_SUCCESS)
        return result;
    *pFunc = found(driver, kernel, FG_DRIVER(cuKernelGetFunction));
    with_object(kernel, [](Object& object) { object.marked.store(true); });
    return result;
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
    const auto again = [=] {
        return FG_DRIVER(cuFuncSetAttribute)(to_driver(hfunc), attrib, value);
    };
    return change(hfunc, again(), I_cuFuncSetAttribute, attrib, again);
}

CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
    const auto again = [=] { return FG_DRIVER(cuFuncSetCacheConfig)(to_driver(hfunc), config); };
    return change(hfunc, again(), I_cuFuncSetCacheConfig, 0, again);
}

CUresult cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config) {
    const auto again = [=] {
        return FG_DRIVER(cuFuncSetSharedMemConfig)(to_driver(hfunc), config);
    };
    return change(hfunc, again(), I_cuFuncSetSharedMemConfig, 0, again);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
    const auto again = [=] {
        return FG_DRIVER(cuKernelSetAttribute)(attrib, val, to_driver(kernel), dev);
    };
    const uint64_t what = static_cast<uint64_t>(attrib) << 32 | static_cast<uint32_t>(dev);
    return change(kernel, again(), I_cuKernelSetAttribute, what, again);
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev) {
    const auto again = [=] {
        return FG_DRIVER(cuKernelSetCacheConfig)(to_driver(kernel), config, dev);
    };
    return change(kernel, again(), I_cuKernelSetCacheConfig, static_cast<uint32_t>(dev), again);
}

} // namespace flowgpu::replay::recorded
