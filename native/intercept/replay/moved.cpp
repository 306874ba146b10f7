// Variables of modules in memory of the program's.
#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "code.h"
#include "handlers.h"
#include "movable.h"
#include "registry.h"
#include "task.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

std::mutex moving; // one module at a time

// A cubin of PTX text for the GPU of the current context; empty where the driver makes none.
std::string linked(std::string text, Options<CUjit_option> options) {
    CUlinkState state = nullptr;
    void* made = nullptr;
    size_t bytes = 0;
    std::string cubin;
    if (FG_DRIVER(cuLinkCreate_v2)(static_cast<unsigned>(options.names.size()),
                                   options.names.data(), options.values.data(),
                                   &state) != CUDA_SUCCESS)
        return cubin;
    if (FG_DRIVER(cuLinkAddData_v2)(state, CU_JIT_INPUT_PTX, text.data(), text.size(), "module", 0,
                                    nullptr, nullptr) == CUDA_SUCCESS &&
        FG_DRIVER(cuLinkComplete)(state, &made, &bytes) == CUDA_SUCCESS)
        cubin.assign(static_cast<const char*>(made), bytes);
    FG_DRIVER(cuLinkDestroy)(state);
    return cubin;
}

// Whether the driver chooses the code by its architecture alone.
bool chooses_freely(const Options<CUjit_option>& options) {
    const auto& names = options.names;
    return !getenv("CUDA_FORCE_PTX_JIT") &&
           std::find(names.begin(), names.end(), CU_JIT_FALLBACK_STRATEGY) == names.end() &&
           std::find(names.begin(), names.end(), CU_JIT_TARGET) == names.end();
}

// The code that runs on the GPU of the current context; empty where it cannot be told.
std::string cubin_of(const Code& code) {
    CUdevice device = 0;
    int major = 0;
    int minor = 0;
    if (!chooses_freely(code.options) || FG_DRIVER(cuCtxGetDevice)(&device) != CUDA_SUCCESS ||
        FG_DRIVER(cuDeviceGetAttribute)(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                        device) != CUDA_SUCCESS ||
        FG_DRIVER(cuDeviceGetAttribute)(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                        device) != CUDA_SUCCESS)
        return {};
    ChosenCode chosen = choose_code(read_module_image(code.image.data),
                                    static_cast<unsigned>(major), static_cast<unsigned>(minor));
    return chosen.form == ChosenCode::Form::ptx ? linked(chosen.bytes, code.options)
                                                : std::move(chosen.bytes);
}

// A library has variables of its own in each context, but only one place for them.
bool has_one_context(const Object& root) {
    if (root.kind == Kind::module)
        return root.context == object_of(current_context());
    int devices = 0;
    const auto contexts = std::count_if(
        registry().objects.begin(), registry().objects.end(), [](const auto& entry) {
            return entry.second->kind == Kind::context && entry.second->active;
        });
    return contexts == 1 && FG_DRIVER(cuDeviceGetCount)(&devices) == CUDA_SUCCESS && devices == 1;
}

// All that belongs to a module or library, itself first.
std::vector<Object*> family_of(const Object& root) {
    std::vector<Object*> family;
    for (const auto& [serial, object] : registry().objects)
        if (&root_of(*object) == &root)
            family.push_back(object.get());
    return family;
}

CUresult unload(const Object& root, void* driver) {
    return root.kind == Kind::module ? FG_DRIVER(cuModuleUnload)(static_cast<CUmodule>(driver))
                                     : FG_DRIVER(cuLibraryUnload)(static_cast<CUlibrary>(driver));
}

// The module or library and all that the program has of it, made again; as it was, where that
// fails.
bool exchange(Object& root, const std::vector<Object*>& family) {
    Registry& r = registry();
    std::vector<void*> before;
    for (const Object* object : family)
        before.push_back(object->slot->driver);
    CUresult result = CUDA_SUCCESS;
    size_t made = 0;
    for (Object* object : family) {
        void* driver = nullptr;
        if (result == CUDA_SUCCESS)
            result = object->make ? object->make(&driver) : CUDA_ERROR_NOT_SUPPORTED;
        if (result != CUDA_SUCCESS)
            break;
        object->slot->driver = driver;
        made++;
        for (const auto& [key, again] : object->state)
            if (result == CUDA_SUCCESS)
                result = again();
    }
    if (result != CUDA_SUCCESS) {
        if (made)
            unload(root, root.slot->driver);
        for (size_t i = 0; i < made; i++)
            family[i]->slot->driver = before[i];
        return false;
    }
    for (size_t i = 0; i < family.size(); i++) {
        r.index_of(family[i]->kind).erase(before[i]);
        if (family[i]->kind == Kind::function)
            r.ended_functions.insert(before[i]);
    }
    for (Object* object : family) {
        r.index_of(object->kind)[object->slot->driver] = object;
        r.ended_functions.erase(object->slot->driver);
        for (auto it = r.kernel_functions.begin(); it != r.kernel_functions.end();)
            it = it->second == object->serial ? r.kernel_functions.erase(it) : std::next(it);
    }
    unload(root, before[0]);
    return true;
}

void place(Object& root, const MovableCubin& cubin) {
    for (const MovableCubin::Place& one : cubin.places()) {
        auto found =
            std::find_if(root.variables.begin(), root.variables.end(),
                         [&](const Variable& variable) { return variable.name == one.name; });
        if (found == root.variables.end()) {
            found = root.variables.insert(root.variables.end(), Variable());
            found->name = one.name;
        }
        found->moved = root.code->block + one.offset;
    }
}

} // namespace

Object& root_of(Object& object) {
    Object* root = &object;
    while (root->parent)
        root = root->parent;
    return *root;
}

void note_launch(Slot* slot) {
    bool first = false;
    with_object(slot, [&](Object& object) {
        const Object& root = root_of(object);
        first = root.code && root.code->moves_at_first_launch(root.kind);
    });
    if (first && !task().captures.load())
        move_variables(slot);
    with_object(slot, [](Object& object) { // not while its variables are moved
        object.marked.store(true);
        object.launched.store(true);
    });
}

void move_variables(const void* handle) {
    std::lock_guard<std::mutex> one_at_a_time(moving);
    std::shared_ptr<Code> code;
    with_object(handle, [&](Object& object) { code = root_of(object).code; });
    if (!code || code->looked_into.exchange(true))
        return;
    const MovableCubin cubin(cubin_of(*code));
    CUdeviceptr block = 0;
    if (!cubin.why().empty() || !cubin.bytes() ||
        handle::cuMemAlloc_v2(&block, cubin.bytes()) != CUDA_SUCCESS)
        return;
    const std::string contents = cubin.contents_at(block);
    CUresult result = FG_DRIVER(cuMemcpyHtoD_v2)(block, contents.data(), contents.size());
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuStreamSynchronize)(CU_STREAM_LEGACY);
    bool moved = false;
    with_object(handle, [&](Object& object) {
        Object& root = root_of(object);
        const std::vector<Object*> family = family_of(root);
        // What has run may have kept an address of where they are now.
        const bool launched = std::any_of(family.begin(), family.end(), [](const Object* one) {
            return one->launched.load();
        });
        if (result != CUDA_SUCCESS || launched || root.code != code || !has_one_context(root))
            return;
        code->moved = cubin.cubin_at(block);
        code->block = block;
        moved = exchange(root, family);
        if (moved)
            place(root, cubin);
    });
    if (moved)
        return;
    code->block = 0;
    code->moved.clear();
    handle::cuMemFree_v2(block);
}

} // namespace flowgpu::replay
