// Modules, libraries, kernels and functions.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "code.h"
#include "handlers.h"
#include "recorded.h"
#include "registry.h"
#include "task.h"
#include "threads.h"

namespace flowgpu::replay {

namespace recorded {

namespace {

// Loads from memory: modules and libraries alike.
template <class H> using Load = std::function<CUresult(H*, const void*)>;

template <class H>
CUresult load(H* out, unsigned symbol, CUresult result, H made, Image read, Load<H> again,
              Options<CUjit_option> options = {nullptr, nullptr, 0}) {
    if (result != CUDA_SUCCESS)
        return result;
    const auto code = std::make_shared<Code>(
        std::move(read),
        [again](void** handle, const void* from) {
            H loaded = nullptr;
            CUresult loading = again(&loaded, from);
            *handle = loaded;
            return loading;
        },
        std::move(options));
    code->of_library = KindOf<H>::kind == Kind::library;
    if (code->image.why.empty())
        made = static_cast<H>(load_moved(*code, KindOf<H>::kind, made));
    *out = note(made, true, [&](Object& object) {
        if constexpr (std::is_same_v<H, CUlibrary>)
            object.context = nullptr; // whichever was current: it is for all
        object.variables = code->image.variables;
        object.why = code->image.why;
        if (!object.why.empty())
            return;
        object.code = code;
        object.make = Make(
            symbol, [code](void** handle, const auto&...) { return code->again(handle); },
            code->options.names, code->options.values);
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

// Notes what the driver finds in `owner`; `function` finds it again.
template <class H, class Owner, class F, class... V>
H found(H driver, Owner owner, Function<F> function, V... values) {
    return note(driver, false, [&](Object& object) {
        object.parent = object_of(owner);
        if constexpr (std::is_same_v<H, CUkernel>)
            object.context = nullptr;
        object.make = maker<H>(function, owner, values...);
    });
}

template <class H, class Owner, class F>
CUresult find_named(H* out, Owner owner, const char* name, Function<F> function) {
    H driver = nullptr;
    CodeLock lock(owner);
    CUresult result = function.call(out ? &driver : nullptr, to_driver(owner), name);
    if (result == CUDA_SUCCESS)
        *out = found(driver, owner, function, std::string(name));
    return result;
}

// The function at a place of its module's list, which does not load it; else by its name.
CUresult listed_at(unsigned place, const std::string& name, CUfunction* out, CUmodule module) {
    std::vector<CUfunction> list(place + 1);
    const char* given = nullptr;
    if (FG_DRIVER(cuModuleEnumerateFunctions)(list.data(), place + 1, module) == CUDA_SUCCESS &&
        FG_DRIVER(cuFuncGetName)(&given, list.back()) == CUDA_SUCCESS && given == name) {
        *out = list.back();
        return CUDA_SUCCESS;
    }
    return FG_DRIVER(cuModuleGetFunction)(out, module, name.c_str());
}

// The driver's memory of a name ends with its life; the program may have the address for longer.
CUresult lasting_name(const char** name, CUresult result) {
    if (result != CUDA_SUCCESS || !*name)
        return result;
    static auto& names = *new std::unordered_set<std::string>;
    std::lock_guard<std::mutex> lock(registry().mutex);
    *name = names.emplace(*name).first->c_str();
    return result;
}

// A variable of a module or a library, by either's handle or that of a module got from a library.
void with_variable(const void* handle, const char* name,
                   const std::function<void(Object&, Variable&)>& work) {
    with_object(handle, [&](Object& object) {
        Object& owner = root_of(object);
        auto& all = owner.variables;
        auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Variable& one) { return one.name == name; });
        if (found == all.end()) {
            found = all.insert(all.end(), Variable());
            found->name = name;
        }
        work(owner, *found);
    });
}

// Memory of ours with the bytes of a variable; 0 where there can be none. Not during a capture,
// which a copy would break. A library's managed variable outlives the context.
CUdeviceptr copy_of(CUdeviceptr address, size_t bytes, bool of_library) {
    CUmemorytype type{};
    unsigned managed = 1;
    CUdeviceptr copy = 0;
    if (FG_DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != 0 ||
        FG_DRIVER(cuPointerGetAttribute)(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) != 0 ||
        type != CU_MEMORYTYPE_DEVICE || (managed && of_library) ||
        (managed ? handle::allocate_managed(&copy, bytes, false)
                 : handle::cuMemAlloc_v2(&copy, bytes)) != CUDA_SUCCESS)
        return 0;
    CUresult result = FG_DRIVER(cuMemcpyDtoD_v2)(copy, address, bytes);
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuStreamSynchronize)(CU_STREAM_LEGACY);
    if (result == CUDA_SUCCESS)
        return copy;
    handle::cuMemFree_v2(copy);
    return 0;
}

bool has_code_address(const Variable& variable) {
    return std::any_of(variable.addresses.begin(), variable.addresses.end(),
                       [](const Variable::Address& one) { return one.code; });
}

// The driver puts variables elsewhere in its next life. Where nothing leads to them but the address
// that the program is about to get, memory of ours that stands in for one does as well, and stays.
// Else kernels have been led to memory of ours, too (moved.cpp), and what is left is an alias
// (aliases.h) or the driver's address, which the engine cannot keep.
CUdeviceptr lasting_address(const void* owner, const char* name, CUdeviceptr address,
                            size_t bytes) {
    Object* context = object_of(current_context());
    CUdeviceptr known = 0;
    bool alone = false; // nothing else leads to it
    bool possible = false;
    bool of_library = false;
    const auto look = [&](Object& object, Variable& variable) {
        known = 0;
        of_library = object.kind == Kind::library;
        if (object.code)
            known = object.code->place_of(name);
        for (const auto& [in, stand_in] : variable.stand_ins)
            known = in == context ? stand_in : known;
        alone = object.code && object.code->image.by_address_alone;
        // Addresses of functions that the program reads from it would not last.
        possible = !variable.asked && context && bytes && !task().captures.load() &&
                   !has_code_address(variable) &&
                   (object.kind == Kind::library || object.context == context);
    };
    with_variable(owner, name, look);
    const CUdeviceptr copy = !known && possible && alone ? copy_of(address, bytes, of_library) : 0;
    with_variable(owner, name, [&](Object& object, Variable& variable) {
        object.marked.store(true);
        look(object, variable); // another thread was quicker
        if (copy && !known)
            variable.stand_ins.emplace_back(context, copy);
        else if (!known && possible && !copy && object.code && object.code->is_constant(name))
            known = alias_of(variable, context, address, bytes);
        variable.asked = variable.asked || !(copy || known);
        if (variable.asked && !known && context && is_taken(address, bytes))
            known = alias_of(variable, context, address, bytes);
    });
    if (copy && known)
        handle::cuMemFree_v2(copy);
    return known ? known : copy ? copy : address;
}

template <class H, class F>
CUresult find_variable(CUdeviceptr* address, size_t* bytes, H owner, const char* name, F function) {
    CUdeviceptr found = 0;
    size_t size = 0;
    CodeLock lock(owner);
    const auto ask = [&] {
        return function(address ? &found : nullptr, address || bytes ? &size : nullptr,
                        to_driver(owner), name);
    };
    CUresult result = ask();
    if (result == CUDA_SUCCESS && address && move_variables(owner))
        result = ask();
    if (result != CUDA_SUCCESS)
        return result;
    if (address)
        *address = lasting_address(owner, name, found, size);
    if (bytes)
        *bytes = size;
    return result;
}

template <class H> CUresult unload(H owner, CUresult (*function)(H)) {
    std::vector<CUdeviceptr> copies;
    void* replaced = nullptr;
    with_object(owner, [&](Object& object) {
        for (const Variable& variable : object.variables)
            for (const auto& [context, stand_in] : variable.stand_ins)
                copies.push_back(stand_in);
        if (!object.code)
            return;
        for (const Block* block : {&object.code->plain, &object.code->managed})
            if (block->start)
                copies.push_back(block->start);
        replaced = object.code->replaced;
    });
    CUresult result = destroy(owner, function);
    if (result == CUDA_SUCCESS && replaced)
        function(static_cast<H>(replaced));
    if (result == CUDA_SUCCESS)
        for (CUdeviceptr copy : copies)
            handle::cuMemFree_v2(copy);
    return result;
}

// One word for an attribute of a kernel and what it is set to; 0: there is none.
uint64_t attribute_word(CUfunction_attribute attribute, CUdevice device, int value) {
    const uint64_t which = static_cast<uint64_t>(attribute) + 1, on = static_cast<uint64_t>(device);
    return which >> 16 || on >> 16 ? 0 : which << 48 | on << 32 | static_cast<uint32_t>(value);
}

// cuBLAS sets the same before most launches.
bool is_set(CUkernel kernel, uint64_t word) {
    const Object* object = object_of(kernel);
    return word && object && object->last_set.load(std::memory_order_relaxed) == word;
}

} // namespace

CUresult cuModuleLoad(CUmodule* module, const char* fname) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoad)(module ? &made : nullptr, fname);
    Image image = result == CUDA_SUCCESS ? Image::of_file(fname) : Image();
    return load<CUmodule>(module, I_cuModuleLoad, result, made, std::move(image), load_plain);
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoadData)(module ? &made : nullptr, image);
    Image read = result == CUDA_SUCCESS ? Image::of_memory(image) : Image();
    return load<CUmodule>(module, I_cuModuleLoadData, result, made, std::move(read), load_plain);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned count,
                            CUjit_option* options, void** values) {
    CUmodule made = nullptr;
    CUresult result =
        FG_DRIVER(cuModuleLoadDataEx)(module ? &made : nullptr, image, count, options, values);
    if (result != CUDA_SUCCESS)
        return result;
    Options<CUjit_option> jit(options, values, count);
    return load<CUmodule>(
        module, I_cuModuleLoadDataEx, result, made, Image::of_memory(image),
        [jit](CUmodule* again, const void* from) mutable {
            return FG_DRIVER(cuModuleLoadDataEx)(again, from,
                                                 static_cast<unsigned>(jit.names.size()),
                                                 jit.names.data(), jit.values.data());
        },
        jit);
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
    CUmodule made = nullptr;
    CUresult result = FG_DRIVER(cuModuleLoadFatBinary)(module ? &made : nullptr, fatCubin);
    Image read = result == CUDA_SUCCESS ? Image::of_memory(fatCubin) : Image();
    return load<CUmodule>(module, I_cuModuleLoadFatBinary, result, made, std::move(read),
                          load_plain);
}

CUresult cuModuleUnload(CUmodule hmod) {
    return unload(hmod, FG_DRIVER(cuModuleUnload));
}

CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
    return find_named(hfunc, hmod, name, FG_FUNCTION(cuModuleGetFunction));
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule mod) {
    CodeLock lock(mod);
    CUresult result = FG_DRIVER(cuModuleEnumerateFunctions)(functions, count, to_driver(mod));
    for (unsigned i = 0; result == CUDA_SUCCESS && functions && i < count && functions[i]; i++)
        functions[i] = note_function(functions[i], mod, i);
    return result;
}

CUresult cuModuleGetGlobal(CUdeviceptr_v1* dptr, unsigned* bytes, CUmodule hmod, const char* name) {
    CUresult result = FG_DRIVER(cuModuleGetGlobal)(dptr, bytes, to_driver(hmod), name);
    if (result == CUDA_SUCCESS && dptr) // 32 bits, which no memory of ours has
        with_variable(hmod, name, [](Object&, Variable& variable) { variable.asked = true; });
    return result;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
    return find_variable(dptr, bytes, hmod, name, FG_DRIVER(cuModuleGetGlobal_v2));
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
    return load(library, I_cuLibraryLoadData, result, made, Image::of_memory(code),
                load_library(jit, options), jit);
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
    return load(library, I_cuLibraryLoadFromFile, result, made, Image::of_file(fileName),
                load_library(jit, options), jit);
}

CUresult cuLibraryUnload(CUlibrary library) {
    return unload(library, FG_DRIVER(cuLibraryUnload));
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
    return find_named(pKernel, library, name, FG_FUNCTION(cuLibraryGetKernel));
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned count, CUlibrary lib) {
    CodeLock lock(lib);
    CUresult result = FG_DRIVER(cuLibraryEnumerateKernels)(kernels, count, to_driver(lib));
    for (unsigned i = 0; result == CUDA_SUCCESS && kernels && i < count && kernels[i]; i++) {
        const char* name = nullptr;
        if (FG_DRIVER(cuKernelGetName)(&name, kernels[i]) != CUDA_SUCCESS || !name)
            kernels[i] = to_program(kernels[i]);
        else
            kernels[i] = found(kernels[i], lib, FG_FUNCTION(cuLibraryGetKernel), std::string(name));
    }
    return result;
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
    CUmodule driver = nullptr;
    CodeLock lock(library);
    CUresult result = FG_DRIVER(cuLibraryGetModule)(pMod ? &driver : nullptr, to_driver(library));
    if (result != CUDA_SUCCESS)
        return result;
    *pMod = found(driver, library, FG_FUNCTION(cuLibraryGetModule));
    with_object(library, [](Object& object) { object.marked.store(true); });
    return result;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
    return find_variable(dptr, bytes, library, name, FG_DRIVER(cuLibraryGetGlobal));
}

CUresult cuLibraryGetManaged(CUdeviceptr* dptr, size_t* bytes, CUlibrary library,
                             const char* name) {
    return find_variable(dptr, bytes, library, name, FG_DRIVER(cuLibraryGetManaged));
}

CUresult cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
    CUmodule driver = nullptr;
    CodeLock lock(hfunc);
    CUresult result = FG_DRIVER(cuFuncGetModule)(hmod ? &driver : nullptr, to_driver(hfunc));
    if (result == CUDA_SUCCESS)
        *hmod = found(driver, hfunc, FG_FUNCTION(cuFuncGetModule));
    return result;
}

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
    CUfunction driver = nullptr;
    CodeLock lock(kernel);
    CUresult result = FG_DRIVER(cuKernelGetFunction)(pFunc ? &driver : nullptr, to_driver(kernel));
    if (result != CUDA_SUCCESS)
        return result;
    *pFunc = found(driver, kernel, FG_FUNCTION(cuKernelGetFunction));
    with_object(kernel, [](Object& object) { object.marked.store(true); });
    return result;
}

CUresult cuFuncGetName(const char** name, CUfunction hfunc) {
    return lasting_name(name, FG_DRIVER(cuFuncGetName)(name, to_driver(hfunc)));
}

CUresult cuKernelGetName(const char** name, CUkernel hfunc) {
    return lasting_name(name, FG_DRIVER(cuKernelGetName)(name, to_driver(hfunc)));
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
    CodeLock lock(hfunc);
    return change(hfunc, attrib, FG_FUNCTION(cuFuncSetAttribute), hfunc, attrib, value);
}

CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) {
    CodeLock lock(hfunc);
    return change(hfunc, 0, FG_FUNCTION(cuFuncSetCacheConfig), hfunc, config);
}

CUresult cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config) {
    CodeLock lock(hfunc);
    return change(hfunc, 0, FG_FUNCTION(cuFuncSetSharedMemConfig), hfunc, config);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
    const uint64_t what = static_cast<uint64_t>(attrib) << 32 | static_cast<uint32_t>(dev);
    const uint64_t now = attribute_word(attrib, dev, val);
    if (is_set(kernel, now)) {
        std::lock_guard<std::mutex> lock(code_mutex());
        if (is_set(kernel, now)) // kept already
            return FG_DRIVER(cuKernelSetAttribute)(attrib, val, to_driver(kernel), dev);
    }
    CodeLock lock(kernel);
    const CUresult result =
        change(kernel, what, FG_FUNCTION(cuKernelSetAttribute), attrib, val, kernel, dev);
    with_object(kernel, [=](Object& object) {
        object.last_set.store(result == CUDA_SUCCESS ? now : 0, std::memory_order_relaxed);
    });
    return result;
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev) {
    CodeLock lock(kernel);
    return change(kernel, static_cast<uint32_t>(dev), FG_FUNCTION(cuKernelSetCacheConfig), kernel,
                  config, dev);
}

} // namespace recorded

CUfunction note_function(CUfunction driver, CUmodule module, unsigned place) {
    const char* name = nullptr;
    if (FG_DRIVER(cuFuncGetName)(&name, driver) != CUDA_SUCCESS || !name)
        return to_program(driver);
    return note(driver, false, [&](Object& object) {
        object.parent = object_of(module);
        object.listed = true;
        object.make = Make(
            I_cuModuleGetFunction,
            [self = &object, place](void** again, CUmodule in, const std::string& called) {
                CUfunction made = nullptr;
                CUresult result =
                    self->listed
                        ? recorded::listed_at(place, called, &made, to_driver(in))
                        : FG_DRIVER(cuModuleGetFunction)(&made, to_driver(in), called.c_str());
                *again = made;
                return result;
            },
            module, std::string(name));
    });
}

} // namespace flowgpu::replay
