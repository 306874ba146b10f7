#include "registry.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include <dlfcn.h>
#include <sys/mman.h>

#include "aliases.h"
#include "code.h"
#include "gate.h"
#include "graphs.h"
#include "living.h"
#include "rewind.h"
#include "threads.h"

namespace flowgpu::replay {

Registry& registry() {
    static auto* made = new Registry();
    return *made;
}

namespace {

bool is_asked_for = false;
bool is_prepared = false;
bool compilation_is_forced = false;
char tried[16]; // what `run --untried` names
char reason[128] = "the job was started with --engine native";

constexpr const char* kUnrecorded = "made by a call that is not recorded";

using Lock = std::lock_guard<std::mutex>;

void forget(Object* one) {
    Registry& r = registry();
    auto& index = r.index_of(one->kind);
    auto found = index.find(one->slot->driver);
    if (found != index.end() && found->second == one)
        index.erase(found);
    if (one->kind == Kind::function)
        r.ended_functions.insert(one->slot->driver);
    if (one->graph && one->parent)
        one->parent->graph->parts.erase(one);
    const bool had_aliases =
        std::any_of(one->variables.begin(), one->variables.end(),
                    [](const Variable& variable) { return !variable.aliases.empty(); });
    free_slot(one->slot);
    r.objects.erase(one->serial);
    if (had_aliases)
        renew_aliases();
}

// The memory itself ends with the context, as any of the program's.
void forget_stand_ins_in(const Object* context) {
    for (const auto& [serial, object] : registry().objects)
        for (Variable& variable : object->variables) {
            auto& stand_ins = variable.stand_ins;
            const auto is_of = [&](const auto& one) { return one.first == context; };
            stand_ins.erase(std::remove_if(stand_ins.begin(), stand_ins.end(), is_of),
                            stand_ins.end());
            auto& known = variable.aliases;
            const auto lies_in = [&](const Alias& one) { return one.context == context; };
            known.erase(std::remove_if(known.begin(), known.end(), lies_in), known.end());
        }
    renew_aliases();
}

void forget_host_of(const Object* context) {
    auto& host = registry().host;
    for (auto it = host.begin(); it != host.end();) {
        const bool gone = it->second.context == context;
        if (gone && it->second.ours)
            munmap(it->first, it->second.bytes);
        it = gone ? host.erase(it) : std::next(it);
    }
}

// Nodes of a graph, and the graph in a node.
void forget_parts(Object* object) {
    for (Object* part : std::exchange(object->graph->parts, {})) {
        forget_parts(part);
        forget(part);
    }
}

// A context ends. What nobody knows the context of ends with the last one.
void end_of_context(const Object* context) {
    Registry& r = registry();
    flowgpu_page.contexts.fetch_add(1);
    for (const auto& [serial, object] : r.objects)
        if (context->primary < 0) // another may get its handle
            object->state.erase({I_cuCtxEnablePeerAccess, number_of(context->slot)});
    forget_host_of(context);
    forget_stand_ins_in(context);
    forget_blocks_in(context);
    textures::end_in(context);
    const bool last = std::none_of(r.objects.begin(), r.objects.end(), [&](const auto& row) {
        const Object* one = row.second.get();
        return one != context && one->kind == Kind::context && one->active;
    });
    if (last)
        r.heap_used = false;
}

// Forgets what ends with an object.
void end_dependents(Object* object) {
    if (object->graph)
        return forget_parts(object);
    // They come and go often, and nothing is part of them but of an array that cannot be made
    // again.
    if (object->kind == Kind::stream || object->kind == Kind::event ||
        (object->kind == Kind::array && object->make))
        return;
    std::vector<const Object*> ended = {object};
    std::vector<Object*> dependents;
    const auto has_ended = [&](const Object* one) {
        return one && std::find(ended.begin(), ended.end(), one) != ended.end();
    };
    // All of it was made later.
    auto& objects = registry().objects;
    for (auto it = objects.upper_bound(object->serial); it != objects.end(); ++it) {
        Object* other = it->second.get();
        if (has_ended(other->parent) || has_ended(other->context)) {
            ended.push_back(other);
            dependents.push_back(other);
        }
    }
    for (Object* one : dependents)
        forget(one);
    if (object->kind == Kind::context)
        end_of_context(object);
}

// True if a node has the address of a constant, which the driver's next life may put elsewhere.
bool has_alias(const GraphPlan& plan) {
    return std::any_of(plan.nodes.begin(), plan.nodes.end(), [](const NodePlan& node) {
        bool found = is_aliased(node.copy.srcDevice) || is_aliased(node.copy.dstDevice) ||
                     is_aliased(node.fill.dst) || (node.child && has_alias(*node.child));
        for (size_t at = 0; at + sizeof(CUdeviceptr) <= node.arguments.size();
             at += sizeof(CUdeviceptr)) {
            CUdeviceptr value = 0;
            memcpy(&value, node.arguments.data() + at, sizeof value);
            found = found || is_aliased(value);
        }
        return found;
    });
}

std::string joined(const std::set<std::string>& words, const char* by) {
    std::string text;
    for (const std::string& word : words)
        text += (text.empty() ? "" : by) + word;
    return text;
}

} // namespace

bool asked_for() {
    return is_asked_for;
}

bool prepare(void* driver) {
    const char* asked = getenv("FLOWGPU_REPLAY");
    is_asked_for = asked && strcmp(asked, "1") == 0;
    if (!is_asked_for)
        return false;
    const void* symbol = dlsym(driver, "cuInit");
    const bool rewinds =
        rewind::remember(symbol, {gate::enter, gate::leave}, reason, sizeof reason);
    is_prepared = rewinds && make_slots();
    if (rewinds && !is_prepared)
        snprintf(reason, sizeof reason, "the addresses of handles are taken");
    return is_prepared;
}

void keep_environment() {
    if (const char* untried = getenv("FLOWGPU_UNTRIED"))
        snprintf(tried, sizeof tried, "%s", untried);
    compilation_is_forced = getenv("CUDA_FORCE_PTX_JIT") || getenv("CUDA_FORCE_JIT");
    if (is_prepared)
        rewind::keep_environment();
}

bool forces_compilation() {
    return compilation_is_forced;
}

bool tries(const char* what) {
    return strcmp(tried, what) == 0;
}

bool prepared() {
    return is_prepared;
}

const char* why_not() {
    return reason;
}

void* note(Kind kind, void* driver, bool fresh, const Fill& fill) {
    if (!driver)
        return nullptr;
    Registry& r = registry();
    auto& index = r.index_of(kind);
    const auto known = [&]() -> Object* {
        auto found = fresh ? index.end() : index.find(driver);
        return found == index.end() ? nullptr : found->second;
    };
    {
        Lock lock(r.mutex);
        if (const Object* object = known())
            return object->slot;
    }
    auto made = std::make_unique<Object>();
    Lock lock(r.mutex);
    if (const Object* object = known()) // another thread was quicker
        return object->slot;
    Object* object = made.get();
    object->kind = kind;
    object->serial = ++r.last_serial;
    object->context = object_of(current_context());
    object->slot = take_slot(driver, object);
    if (!object->slot)
        return driver;
    fill(*object);
    index[driver] = object;
    if (kind == Kind::function)
        r.ended_functions.erase(driver);
    r.objects.emplace(object->serial, std::move(made));
    return object->slot;
}

void* to_program(Kind kind, void* driver) {
    // The special streams are their own handles.
    if (reinterpret_cast<uintptr_t>(driver) < 16)
        return driver;
    return note(kind, driver, false, [](Object& object) {
        object.context = nullptr;
        object.why = kUnrecorded;
    });
}

void end(const void* handle) {
    Lock lock(registry().mutex);
    if (Object* object = object_of(handle)) {
        end_dependents(object);
        forget(object);
    }
}

void end_of_primary(CUdevice device, bool one_use, bool active) {
    Lock lock(registry().mutex);
    for (const auto& [serial, object] : registry().objects) {
        if (object->primary != device)
            continue;
        if (one_use && object->uses)
            object->uses--;
        object->active = active;
        if (!active) {
            end_dependents(object.get());
            object->state.clear();
        }
        return;
    }
}

void set(const void* handle, unsigned symbol, uint64_t what, Set again) {
    Lock lock(registry().mutex);
    Object* object = object_of(handle);
    if (!object)
        return;
    if (again)
        object->state[{symbol, what}] = std::move(again);
    else
        object->state.erase({symbol, what});
}

Object* object_of(const void* handle) {
    Slot* slot = slot_of(handle);
    return slot ? slot->object() : nullptr;
}

const Object* any_context() {
    for (const auto& [serial, object] : registry().objects)
        if (object->kind == Kind::context && object->active)
            return object.get();
    return nullptr;
}

void with_object(const void* handle, const std::function<void(Object&)>& work) {
    Lock lock(registry().mutex);
    if (Object* object = object_of(handle))
        work(*object);
}

void note_host(void* address, const HostMemory& place) {
    Lock lock(registry().mutex);
    HostMemory& noted = registry().host[address];
    noted = place;
    noted.context = object_of(current_context());
}

bool find_host(void* address, HostMemory* place, bool inside) {
    Lock lock(registry().mutex);
    auto& host = registry().host;
    auto found = host.upper_bound(address);
    if (found == host.begin())
        return false;
    --found;
    const size_t into = static_cast<char*>(address) - static_cast<char*>(found->first);
    if (into != 0 && (!inside || into >= found->second.bytes))
        return false;
    *place = found->second;
    return true;
}

bool take_host(void* address, HostMemory* place) {
    Lock lock(registry().mutex);
    auto found = registry().host.find(address);
    if (found == registry().host.end())
        return false;
    *place = found->second;
    registry().host.erase(found);
    return true;
}

void set_primary_flags(CUdevice device, unsigned flags) {
    Lock lock(registry().mutex);
    registry().primary_flags[device] = flags;
}

void lock() {
    registry().mutex.lock();
}

void unlock() {
    registry().mutex.unlock();
}

std::string unsaved(bool still) {
    if (still)
        read_graphs();
    Registry& r = registry();
    std::set<std::string> names;
    std::set<std::string> asked; // variables
    for (unsigned i = 0; i < kSymbols; i++)
        if (unsaved_calls[i].load(std::memory_order_relaxed))
            names.insert(symbol_names[i]);
    living::add_names(&names);
    const bool call_is_named = !names.empty();
    const LoadedImages loaded;
    Lock lock(r.mutex);
    if (r.heap_used)
        names.insert("the device's heap (malloc in a kernel)");
    textures::add_names(&names);
    for (const auto& [serial, object] : r.objects) {
        if (!object->make && call_is_named && object->why == kUnrecorded)
            continue;
        if (object->graph && (object->parent || (object->kind == Kind::graph && !still)))
            continue; // made with its graph; the graph may change until nobody can
        if (!object->make)
            names.insert(std::string("a ") + kind_names[static_cast<size_t>(object->kind)] + " " +
                         object->why);
        else if (object->graph && object->graph->plan && !complete(*object->graph->plan))
            names.insert(std::string("a ") + kind_names[static_cast<size_t>(object->kind)] +
                         " of which a kernel, an event or memory has ended");
        else if (object->code && object->code->moved.empty() && !loaded.have(object->code->image))
            names.insert(std::string("a ") + kind_names[static_cast<size_t>(object->kind)] +
                         " of which the code lay in a library that was unloaded");
        else if (object->kind == Kind::executable && !any_context())
            names.insert("a graph executable where every context has ended");
        // The driver puts them elsewhere the next time, or not.
        for (const Variable& variable : object->variables)
            if (variable.asked)
                asked.insert(variable.name);
        if (object->graph && object->graph->plan && has_alias(*object->graph->plan))
            names.insert("a graph with the address of a constant");
    }
    if (!asked.empty())
        names.insert("the addresses of module variables: " + joined(asked, " "));
    return joined(names, ", ");
}

// A library's are made when something of it is first used, or with it.
bool has_managed_variables(bool ours_too) {
    CUmoduleLoadingMode mode{};
    const bool at_once = prepared() && FG_DRIVER(cuModuleGetLoadingMode)(&mode) == CUDA_SUCCESS &&
                         mode == CU_MODULE_EAGER_LOADING;
    Registry& r = registry();
    Lock lock(r.mutex);
    return std::any_of(r.objects.begin(), r.objects.end(), [=](const auto& entry) {
        const Object& root = root_of(*entry.second);
        return root.code &&
               (root.code->drivers_managed() || (ours_too && root.code->managed.start)) &&
               (at_once || root.kind == Kind::module || entry.second->marked.load());
    });
}

} // namespace flowgpu::replay
