// Variables of modules in memory of the program's.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "code.h"
#include "handlers.h"
#include "movable.h"
#include "registry.h"
#include "task.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

// The driver's variables stay beside ours.
constexpr uint64_t kMostBytes = uint64_t{64} << 20;
// Before the first variable: nobody can free it by its address. As variables are aligned at most.
constexpr uint64_t kLead = 512;

// Another thread's capture does not forbid what this thread does meanwhile.
class Relaxed {
  public:
    Relaxed() { FG_DRIVER(cuThreadExchangeStreamCaptureMode)(&mode_); }
    ~Relaxed() { FG_DRIVER(cuThreadExchangeStreamCaptureMode)(&mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// True if the driver chooses the code by its architecture alone, and every option is a number.
bool chooses_freely(const Options<CUjit_option>& options) {
    constexpr CUjit_option kKnown[] = {
        CU_JIT_MAX_REGISTERS,       CU_JIT_THREADS_PER_BLOCK,
        CU_JIT_OPTIMIZATION_LEVEL,  CU_JIT_TARGET_FROM_CUCONTEXT,
        CU_JIT_GENERATE_DEBUG_INFO, CU_JIT_GENERATE_LINE_INFO,
        CU_JIT_CACHE_MODE,
    };
    return !forces_compilation() &&
           std::all_of(options.names.begin(), options.names.end(), [&](CUjit_option name) {
               return std::find(std::begin(kKnown), std::end(kKnown), name) != std::end(kKnown);
           });
}

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

// The code that runs on the GPU of the current context; empty where it cannot be told.
std::string cubin_of(const Code& code) {
    CUdevice device = 0;
    int major = 0;
    int minor = 0;
    if (!chooses_freely(code.options) || !LoadedImages().have(code.image) ||
        FG_DRIVER(cuCtxGetDevice)(&device) != CUDA_SUCCESS ||
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

// Fills the block on a stream of its own, which waits for no other and for which none waits.
bool fill(CUdeviceptr block, const std::string& contents) {
    CUstream stream = nullptr;
    if (FG_DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    const bool filled = FG_DRIVER(cuMemcpyHtoDAsync_v2)(block, contents.data(), contents.size(),
                                                        stream) == CUDA_SUCCESS &&
                        FG_DRIVER(cuStreamSynchronize)(stream) == CUDA_SUCCESS;
    FG_DRIVER(cuStreamDestroy_v2)(stream);
    return filled;
}

void leave_block(Code& code) {
    code.forget_places();
    code.block = 0;
    code.context = nullptr;
    code.moved.clear();
}

// Makes the code for variables in a block of the current context. False: they stay the driver's.
bool make_block(Code& code) try {
    code.tried = true;
    const MovableCubin cubin(cubin_of(code));
    CUdeviceptr block = 0;
    if (!cubin.why().empty() || !cubin.bytes() || cubin.bytes() > kMostBytes)
        return false;
    if (handle::cuMemAlloc_v2(&block, kLead + cubin.bytes()) != CUDA_SUCCESS)
        return false;
    const CUdeviceptr base = block + kLead;
    try {
        if (fill(base, cubin.contents_at(base))) {
            code.moved = cubin.cubin_at(base);
            for (const MovableCubin::Place& place : cubin.places()) {
                code.places[place.name] = base + place.offset;
                address_map().put(Region{base + place.offset, place.bytes, MemoryKind::variable});
            }
            code.context = object_of(current_context());
            code.block = block;
            return true;
        }
    } catch (const std::bad_alloc&) {
    }
    leave_block(code);
    handle::cuMemFree_v2(block);
    return false;
} catch (const std::bad_alloc&) {
    return false;
}

void give_up_block(Code& code) {
    const CUdeviceptr block = code.block;
    leave_block(code);
    handle::cuMemFree_v2(block);
}

CUresult unload(Kind kind, void* driver) {
    return kind == Kind::module ? FG_DRIVER(cuModuleUnload)(static_cast<CUmodule>(driver))
                                : FG_DRIVER(cuLibraryUnload)(static_cast<CUlibrary>(driver));
}

// A library has variables of its own in each context, but only one place for them here.
bool has_one_context() {
    int devices = 0;
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto contexts =
        std::count_if(registry().objects.begin(), registry().objects.end(), [](const auto& entry) {
            return entry.second->kind == Kind::context && entry.second->active;
        });
    return contexts == 1 && FG_DRIVER(cuDeviceGetCount)(&devices) == CUDA_SUCCESS && devices == 1;
}

// What the program has of a library, itself first. Nothing of it comes or goes meanwhile.
std::vector<Object*> family_of(const void* handle) {
    std::vector<Object*> family;
    std::lock_guard<std::mutex> lock(registry().mutex);
    Object* object = object_of(handle);
    const Object* root = object ? &root_of(*object) : nullptr;
    for (const auto& [serial, one] : registry().objects)
        if (&root_of(*one) == root)
            family.push_back(one.get());
    return family;
}

// Loads the library anew and finds and sets again what the program has of it; as it was, where that
// fails. What the driver had of it stays until the library ends: another thread may be asking.
bool exchange(const std::vector<Object*>& family) {
    std::vector<void*> before;
    for (const Object* object : family)
        before.push_back(object->slot->driver);
    CUresult result = CUDA_SUCCESS;
    for (Object* object : family) {
        void* driver = nullptr;
        result = object->make ? object->make(&driver) : CUDA_ERROR_NOT_SUPPORTED;
        if (result != CUDA_SUCCESS)
            break;
        object->slot->driver = driver;
        for (const auto& [key, again] : object->state)
            if (result == CUDA_SUCCESS)
                result = again();
    }
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (size_t i = 0; i < family.size(); i++) {
        Object* object = family[i];
        if (result != CUDA_SUCCESS) {
            object->slot->driver = before[i];
            continue;
        }
        auto& index = r.index_of(object->kind);
        index.erase(before[i]);
        index[object->slot->driver] = object;
        if (object->kind == Kind::function) {
            r.ended_functions.insert(before[i]);
            r.ended_functions.erase(object->slot->driver);
        }
        for (auto it = r.kernel_functions.begin(); it != r.kernel_functions.end();)
            it = it->second == object->serial ? r.kernel_functions.erase(it) : std::next(it);
    }
    if (result == CUDA_SUCCESS && !family[0]->code->replaced)
        family[0]->code->replaced = before[0];
    return result == CUDA_SUCCESS;
}

// What may know where the driver's variables are.
bool may_be_known(const std::vector<Object*>& family) {
    const auto is_known = [](const Variable& variable) {
        return variable.asked || !variable.aliases.empty() || !variable.stand_ins.empty();
    };
    const auto launched = [](const Object* one) { return one->slot->launched(); };
    const auto& variables = family[0]->variables;
    return std::any_of(family.begin(), family.end(), launched) ||
           std::any_of(variables.begin(), variables.end(), is_known) ||
           std::any_of(std::begin(unsaved_calls), std::end(unsaved_calls),
                       [](const auto& calls) { return calls.load() != 0; });
}

} // namespace

void Code::forget_places() {
    for (const auto& [name, place] : places)
        address_map().remove(place, only(MemoryKind::variable));
    places.clear();
}

std::mutex& code_mutex() {
    static auto* made = new std::mutex;
    return *made;
}

Object& root_of(Object& object) {
    Object* root = &object;
    while (root->parent)
        root = root->parent;
    return *root;
}

bool Code::link_for_this_gpu() try {
    if (!LoadedImages().have(image))
        return false;
    const MovableCubin cubin(cubin_of(*this));
    const CUdeviceptr base = block + kLead;
    const auto is_there = [&](const MovableCubin::Place& place) {
        const auto known = places.find(place.name);
        return known != places.end() && known->second == base + place.offset;
    };
    if (!cubin.why().empty() || cubin.places().size() != places.size() ||
        !std::all_of(cubin.places().begin(), cubin.places().end(), is_there))
        return false;
    moved = cubin.cubin_at(base);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

CUresult Code::again(void** made) {
    const CUresult result = load(made, block ? moved.data() : image.data);
    if (result != CUDA_ERROR_NO_BINARY_FOR_GPU || !block || !link_for_this_gpu())
        return result;
    return load(made, moved.data());
}

// The program's own code may be asked after it has run, so it is moved at once. Libraries have many
// variables that nobody ever asks for.
void* load_moved(Code& code, Kind kind, void* made) {
    const bool own = kind == Kind::module || (code.image.of_program() && has_one_context());
    if (!own || code.image.by_address_alone ||
        code.image.variables.size() == code.image.constants.size() ||
        !object_of(current_context()) || task().captures.load())
        return made;
    Relaxed relaxed;
    void* moved = nullptr;
    if (!make_block(code))
        return made;
    if (code.again(&moved) != CUDA_SUCCESS) {
        give_up_block(code);
        return made;
    }
    unload(kind, made);
    return moved;
}

bool move_variables(const void* handle) try {
    const std::vector<Object*> family = family_of(handle);
    const std::shared_ptr<Code> code = family.empty() ? nullptr : family[0]->code;
    if (!code || code->tried || family[0]->kind != Kind::library || code->image.by_address_alone ||
        !has_one_context() || task().captures.load())
        return false;
    Relaxed relaxed;
    if (may_be_known(family) || !make_block(*code))
        return false;
    const bool moved = exchange(family);
    if (!moved)
        give_up_block(*code);
    return moved;
} catch (const std::bad_alloc&) { // before anything was changed
    return false;
}

CodeLock::CodeLock(const void* handle) : lock_(code_mutex(), std::defer_lock) {
    bool of_library = false;
    with_object(handle, [&](Object& object) {
        of_library = root_of(object).kind == Kind::library && root_of(object).code;
    });
    if (!of_library)
        return;
    lock_.lock();
    bool stale = false;
    with_object(handle, [&](Object& object) { stale = root_of(object).code->stale; });
    if (!stale)
        return;
    const std::vector<Object*> family = family_of(handle);
    Relaxed relaxed;
    exchange(family);
    family[0]->code->stale = false;
}

void forget_blocks_in(const Object* context) {
    for (const auto& [serial, object] : registry().objects) {
        Object& root = root_of(*object);
        if (root.kind != Kind::library || !root.code)
            continue;
        if (root.code->block && root.code->context == context) {
            leave_block(*root.code);
            root.code->stale = true;
        }
        if (root.code->stale) { // its next launch or change moves it back
            object->slot->set_launched(false);
            object->last_set.store(0, std::memory_order_relaxed);
        }
    }
}

FG_QUIET(flowgpu_replay_launched, flowgpu_replay_note_launch);

extern "C" Slot* flowgpu_replay_note_launch(Slot* slot) {
    CodeLock lock(slot);
    with_object(slot, [](Object& object) {
        object.marked.store(true);
        object.slot->set_launched(true);
        if (const Code* code = root_of(object).code.get(); code && code->image.heap)
            registry().heap_used = true;
    });
    return slot;
}

} // namespace flowgpu::replay
