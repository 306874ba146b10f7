// Modules, libraries, functions, kernels in them, and launches.
#include "state.h"

#include <algorithm>
#include <thread>

namespace flowgpu::emu {

namespace {

constexpr int kMaxThreads = 1024;
constexpr uint32_t kSharedPerBlock = 48u << 10;
constexpr uint32_t kSharedOptIn = 163u << 10;
constexpr uint32_t kSharedPerProcessor = 164u << 10;
constexpr uint32_t kThreadsPerProcessor = 2048;
constexpr uint32_t kBlocksPerProcessor = 32;
constexpr uint32_t kRegistersPerProcessor = 65536;
constexpr uint32_t kSharedReserved = 1024;
constexpr int kProcessors = 8;

std::shared_ptr<ptx::Module> parse(std::string_view image, std::string* text, CUresult* error,
                                   std::string* message) {
    *text = extract_ptx(image, error, message);
    if (*error != CUDA_SUCCESS) {
        return nullptr;
    }
    ptx::Error parse_error;
    auto code = ptx::Module::parse(*text, &parse_error);
    if (code == nullptr) {
        *error = CUDA_ERROR_INVALID_PTX;
        *message = parse_error.message;
    }
    return code;
}

int32_t refuse(Session& s, CUresult error, const std::string& message) {
    s.machine().log("module refused: " + message);
    s.out = Writer();
    s.out.put_string(message);
    return error;
}

// A module of already parsed code in a context; kNeedAddresses leaves nothing behind.
int32_t instantiate(Session& s, const std::shared_ptr<Context>& context, std::string text,
                    std::shared_ptr<ptx::Module> code, std::shared_ptr<Module>* out) {
    auto module = s.client.make<Module>();
    module->context = context;
    module->text = std::move(text);
    module->code = std::move(code);
    uint64_t bytes = 0;
    const int32_t r = place_variables(s.client, *module, &bytes);
    if (r != CUDA_SUCCESS) {
        s.client.unload(module);
        return r == kNeedAddresses ? s.need(bytes) : r;
    }
    *out = module;
    return CUDA_SUCCESS;
}

std::shared_ptr<Function> function_in(Client& client, const std::shared_ptr<Module>& module,
                                      const std::string& name) {
    const ptx::Function* code = module->code->find(name);
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
    const int32_t r = instantiate(s, context, library->text, library->code, out);
    if (r == CUDA_SUCCESS) {
        (*out)->library = library->handle;
        library->modules[context->handle] = (*out)->handle;
    }
    return r;
}

// A launch or a query may name a function or a kernel; the kernel means its function here and now.
int32_t resolve(Session& s, uint64_t handle, std::shared_ptr<Function>* out) {
    if ((*out = s.client.find<Function>(handle)) != nullptr) {
        const int sticky = (*out)->module->context->sticky;
        return sticky;
    }
    const auto kernel = s.client.find<Kernel>(handle);
    if (kernel == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
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

CUresult check_shape(const Function& function, const LaunchShape& shape, uint64_t threads) {
    constexpr uint32_t kMostBlocks = 65535;
    const uint32_t shared = function.code->static_shared_bytes + shape.shared;
    for (int i = 0; i < 3; ++i) {
        if (shape.grid[i] == 0 || shape.block[i] == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (shape.grid[0] > INT32_MAX || shape.grid[1] > kMostBlocks || shape.grid[2] > kMostBlocks ||
        threads > kMaxThreads || shape.block[2] > 64 ||
        shape.shared > static_cast<uint32_t>(function.max_dynamic_shared) ||
        shared > kSharedOptIn) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return threads > function.code->max_threads ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

uint32_t blocks_per_processor(const Function& function, uint64_t threads, uint64_t dynamic) {
    const uint64_t rounded = (threads + 31) / 32 * 32;
    const uint64_t shared = function.code->static_shared_bytes + dynamic + kSharedReserved;
    const uint64_t registers = std::max<uint64_t>(function.code->reg_count, 16) * rounded;
    if (threads > kMaxThreads || rounded == 0) {
        return 0;
    }
    return static_cast<uint32_t>(
        std::min<uint64_t>({kBlocksPerProcessor, kThreadsPerProcessor / rounded,
                            kSharedPerProcessor / shared, kRegistersPerProcessor / registers}));
}

CUresult result_of(ptx::Result::Code code) {
    switch (code) {
    case ptx::Result::Code::ok:
    case ptx::Result::Code::cancelled:
        return CUDA_SUCCESS;
    case ptx::Result::Code::illegal_address:
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    case ptx::Result::Code::misaligned_address:
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    case ptx::Result::Code::illegal_instruction:
        return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case ptx::Result::Code::assert_failed:
        return CUDA_ERROR_ASSERT;
    case ptx::Result::Code::launch_failure:
        break;
    }
    return CUDA_ERROR_LAUNCH_FAILED;
}

struct Work {
    std::shared_ptr<Client> client;
    std::shared_ptr<Context> context;
    std::shared_ptr<Module> module;
    const ptx::Function* code;
    uint64_t stream;
    LaunchShape shape;
    std::vector<uint8_t> params;
    std::vector<uint64_t> variables;
};

void log_launch(const Work& work, ptx::WriteLog& writes) {
    std::string line = "{\"pid\": " + std::to_string(work.client->pid) + ", \"kernel\": \"" +
                       work.code->name + "\", \"stream\": " + std::to_string(work.stream) +
                       ", \"writes\": [";
    bool first = true;
    for (const auto& range : writes.ranges()) {
        line += first ? "[" : ", [";
        line += std::to_string(range.addr) + ", " + std::to_string(range.size) + "]";
        first = false;
    }
    work.client->machine->log_writes(line + "]}");
}

void run_kernel(const Work& work) {
    Machine& machine = *work.client->machine;
    if (machine.config().kernel_delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(machine.config().kernel_delay_us));
    }
    KernelMemory memory(&work.client->space, &work.client->mutex, work.context->device->index);
    ptx::WriteLog writes;
    ptx::Launch launch;
    std::copy_n(work.shape.grid, 3, launch.grid);
    std::copy_n(work.shape.block, 3, launch.block);
    launch.dynamic_shared = work.shape.shared;
    launch.params = work.params.data();
    launch.variables = work.variables;
    launch.log = machine.config().write_log.empty() ? nullptr : &writes;
    launch.cancel = &work.context->cancel;
    const ptx::Result result = ptx::launch(*work.module->code, *work.code, launch, memory);
    const CUresult error = result_of(result.code);
    if (error != CUDA_SUCCESS) {
        machine.log("kernel " + work.code->name + " failed with " + std::to_string(error) + ": " +
                    result.detail);
        work.context->sticky = error;
    }
    if (launch.log != nullptr) {
        log_launch(work, writes);
    }
}

int32_t function_attribute(const Function& function, int key, int32_t* value) {
    switch (key) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = static_cast<int32_t>(std::min<uint32_t>(function.code->max_threads, kMaxThreads));
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
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 80;
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

int32_t place_variables(Client& client, Module& module, uint64_t* need) {
    const auto& variables = module.code->variables();
    std::map<std::string, uint64_t> addresses;
    for (const ptx::Variable& variable : variables) {
        uint64_t address = 0;
        const int32_t r = client.allocate(*module.context, MapKind::kGlobal,
                                          std::max<uint64_t>(variable.size, 1), &address, need);
        if (r != CUDA_SUCCESS) {
            return r;
        }
        module.variables.push_back(address);
        addresses[variable.name] = address;
    }
    for (size_t i = 0; i < variables.size(); ++i) {
        const ptx::Variable& variable = variables[i];
        uint8_t* host = client.space.at(module.variables[i])->host();
        std::memset(host, 0, variable.size);
        std::memcpy(host, variable.init.data(), std::min<uint64_t>(variable.init.size(), variable.size));
        for (const auto& reloc : variable.relocs) {
            const auto target = addresses.find(reloc.symbol);
            if (target != addresses.end() && reloc.offset + sizeof(uint64_t) <= variable.size) {
                uint64_t value;
                std::memcpy(&value, host + reloc.offset, sizeof value);
                value += target->second;
                std::memcpy(host + reloc.offset, &value, sizeof value);
            }
        }
    }
    return CUDA_SUCCESS;
}

int32_t op_ModuleLoad(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    std::string text;
    std::string message;
    auto code = parse(s.in.take_blob(), &text, &error, &message);
    if (code == nullptr) {
        return refuse(s, error, message);
    }
    std::shared_ptr<Module> module;
    const int32_t r = instantiate(s, context, std::move(text), std::move(code), &module);
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

int32_t op_ModuleGetFunction(Session& s) {
    const auto module = s.client.find<Module>(s.in.take<uint64_t>());
    if (module == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const auto function = function_in(s.client, module, s.in.take_string());
    if (function == nullptr) {
        return CUDA_ERROR_NOT_FOUND;
    }
    s.out.put(function->handle);
    return CUDA_SUCCESS;
}

int32_t op_ModuleFunctions(Session& s) {
    const auto module = s.client.find<Module>(s.in.take<uint64_t>());
    if (module == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::vector<uint64_t> handles;
    for (const ptx::Function& code : module->code->functions()) {
        if (const auto function = function_in(s.client, module, code.name)) {
            handles.push_back(function->handle);
        }
    }
    s.out.put(static_cast<uint32_t>(handles.size()));
    s.out.put_bytes(handles.data(), handles.size() * sizeof(uint64_t));
    return CUDA_SUCCESS;
}

int32_t op_ModuleGetGlobal(Session& s) {
    const auto module = s.client.find<Module>(s.in.take<uint64_t>());
    if (module == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const std::string name = s.in.take_string();
    const auto& variables = module->code->variables();
    for (size_t i = 0; i < variables.size(); ++i) {
        if (variables[i].name == name) {
            s.out.put(module->variables[i]);
            s.out.put(variables[i].size);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

int32_t op_LibraryLoad(Session& s) {
    CUresult error = CUDA_SUCCESS;
    std::string text;
    std::string message;
    auto code = parse(s.in.take_blob(), &text, &error, &message);
    if (code == nullptr) {
        return refuse(s, error, message);
    }
    auto library = s.client.make<Library>();
    library->text = std::move(text);
    library->code = std::move(code);
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
    s.client.objects.erase(library->handle);
    return CUDA_SUCCESS;
}

namespace {

std::shared_ptr<Kernel> kernel_in(Client& client, const std::shared_ptr<Library>& library,
                                  const std::string& name) {
    const ptx::Function* code = library->code->find(name);
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
        return CUDA_ERROR_INVALID_HANDLE;
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
    for (const ptx::Function& code : library->code->functions()) {
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
    const int32_t r = resolve(s, handle, &function);
    if (r == CUDA_SUCCESS) {
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
    if (const int32_t r = resolve(s, s.in.take<uint64_t>(), &function); r != CUDA_SUCCESS) {
        return r;
    }
    s.out.put_string(function->code->name);
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
    if (const int32_t r = resolve(s, s.in.take<uint64_t>(), &function); r != CUDA_SUCCESS) {
        return r;
    }
    int32_t value = 0;
    const int32_t r = function_attribute(*function, s.in.take<int32_t>(), &value);
    s.out.put(value);
    return r;
}

int32_t op_FuncSetAttribute(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const auto key = s.in.take<int32_t>();
    const auto value = s.in.take<int32_t>();
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve(s, handle, &function); r != CUDA_SUCCESS) {
        return r;
    }
    const auto kernel = s.client.find<Kernel>(handle);
    if (key == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || static_cast<uint32_t>(value) + function->code->static_shared_bytes >
                             kSharedOptIn) {
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

int32_t op_Launch(Session& s) {
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve(s, s.in.take<uint64_t>(), &function); r != CUDA_SUCCESS) {
        return r;
    }
    const auto shape = s.in.take<LaunchShape>();
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->context != function->module->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const uint64_t threads = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
    if (const CUresult r = check_shape(*function, shape, threads); r != CUDA_SUCCESS) {
        return r;
    }
    if (shape.cooperative != 0 &&
        uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2] >
            uint64_t{blocks_per_processor(*function, threads, shape.shared)} * kProcessors) {
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    }
    const std::string_view params = s.in.take_blob();
    auto work = std::make_shared<Work>();
    work->client = s.client.shared_from_this();
    work->context = stream->context;
    work->module = function->module;
    work->code = function->code;
    work->stream = stream->handle;
    work->shape = shape;
    work->params.assign(params.begin(), params.end());
    work->params.resize(function->code->param_bytes);
    work->variables = function->module->variables;
    submit(s.client, stream, [work] { run_kernel(*work); });
    return CUDA_SUCCESS;
}

int32_t op_Occupancy(Session& s) {
    const auto which = s.in.take<int32_t>();
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve(s, s.in.take<uint64_t>(), &function); r != CUDA_SUCCESS) {
        return r;
    }
    const auto count = s.in.take<int32_t>();
    const auto dynamic = s.in.take<uint64_t>();
    if (which == 0) {
        s.out.put(uint64_t{blocks_per_processor(*function, static_cast<uint64_t>(count), dynamic)});
        return CUDA_SUCCESS;
    }
    const uint64_t each = kSharedPerProcessor / static_cast<uint32_t>(count);
    const uint64_t fixed = function->code->static_shared_bytes + kSharedReserved;
    s.out.put(each > fixed ? std::min<uint64_t>(each - fixed, kSharedPerBlock) : uint64_t{0});
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
