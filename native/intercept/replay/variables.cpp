#include "variables.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>

#include "code.h"
#include "current.h"
#include "helpers.h"
#include "registry.h"

namespace flowgpu::replay::variables {

namespace {

constexpr size_t kStagingBytes = size_t{4} << 20;

uint64_t word_at(const std::vector<char>& bytes, uint64_t at) {
    uint64_t word;
    memcpy(&word, &bytes[at], sizeof word);
    return word;
}

CUresult locate(const Object& module, const std::string& name, CUdeviceptr* address,
                size_t* bytes) {
    return variable_of(module.kind, module.driver<void*>(), name, address, bytes);
}

// Addresses of functions in the driver's last life, and what they are in this one: what variables
// in memory of the program's have is exchanged once that is back. Helpers add to it at once.
std::mutex new_code_mutex;
std::map<uint64_t, uint64_t>& new_code() {
    static auto* one = new std::map<uint64_t, uint64_t>; // calls come while static objects end
    return *one;
}

// Offsets in a variable that is memory of the program's; null: it is the driver's, or has none.
const std::vector<uint64_t>* moved_code(const Object& module, const Variable& variable) {
    if (!module.code)
        return nullptr;
    const auto& all = module.code->plain.code_addresses;
    const auto found = all.find(variable.name);
    return found == all.end() ? nullptr : &found->second;
}

// Where variables may have changed: a library is loaded into a context when something of it is
// first used there, and asking would load it.
struct Used {
    std::set<const Object*> libraries;
    std::vector<Object*> contexts;

    Used() {
        for (const auto& [serial, object] : registry().objects) {
            if (object->marked.load())
                libraries.insert(&root_of(*object));
            if (object->kind == Kind::context && object->active)
                contexts.push_back(object.get());
        }
    }

    std::vector<Object*> contexts_of(Object& module) const {
        if (module.kind == Kind::module)
            return {module.context};
        return libraries.count(&module) ? contexts : std::vector<Object*>();
    }
};

// No kernel writes a constant, and the program cannot without its address.
bool is_as_loaded(const Object& module, const Variable& variable) {
    return module.code && module.code->is_constant(variable.name) && !variable.asked &&
           variable.aliases.empty();
}

// Copies from the GPU, many at a time: it may be the ghost's meanwhile, whose kernels leave it to
// others once a millisecond, and then each wait for it takes one.
class Reads {
  public:
    Reads() = default;
    ~Reads() { finish(); }
    Reads(const Reads&) = delete;
    Reads& operator=(const Reads&) = delete;

    CUresult add(const Object* context, CUdeviceptr from, std::vector<char>* to) {
        const size_t bytes = to->size();
        CUresult result = CUDA_SUCCESS;
        if (context_ != context)
            result = begin(context);
        else if (taken_ + bytes > kStagingBytes)
            result = wait();
        if (result != CUDA_SUCCESS || !bytes)
            return result;
        if (!staging_ || bytes > kStagingBytes)
            return FG_DRIVER(cuMemcpyDtoH_v2)(to->data(), from, bytes);
        result = FG_DRIVER(cuMemcpyDtoHAsync_v2)(staging_ + taken_, from, bytes, CU_STREAM_LEGACY);
        if (result == CUDA_SUCCESS) {
            under_way_.push_back({to->data(), taken_, bytes});
            taken_ += bytes;
        }
        return result;
    }

    CUresult finish() {
        CUresult result = use(context_);
        if (result == CUDA_SUCCESS)
            result = wait();
        if (staging_)
            FG_DRIVER(cuMemFreeHost)(staging_);
        staging_ = nullptr;
        context_ = nullptr;
        return result;
    }

  private:
    struct Row {
        char* to;
        size_t at, bytes;
    };

    CUresult begin(const Object* context) {
        CUresult result = finish();
        if (result == CUDA_SUCCESS)
            result = use(context);
        void* memory = nullptr;
        if (result == CUDA_SUCCESS &&
            FG_DRIVER(cuMemHostAlloc)(&memory, kStagingBytes, 0) == CUDA_SUCCESS)
            staging_ = static_cast<char*>(memory);
        context_ = context;
        return result;
    }

    // Its context is current.
    CUresult wait() {
        const CUresult result =
            taken_ ? FG_DRIVER(cuStreamSynchronize)(CU_STREAM_LEGACY) : CUDA_SUCCESS;
        for (const Row& row : under_way_)
            memcpy(row.to, staging_ + row.at, row.bytes);
        under_way_.clear();
        taken_ = 0;
        return result;
    }

    const Object* context_ = nullptr;
    char* staging_ = nullptr; // null: the system has no memory for it
    size_t taken_ = 0;
    std::vector<Row> under_way_;
};

bool keep_module(Object& module, const Used& used, Reads& reads, FirstFailure& fail) {
    if (module.variables.empty())
        return true;
    const bool any_addresses =
        std::any_of(module.variables.begin(), module.variables.end(),
                    [](const Variable& variable) { return !variable.addresses.empty(); });
    for (Object* context : used.contexts_of(module)) {
        CUresult result = use(context);
        for (Variable& variable : module.variables) {
            CUdeviceptr address = 0;
            size_t bytes = 0;
            const bool as_loaded = is_as_loaded(module, variable);
            if (module.code && module.code->place_of(variable.name) &&
                !moved_code(module, variable))
                continue; // memory of the program's
            if (as_loaded && !any_addresses)
                continue;
            if (result == CUDA_SUCCESS)
                result = locate(module, variable.name, &address, &bytes);
            if (result == CUDA_ERROR_NOT_FOUND) { // the compiler left it out
                result = CUDA_SUCCESS;
                continue;
            }
            variable.instances.push_back(
                {context, address, bytes, std::vector<char>(as_loaded ? 0 : bytes)});
            if (result == CUDA_SUCCESS)
                result = reads.add(context, address, &variable.instances.back().bytes);
            if (result != CUDA_SUCCESS)
                return fail("reading variable " + variable.name, result);
        }
    }
    return true;
}

bool keep_all(FirstFailure& fail) {
    const Used used;
    Reads reads;
    for (const auto& [serial, object] : registry().objects)
        if (!keep_module(*object, used, reads, fail))
            return false;
    const CUresult result = reads.finish();
    return result == CUDA_SUCCESS || fail("reading variables", result);
}

// Where a module's variable was in a context, and is now.
struct Exchange {
    const Object* context;
    CUdeviceptr before;
    size_t bytes;
    CUdeviceptr now;
};

// Writes what was kept. Addresses of variables become the present ones; addresses of functions are
// left as the driver has just written them, since the kept ones are of its last life.
CUresult write_value(const Variable& variable, const Variable::Instance& kept,
                     const std::vector<Exchange>& all, CUdeviceptr address) {
    std::vector<char> bytes = kept.bytes;
    CUresult result = CUDA_SUCCESS;
    size_t from = 0;
    auto write_until = [&](size_t end) {
        if (result == CUDA_SUCCESS && from < end)
            result = FG_DRIVER(cuMemcpyHtoD_v2)(address + from, bytes.data() + from, end - from);
    };
    for (const Variable::Address& one : variable.addresses) {
        if (one.offset + sizeof(uint64_t) > bytes.size())
            break; // it is in code for another GPU
        if (one.code) {
            write_until(one.offset);
            from = one.offset + sizeof(uint64_t);
            continue;
        }
        uint64_t word = word_at(bytes, one.offset);
        for (const Exchange& other : all)
            if (other.context == kept.context && word - other.before < other.bytes) {
                word += other.now - other.before;
                break;
            }
        memcpy(&bytes[one.offset], &word, sizeof word);
    }
    write_until(bytes.size());
    return result;
}

// The driver's own copy of a variable has its functions' addresses of before, and has them anew.
CUresult note_code(const std::vector<uint64_t>& offsets, const std::vector<char>& kept,
                   CUdeviceptr address) {
    std::vector<char> loaded(kept.size());
    const CUresult result = FG_DRIVER(cuMemcpyDtoH_v2)(loaded.data(), address, loaded.size());
    std::lock_guard<std::mutex> lock(new_code_mutex);
    for (const uint64_t at : offsets)
        if (result == CUDA_SUCCESS && at + sizeof(uint64_t) <= kept.size())
            new_code()[word_at(kept, at)] = word_at(loaded, at);
    return result;
}

// What the program has there may be another function than the variable began with.
CUresult renew_code(CUdeviceptr place) {
    uint64_t word = 0;
    CUresult result = FG_DRIVER(cuMemcpyDtoH_v2)(&word, place, sizeof word);
    const auto found = new_code().find(word);
    if (result == CUDA_SUCCESS && found != new_code().end() && found->second != word)
        result = FG_DRIVER(cuMemcpyHtoD_v2)(place, &found->second, sizeof word);
    return result;
}

bool write_module(Object& module, FirstFailure& fail) {
    std::vector<Exchange> all;
    for (const Variable& variable : module.variables) {
        for (const Variable::Instance& kept : variable.instances) {
            CUdeviceptr address = 0;
            size_t bytes = 0;
            CUresult result = use(kept.context);
            if (result == CUDA_SUCCESS)
                result = locate(module, variable.name, &address, &bytes);
            if (result != CUDA_SUCCESS)
                return fail("finding variable " + variable.name, result);
            if (bytes != kept.size)
                return fail("variable " + variable.name + " has another size now");
            all.push_back({kept.context, kept.address, bytes, address});
        }
    }
    auto one = all.begin();
    for (const Variable& variable : module.variables) {
        const std::vector<uint64_t>* moved = moved_code(module, variable);
        for (const Variable::Instance& kept : variable.instances) {
            const CUdeviceptr address = (one++)->now;
            if (kept.bytes.empty())
                continue;
            CUresult result = use(kept.context);
            if (result == CUDA_SUCCESS)
                result = moved ? note_code(*moved, kept.bytes, address)
                               : write_value(variable, kept, all, address);
            if (result != CUDA_SUCCESS)
                return fail("writing variable " + variable.name, result);
        }
    }
    return true;
}

// Where the driver has put the constants that the program has addresses of.
bool find_aliases(Object& module, FirstFailure& fail) {
    for (Variable& variable : module.variables) {
        for (Alias& alias : variable.aliases) {
            CUresult result = use(alias.context);
            size_t bytes = 0;
            if (result == CUDA_SUCCESS)
                result = locate(module, variable.name, &alias.driver, &bytes);
            if (result == CUDA_SUCCESS && bytes != alias.bytes)
                return fail("constant " + variable.name + " has another size now");
            if (result != CUDA_SUCCESS)
                return fail("finding constant " + variable.name, result);
        }
    }
    return true;
}

} // namespace

bool keep(FirstFailure& fail) {
    const bool kept = keep_all(fail);
    if (!kept)
        forget();
    return kept;
}

void forget() {
    for (const auto& [serial, object] : registry().objects)
        for (Variable& variable : object->variables)
            variable.instances.clear();
}

bool write(FirstFailure& fail) {
    std::vector<Object*> modules;
    for (const auto& [serial, object] : registry().objects)
        if (!object->variables.empty())
            modules.push_back(object.get());
    std::atomic<bool> written{true};
    // The first question about a library loads it into the context, which is what takes long.
    Helpers helpers(modules.size(), [&](size_t number) {
        try {
            if (!write_module(*modules[number], fail) || !find_aliases(*modules[number], fail))
                written.store(false);
        } catch (const std::bad_alloc&) {
            written.store(fail("out of memory"));
        }
    });
    helpers.wait_for_all();
    return written.load();
}

bool finish(FirstFailure& fail) {
    if (new_code().empty())
        return true;
    for (const auto& [serial, object] : registry().objects) {
        if (!object->code || object->parent)
            continue;
        const Block& block = object->code->plain;
        CUresult result = block.code_addresses.empty() ? CUDA_SUCCESS : use(block.context);
        for (const auto& [name, offsets] : block.code_addresses)
            for (const uint64_t at : offsets)
                if (result == CUDA_SUCCESS)
                    result = renew_code(block.places.at(name) + at);
        FG_DRIVER(cuCtxSetCurrent)(nullptr);
        if (result != CUDA_SUCCESS)
            return fail("writing addresses of functions", result);
    }
    new_code().clear();
    return true;
}

} // namespace flowgpu::replay::variables
