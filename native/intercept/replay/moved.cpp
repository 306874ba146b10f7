// Variables of modules in memory of the program's.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "code.h"
#include "handlers.h"
#include "managed.h"
#include "movable.h"
#include "registry.h"
#include "task.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

// The driver's variables stay beside ours. Managed ones take no memory there, as nobody uses them.
constexpr uint64_t kMostPlain = uint64_t{64} << 20;
constexpr uint64_t kFresh = uint64_t{16} << 20; // such managed memory is its own tract, all zeros
// Before the first variable: nobody can free it by its address. As variables are aligned at most.
constexpr uint64_t kLead = 512;

using Which = MovableCubin::Which;
constexpr Which kBoth[] = {Which::plain, Which::managed};

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

// Has `begin` put work into a stream of its own, which waits for no other and for which none waits,
// and waits for that.
template <class Begin> bool in_own_stream(Begin begin) {
    CUstream stream = nullptr;
    if (FG_DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    const CUresult result = begin(stream);
    const bool done =
        FG_DRIVER(cuStreamSynchronize)(stream) == CUDA_SUCCESS && result == CUDA_SUCCESS;
    FG_DRIVER(cuStreamDestroy_v2)(stream);
    return done;
}

bool fill(CUdeviceptr block, uint64_t zeros, const std::vector<MovableCubin::Value>& values) {
    return in_own_stream([&](CUstream stream) {
        CUresult result =
            zeros ? FG_DRIVER(cuMemsetD8Async)(block, 0, zeros, stream) : CUDA_SUCCESS;
        for (const MovableCubin::Value& value : values)
            if (result == CUDA_SUCCESS)
                result = FG_DRIVER(cuMemcpyHtoDAsync_v2)(block + value.offset, value.bytes.data(),
                                                         value.bytes.size(), stream);
        return result;
    });
}

// Copies the addresses of functions from the driver's variables to ours.
bool copy_code_addresses(const Code& code, Kind kind, void* driver) {
    if (code.plain.code_addresses.empty())
        return true;
    return in_own_stream([&](CUstream stream) {
        CUresult result = CUDA_SUCCESS;
        for (const auto& [name, offsets] : code.plain.code_addresses) {
            CUdeviceptr from = 0;
            size_t bytes = 0;
            if (result == CUDA_SUCCESS)
                result = variable_of(kind, driver, name, &from, &bytes);
            for (const uint64_t at : offsets)
                if (result == CUDA_SUCCESS)
                    result = FG_DRIVER(cuMemcpyDtoDAsync_v2)(code.place_of(name) + at, from + at,
                                                             sizeof(uint64_t), stream);
        }
        return result;
    });
}

CUresult allocate(const Code& code, Which which, CUdeviceptr* block, size_t bytes) {
    return which == Which::plain ? handle::cuMemAlloc_v2(block, bytes)
                                 : handle::allocate_managed(block, bytes, code.of_library);
}

// Makes the code for variables of a kind in a block of the current context; `code.moved` has led
// the others elsewhere. False: they stay where they are.
bool make_block(Code& code, Which which) {
    Block& block = code.block_of(which);
    if (std::exchange(block.tried, true))
        return false;
    const MovableCubin cubin(code.moved.empty() ? cubin_of(code) : code.moved, which);
    const bool plain = which == Which::plain;
    if (!cubin.why().empty() || (plain && cubin.bytes() > kMostPlain))
        return false;
    block.complete = cubin.places().empty();
    if (block.complete || !cubin.bytes())
        return false;
    CUdeviceptr start = 0;
    if (allocate(code, which, &start, kLead + cubin.bytes()) != CUDA_SUCCESS)
        return false;
    const CUdeviceptr base = start + kLead;
    try {
        const uint64_t zeros = plain || cubin.bytes() < kFresh ? cubin.bytes() : 0;
        if (fill(base, zeros, cubin.values_at(base))) {
            std::string moved = cubin.cubin_at(base);
            for (const MovableCubin::Place& place : cubin.places()) {
                block.places[place.name] = base + place.offset;
                address_map().put(Region{base + place.offset, place.bytes, MemoryKind::variable});
            }
            for (const AddressField& one : cubin.code_addresses())
                block.code_addresses[one.variable].push_back(one.offset);
            block.context = object_of(current_context());
            block.start = start;
            block.complete = true;
            code.moved = std::move(moved);
            return true;
        }
    } catch (const std::bad_alloc&) {
    }
    block.leave();
    handle::cuMemFree_v2(start);
    return false;
}

// Blocks for what is not moved yet.
class NewBlocks {
  public:
    NewBlocks(Code& code, bool plain, bool managed) : code_(code), before_(code.moved) {
        try {
            made_[0] = plain && make_block(code, Which::plain);
            made_[1] = managed && make_block(code, Which::managed);
        } catch (const std::bad_alloc&) {
        }
    }
    bool any() const { return made_[0] || made_[1]; }
    void give_up() {
        for (size_t i = 0; i < 2; i++)
            if (made_[i]) {
                const CUdeviceptr start = code_.block_of(kBoth[i]).start;
                code_.block_of(kBoth[i]).leave();
                handle::cuMemFree_v2(start);
            }
        code_.moved = std::move(before_);
    }

  private:
    Code& code_;
    std::string before_;
    bool made_[2] = {};
};

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

// Work of this thread's can be done in a context that is known, and copies break no capture.
bool can_move() {
    return object_of(current_context()) && !task().captures.load();
}

// The program's own code may be asked after it has run, so its variables are moved before that.
// Libraries have many variables that nobody ever asks for, but for managed ones, of which each has
// one place for all contexts.
bool is_own(const Code& code) {
    return !code.of_library || (code.image.of_program() && has_one_context());
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

// Moves the managed variables of a library, and the plain ones if that is asked, with all that the
// program has of the library. False: nothing happened.
bool move(const std::vector<Object*>& family, bool plain) try {
    Code& code = *family[0]->code;
    plain = plain && !code.plain.tried;
    const bool managed = !code.managed.tried && code.image.managed;
    Relaxed relaxed;
    if (!(plain || managed) || may_be_known(family))
        return false;
    NewBlocks blocks(code, plain, managed);
    if (!blocks.any())
        return false;
    const bool exchanged = exchange(family);
    const bool moved =
        exchanged && copy_code_addresses(code, Kind::library, family[0]->slot->driver);
    if (!moved)
        blocks.give_up();
    if (exchanged && !moved)
        exchange(family);
    return moved;
} catch (const std::bad_alloc&) { // before anything was changed
    return false;
}

} // namespace

void Block::leave() {
    for (const auto& [name, place] : places)
        address_map().remove(place, only(MemoryKind::variable));
    places.clear();
    code_addresses.clear();
    start = 0;
    context = nullptr;
    complete = false;
}

CUresult variable_of(Kind kind, void* driver, const std::string& name, CUdeviceptr* address,
                     size_t* bytes) {
    return kind == Kind::module
               ? FG_DRIVER(cuModuleGetGlobal_v2)(address, bytes, static_cast<CUmodule>(driver),
                                                 name.c_str())
               : FG_DRIVER(cuLibraryGetGlobal)(address, bytes, static_cast<CUlibrary>(driver),
                                               name.c_str());
}

CUdeviceptr Code::place_of(const std::string& name) const {
    for (const Block* block : {&plain, &managed})
        if (const auto known = block->places.find(name); known != block->places.end())
            return known->second;
    return 0;
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
    std::string code = cubin_of(*this);
    for (const Which which : kBoth) {
        const Block& block = block_of(which);
        if (!block.start)
            continue;
        const MovableCubin cubin(code, which);
        const CUdeviceptr base = block.start + kLead;
        const auto is_there = [&](const MovableCubin::Place& place) {
            const auto known = block.places.find(place.name);
            return known != block.places.end() && known->second == base + place.offset;
        };
        if (!cubin.why().empty() || cubin.places().size() != block.places.size() ||
            !std::all_of(cubin.places().begin(), cubin.places().end(), is_there))
            return false;
        code = cubin.cubin_at(base);
    }
    moved = code;
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

CUresult Code::again(void** made) {
    const CUresult result = load(made, moved.empty() ? image.data : moved.data());
    if (result != CUDA_ERROR_NO_BINARY_FOR_GPU || moved.empty() || !link_for_this_gpu())
        return result;
    return load(made, moved.data());
}

void* load_moved(Code& code, Kind kind, void* made) {
    if (code.image.by_address_alone || code.image.variables.size() == code.image.constants.size())
        return made;
    const bool possible = can_move();
    code.due = code.of_library && (code.image.managed || code.image.of_program()) && !possible;
    const bool own = is_own(code);
    if ((!own && !code.image.managed) || !possible)
        return made;
    Relaxed relaxed;
    void* moved = nullptr;
    NewBlocks blocks(code, own, code.image.managed);
    if (!blocks.any())
        return made;
    const bool again = code.again(&moved) == CUDA_SUCCESS;
    if (!again || !copy_code_addresses(code, kind, moved)) {
        if (again)
            unload(kind, moved);
        blocks.give_up();
        return made;
    }
    unload(kind, made);
    return moved;
}

bool move_variables(const void* handle) {
    const std::vector<Object*> family = family_of(handle);
    const std::shared_ptr<Code> code = family.empty() ? nullptr : family[0]->code;
    return code && family[0]->kind == Kind::library && !code->image.by_address_alone &&
           can_move() && move(family, has_one_context());
}

CodeLock::CodeLock(const void* handle) : lock_(code_mutex(), std::defer_lock) {
    bool of_library = false;
    with_object(handle, [&](Object& object) {
        of_library = root_of(object).kind == Kind::library && root_of(object).code;
    });
    if (!of_library)
        return;
    lock_.lock();
    bool changes = false;
    with_object(handle, [&](Object& object) {
        const Code& code = *root_of(object).code;
        changes = code.stale || (code.due && can_move());
    });
    if (!changes)
        return;
    const std::vector<Object*> family = family_of(handle);
    Code& code = *family[0]->code;
    Relaxed relaxed;
    if (code.stale) {
        if (code.managed.start &&
            (!managed::take_in(code.managed.start) || !code.link_for_this_gpu()))
            return; // until the next time
        exchange(family);
        if (code.managed.start)
            code.managed.context = object_of(current_context());
        code.stale = false;
    }
    if (code.due && can_move()) {
        code.due = false;
        move(family, is_own(code));
    }
}

bool awaits_context(const void* library) {
    bool awaits = false;
    with_object(library, [&](Object& object) {
        const Code* code = object.code.get();
        awaits = code && code->due && code->image.managed && !code->managed.tried;
    });
    return awaits && !task().captures.load();
}

void forget_blocks_in(const Object* context) {
    for (const auto& [serial, object] : registry().objects) {
        Object& root = root_of(*object);
        if (root.kind != Kind::library || !root.code)
            continue;
        Code& code = *root.code;
        if (code.plain.start && code.plain.context == context) {
            code.plain.leave();
            code.plain.tried = false;
            code.due = code.image.of_program();
            code.stale = true;
        }
        if (code.managed.start && code.managed.context == context) {
            code.managed.context = nullptr; // but the memory lasts
            code.stale = true;
        }
        if (!code.plain.start && !code.managed.start)
            code.moved.clear();
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
