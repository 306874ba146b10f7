// Modules, libraries, and the functions and kernels in them.
#include "state.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

constexpr uint32_t kMaxThreads = 1024;

// What the program gives, read.
std::shared_ptr<const Image> load(Session& s, std::string_view given, CUresult* error,
                                  std::string* message) {
    const uint32_t device = s.machine().config().architecture;
    const std::string bytes = select_code(given, device, error, message);
    return *error == CUDA_SUCCESS ? read_image(bytes, error, message) : nullptr;
}

// A module of an image in a context; kNeedAddresses leaves nothing behind.
int32_t instantiate(Session& s, const std::shared_ptr<Context>& context,
                    std::shared_ptr<const Image> image, Library* library,
                    std::shared_ptr<Module>* out) {
    auto module = s.client.make<Module>();
    module->library = library != nullptr ? library->handle : 0;
    module->context = context;
    module->image = std::move(image);
    module->code = s.machine().take_code(module->image->code->code_bytes());
    uint64_t bytes = 0;
    const int32_t r = place_variables(s.client, *module, library, &bytes);
    if (r != CUDA_SUCCESS) {
        s.client.unload(module);
        return r == kNeedAddresses ? s.need(bytes) : r;
    }
    *out = module;
    return CUDA_SUCCESS;
}

std::shared_ptr<Function> function_in(Client& client, const std::shared_ptr<Module>& module,
                                      const std::string& name) {
    const ptx::Function* code = module->image->code->find(name);
    if (code == nullptr || !code->entry) {
        return nullptr;
    }
    if (auto known = client.find<Function>(module->functions[name])) {
        return known;
    }
    auto function = client.make<Function>();
    function->module = module;
    function->code = code;
    module->functions[name] = function->handle;
    return function;
}

// The module of a library in a context, made when it is first asked for.
int32_t module_of(Session& s, const std::shared_ptr<Library>& library,
                  const std::shared_ptr<Context>& context, std::shared_ptr<Module>* out) {
    const auto known = library->modules.find(context->handle);
    if (known != library->modules.end()) {
        *out = s.client.find<Module>(known->second);
        return CUDA_SUCCESS;
    }
    const int32_t r = instantiate(s, context, library->image, library.get(), out);
    if (r == CUDA_SUCCESS) {
        library->modules[context->handle] = (*out)->handle;
    }
    return r;
}

int32_t function_attribute(Session& s, const Function& function, int key, int32_t* value) {
    switch (key) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = static_cast<int32_t>(std::min(function.code->max_threads, kMaxThreads));
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = static_cast<int32_t>(function.code->static_shared_bytes);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = static_cast<int32_t>(function.code->local_bytes);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = static_cast<int32_t>(function.code->reg_count);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        *value = 80;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = static_cast<int32_t>(s.machine().config().architecture);
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function.max_dynamic_shared;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = function.carveout;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
        *value = 0;
        return CUDA_SUCCESS;
    default:
        *value = 0;
        return key > 0 && key < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
}

} // namespace

int32_t refuse(Session& s, CUresult error, const std::string& message) {
    s.machine().log("module refused: " + message);
    s.out = Writer();
    s.out.put_string(message);
    return error;
}

// A launch or a query may name a function or a kernel; the kernel means its function now, in the
// context `where`, 0 meaning the current one.
int32_t resolve_function(Session& s, uint64_t handle, uint64_t where,
                         std::shared_ptr<Function>* out) {
    if ((*out = s.client.find<Function>(handle)) != nullptr) {
        const int sticky = (*out)->module->context->sticky;
        return sticky;
    }
    const auto kernel = s.client.find<Kernel>(handle);
    if (kernel == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error, where);
    if (context == nullptr) {
        return error;
    }
    std::shared_ptr<Module> module;
    if (const int32_t r = module_of(s, kernel->library, context, &module); r != CUDA_SUCCESS) {
        return r;
    }
    *out = function_in(s.client, module, kernel->name);
    if (*out == nullptr) {
        return CUDA_ERROR_NOT_FOUND;
    }
    (*out)->max_dynamic_shared = std::max((*out)->max_dynamic_shared, kernel->max_dynamic_shared);
    return CUDA_SUCCESS;
}

// A managed variable of a library is one for all contexts, and outlives them (measured); it has its
// first value when the first of them asks for the module.
int32_t place_variables(Client& client, Module& module, Library* library, uint64_t* need) {
    const auto& variables = module.image->code->variables();
    const bool known = library != nullptr && !library->managed.empty();
    for (size_t i = 0; i < variables.size(); ++i) {
        const auto size = std::max<uint64_t>(variables[i].size, 1);
        uint64_t address = 0;
        int32_t r = CUDA_SUCCESS;
        if (!variables[i].managed) {
            r = client.allocate(*module.context, MapKind::kGlobal, size, &address, need);
        } else if (library == nullptr) {
            r = client.allocate_managed(module.context->handle, size, &address, need);
        } else if (library->managed.count(i) != 0) {
            address = library->managed[i];
        } else if ((r = client.allocate_managed(0, size, &address, need)) == CUDA_SUCCESS) {
            library->managed[i] = address;
        }
        if (r != CUDA_SUCCESS) {
            return r;
        }
        module.variables.push_back(address);
    }
    for (size_t i = 0; i < variables.size(); ++i) {
        if (variables[i].managed && known) {
            continue;
        }
        const Image::Variable& first = module.image->variables[i];
        uint8_t* host = client.space.at(module.variables[i])->host();
        std::memset(host, 0, variables[i].size);
        std::copy(first.init.begin(), first.init.end(), host);
        for (const Image::Reloc& reloc : first.relocs) {
            const uint64_t address = reloc.function
                                         ? module.code + reloc.index * ptx::function_bytes
                                         : module.variables[reloc.index];
            const uint64_t value = address + reloc.addend;
            std::memcpy(host + reloc.offset, &value, sizeof value);
        }
    }
    module.kernels_know = module.image->known_to_kernels(module.variables);
    return CUDA_SUCCESS;
}

int32_t op_ModuleLoad(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    std::string message;
    auto image = load(s, s.in.take_blob(), &error, &message);
    if (image == nullptr) {
        return refuse(s, error, message);
    }
    std::shared_ptr<Module> module;
    const int32_t r = instantiate(s, context, std::move(image), nullptr, &module);
    if (r == CUDA_SUCCESS) {
        s.out.put(module->handle);
    }
    return r;
}

int32_t op_ModuleUnload(Session& s) {
    const auto module = s.client.find<Module>(s.in.take<uint64_t>());
    if (module == nullptr || module->library != 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (const CUresult r = s.wait_idle(*module->context); r != CUDA_SUCCESS) {
        return r;
    }
    if (s.client.find<Module>(module->handle) != nullptr) {
        s.client.unload(module);
    }
    return CUDA_SUCCESS;
}

namespace {

// A context that has ended has taken its modules along, and is what the driver names.
int32_t no_module(Session& s, uint64_t handle) {
    if (handle == 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return s.current_has_ended() ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_HANDLE;
}

} // namespace

int32_t op_ModuleGetFunction(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const auto module = s.client.find<Module>(handle);
    if (module == nullptr) {
        return no_module(s, handle);
    }
    if (const int32_t error = module->context->sticky; error != CUDA_SUCCESS) {
        return error;
    }
    const auto function = function_in(s.client, module, s.in.take_string());
    if (function == nullptr) {
        return CUDA_ERROR_NOT_FOUND;
    }
    function->loaded = true; // measured, unlike those of an enumeration
    s.out.put(function->handle);
    return CUDA_SUCCESS;
}

int32_t op_ModuleFunctions(Session& s) {
    const auto module = s.client.find<Module>(s.in.take<uint64_t>());
    if (module == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::vector<uint64_t> handles;
    for (const ptx::Function& code : module->image->code->functions()) {
        if (const auto function = function_in(s.client, module, code.name)) {
            handles.push_back(function->handle);
        }
    }
    s.out.put(static_cast<uint32_t>(handles.size()));
    s.out.put_bytes(handles.data(), handles.size() * sizeof(uint64_t));
    return CUDA_SUCCESS;
}

int32_t op_ModuleGetGlobal(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const auto module = s.client.find<Module>(handle);
    if (module == nullptr) {
        return no_module(s, handle);
    }
    const std::string name = s.in.take_string();
    const auto& variables = module->image->code->variables();
    for (size_t i = 0; i < variables.size(); ++i) {
        if (variables[i].name == name) {
            s.out.put(module->variables[i]);
            s.out.put(variables[i].size);
            s.out.put(uint8_t{variables[i].managed});
            return CUDA_SUCCESS;
        }
    }
    const auto& functions = module->image->code->functions();
    const bool is_function = std::any_of(functions.begin(), functions.end(),
                                         [&](const auto& one) { return one.name == name; });
    return is_function ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_FOUND;
}

int32_t op_LibraryLoad(Session& s) {
    CUresult error = CUDA_SUCCESS;
    std::string message;
    auto image = load(s, s.in.take_blob(), &error, &message);
    if (image == nullptr) {
        return refuse(s, error, message);
    }
    auto library = s.client.make<Library>();
    library->image = std::move(image);
    s.out.put(library->handle);
    return CUDA_SUCCESS;
}

int32_t op_LibraryUnload(Session& s) {
    const auto library = s.client.find<Library>(s.in.take<uint64_t>());
    if (library == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (const auto& [context, handle] : std::map<uint64_t, uint64_t>(library->modules)) {
        const auto module = s.client.find<Module>(handle);
        if (module != nullptr) {
            s.wait_idle(*module->context);
            s.client.unload(module);
        }
    }
    for (const auto& [name, kernel] : library->kernels) {
        s.client.objects.erase(kernel);
    }
    for (const auto& [index, address] : library->managed) {
        s.client.release(address);
    }
    s.client.objects.erase(library->handle);
    return CUDA_SUCCESS;
}

namespace {

std::shared_ptr<Kernel> kernel_in(Client& client, const std::shared_ptr<Library>& library,
                                  const std::string& name) {
    const ptx::Function* code = library->image->code->find(name);
    if (code == nullptr || !code->entry) {
        return nullptr;
    }
    if (auto known = client.find<Kernel>(library->kernels[name])) {
        return known;
    }
    auto kernel = client.make<Kernel>();
    kernel->library = library;
    kernel->name = name;
    library->kernels[name] = kernel->handle;
    return kernel;
}

} // namespace

int32_t op_LibraryGetKernel(Session& s) {
    const auto library = s.client.find<Library>(s.in.take<uint64_t>());
    if (library == nullptr) {
        return CUDA_ERROR_NOT_FOUND; // as the driver says of a library that was unloaded
    }
    const auto kernel = kernel_in(s.client, library, s.in.take_string());
    if (kernel == nullptr) {
        return CUDA_ERROR_NOT_FOUND;
    }
    s.out.put(kernel->handle);
    return CUDA_SUCCESS;
}

int32_t op_LibraryKernels(Session& s) {
    const auto library = s.client.find<Library>(s.in.take<uint64_t>());
    if (library == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::vector<uint64_t> handles;
    for (const ptx::Function& code : library->image->code->functions()) {
        if (const auto kernel = kernel_in(s.client, library, code.name)) {
            handles.push_back(kernel->handle);
        }
    }
    s.out.put(static_cast<uint32_t>(handles.size()));
    s.out.put_bytes(handles.data(), handles.size() * sizeof(uint64_t));
    return CUDA_SUCCESS;
}

int32_t op_LibraryGetModule(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto library = s.client.find<Library>(s.in.take<uint64_t>());
    const auto context = s.context(&error);
    if (library == nullptr || context == nullptr) {
        return library == nullptr ? CUDA_ERROR_INVALID_HANDLE : error;
    }
    std::shared_ptr<Module> module;
    const int32_t r = module_of(s, library, context, &module);
    if (r == CUDA_SUCCESS) {
        s.out.put(module->handle);
    }
    return r;
}

int32_t op_KernelGetFunction(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    std::shared_ptr<Function> function;
    if (s.client.find<Kernel>(handle) == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const int32_t r = resolve_function(s, handle, 0, &function);
    if (r == CUDA_SUCCESS) {
        function->loaded = true;
        s.out.put(function->handle);
    }
    return r;
}

int32_t op_KernelGetLibrary(Session& s) {
    const auto kernel = s.client.find<Kernel>(s.in.take<uint64_t>());
    if (kernel == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    s.out.put(kernel->library->handle);
    return CUDA_SUCCESS;
}

int32_t op_FuncInfo(Session& s) {
    std::shared_ptr<Function> function;
    const auto handle = s.in.take<uint64_t>();
    if (handle == 0 && s.current_has_ended()) {
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (const int32_t r = resolve_function(s, handle, 0, &function); r != CUDA_SUCCESS) {
        return r;
    }
    s.out.put_string(function->code->name);
    s.out.put(uint8_t{handle != function->handle});
    s.out.put(function->code->param_bytes);
    s.out.put(static_cast<uint32_t>(function->code->params.size()));
    for (const ptx::Param& param : function->code->params) {
        s.out.put(param.offset);
        s.out.put(param.size);
    }
    return CUDA_SUCCESS;
}

int32_t op_FuncGetModule(Session& s) {
    const auto function = s.client.find<Function>(s.in.take<uint64_t>());
    if (function == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    s.out.put(function->module->handle);
    return CUDA_SUCCESS;
}

int32_t op_FuncGetAttribute(Session& s) {
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve_function(s, s.in.take<uint64_t>(), 0, &function);
        r != CUDA_SUCCESS) {
        return r;
    }
    int32_t value = 0;
    const int32_t r = function_attribute(s, *function, s.in.take<int32_t>(), &value);
    s.out.put(value);
    return r;
}

// Answers if the function is loaded. The caller may ask to load it first.
int32_t op_FuncLoaded(Session& s) {
    std::shared_ptr<Function> function;
    const int32_t r = resolve_function(s, s.in.take<uint64_t>(), 0, &function);
    if (r == CUDA_SUCCESS) {
        function->loaded |= s.in.take<uint8_t>() != 0;
        s.out.put(uint8_t{function->loaded});
    }
    return r;
}

int32_t op_FuncSetAttribute(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const auto key = s.in.take<int32_t>();
    const auto value = s.in.take<int32_t>();
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve_function(s, handle, 0, &function); r != CUDA_SUCCESS) {
        return r;
    }
    const auto kernel = s.client.find<Kernel>(handle);
    if (key == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 ||
            static_cast<uint32_t>(value) + function->code->static_shared_bytes > kSharedOptIn) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        function->max_dynamic_shared = value;
        if (kernel != nullptr) {
            kernel->max_dynamic_shared = value;
        }
        return CUDA_SUCCESS;
    }
    if (key == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT && value >= -1 && value <= 100) {
        function->carveout = value;
        if (kernel != nullptr) {
            kernel->carveout = value;
        }
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

} // namespace flowgpu::emu
