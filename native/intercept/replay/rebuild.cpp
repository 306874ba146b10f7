// Taking the driver's state away and making it again.
#include <algorithm>
#include <cstdio>
#include <map>
#include <new>
#include <set>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "aliases.h"
#include "code.h"
#include "current.h"
#include "engine.h"
#include "failure.h"
#include "graphs.h"
#include "helpers.h"
#include "nvml.h"
#include "pinned.h"
#include "registry.h"
#include "reservations.h"
#include "rewind.h"
#include "task.h"
#include "textures.h"
#include "threads.h"
#include "variables.h"

namespace flowgpu::replay {

namespace {

// Copies and memsets of a graph name the program's memory, which comes back later.
bool needs_memory(const Object& object) {
    return object.graph != nullptr;
}

bool finished = true; // they are all there again; the service thread's alone

// One of the two steps of making a context's texture and surface objects.
bool number(const Object* context, CUresult (*step)(const Object*), FirstFailure& fail) {
    registry().trouble.clear();
    CUresult result = use(context);
    if (result == CUDA_SUCCESS)
        result = step(context);
    return result == CUDA_SUCCESS ||
           fail("making a texture or surface object again: " + registry().trouble, result);
}

// In this life of the driver's.
bool is_made(const Object& object) {
    const auto& index = registry().index_of(object.kind);
    auto found = index.find(object.slot->driver);
    return found != index.end() && found->second == &object;
}

struct Made {
    void* driver;
    CUresult result;
};

Made make(const Object& object) try {
    Made made = {nullptr, CUDA_ERROR_NOT_SUPPORTED};
    if (object.make)
        made.result = object.make(&made.driver);
    return made;
} catch (const std::bad_alloc&) {
    return {nullptr, CUDA_ERROR_OUT_OF_MEMORY};
}

// Does in other threads what needs no context, while contexts are made: NVML comes back, and the
// driver loads libraries. It reads and unpacks a library's code then.
class Beside {
  public:
    Beside()
        : libraries_(to_load()), made_(libraries_.size()),
          helpers_(1 + libraries_.size(), [this](size_t piece) {
              if (!piece)
                  nvml::come_back(); // it needs no CUDA
              else
                  made_[piece - 1] = make(*libraries_[piece - 1]);
          }) {}

    Made take(const Object& object) {
        const auto found = object.kind == Kind::library
                               ? std::find(libraries_.begin(), libraries_.end(), &object)
                               : libraries_.end();
        if (found == libraries_.end())
            return make(object);
        const auto at = static_cast<size_t>(found - libraries_.begin());
        helpers_.wait_for(1 + at);
        return made_[at];
    }
    void finish() { helpers_.wait_for_all(); }

  private:
    static std::vector<const Object*> to_load() {
        std::vector<const Object*> found;
        for (const auto& [serial, object] : registry().objects)
            // Where loading took a texture's number in a new context, it would be none of ours.
            if (object->kind == Kind::library && object->code && object->code->moved.empty() &&
                registry().textures.empty())
                found.push_back(object.get());
        return found;
    }

    const std::vector<const Object*> libraries_;
    std::vector<Made> made_;
    Helpers helpers_;
};

// `result`: of making its context the current one.
bool make_again(Object& object, CUresult result, FirstFailure& fail, Beside* beside = nullptr) {
    const std::string what =
        std::string("making a ") + kind_names[static_cast<size_t>(object.kind)] + " again";
    std::string& trouble = registry().trouble;
    trouble.clear();
    Made made = {nullptr, result};
    if (result == CUDA_SUCCESS)
        made = beside ? beside->take(object) : make(object);
    if (made.result != CUDA_SUCCESS)
        return fail(trouble.empty() ? what : what + ": " + trouble, made.result);
    object.slot->driver = made.driver;
    registry().index_of(object.kind)[made.driver] = &object;
    if (object.code) {
        object.code->stale &= object.code->managed.start != 0; // its code still has to be led anew
        object.code->replaced = nullptr;
    }
    return true;
}

std::vector<pinned::Range> registered() {
    std::vector<pinned::Range> ranges;
    for (const auto& [address, place] : registry().host)
        ranges.push_back(pinned::range_of(address, place.bytes, place.ours ? 0 : place.flags));
    return ranges;
}

// `holes`: those that pages of ours are in until it is done.
bool register_host(pinned::Gaps& holes, FirstFailure& fail) {
    pinned::Gaps gaps(registered());
    for (const bool in_gaps : {false, true}) {
        if (in_gaps)
            gaps.open();
        for (auto& [address, place] : registry().host) {
            const pinned::Range range = pinned::range_of(address, place.bytes, 0);
            if (gaps.in(range) != in_gaps)
                continue;
            CUresult result = use(place.context);
            const bool usable = result == CUDA_SUCCESS;
            if (usable)
                result = register_memory(address, place);
            place.dead = usable && result != CUDA_SUCCESS && (in_gaps || holes.in(range));
            if (result != CUDA_SUCCESS && !place.dead)
                return fail("registering host memory again", result);
        }
    }
    gaps.close();
    holes.close();
    return true;
}

// A library or kernel belongs to no context, and takes any.
const Object* context_for(const Object& object) {
    if (object.kind == Kind::context || object.context)
        return object.kind == Kind::context ? &object : object.context;
    return any_context();
}

bool set_again(Object& object, FirstFailure& fail) {
    if (object.graph)
        return true;
    CUresult result = use(context_for(object));
    for (const auto& [key, again] : object.state) {
        if (result == CUDA_SUCCESS)
            result = again();
        if (result != CUDA_SUCCESS)
            return fail(std::string(symbol_names[key.first]) + " again", result);
    }
    // Whoever waits for it or asks finds it completed.
    if (result == CUDA_SUCCESS && object.kind == Kind::event && object.marked.load()) {
        result = FG_DRIVER(cuEventRecord)(object.driver<CUevent>(), nullptr);
        object.age.store(object.kept_age);
    }
    return result == CUDA_SUCCESS || fail("recording an event again", result);
}

bool name_is_taken = false;

bool make_all(FirstFailure& fail, Laps& laps) {
    Registry& r = registry();
    pinned::Gaps holes(registered());
    holes.fill();
    CUresult result = FG_DRIVER(cuInit)(0);
    name_is_taken = result == CUDA_ERROR_OPERATING_SYSTEM;
    if (result != CUDA_SUCCESS)
        return fail("cuInit", result);
    laps.add("cuInit");
    if (!change_tables())
        return fail("leading private tables to FlowGPU again");
    for (const auto& [device, flags] : r.primary_flags) {
        result = FG_DRIVER(cuDevicePrimaryCtxSetFlags_v2)(device, flags);
        if (result != CUDA_SUCCESS)
            return fail("cuDevicePrimaryCtxSetFlags again", result);
    }
    // We reserve as early as possible, before the driver places something there.
    Reservations reservations;
    if (!reservations.make(false, fail))
        return false;
    laps.add("reservations");
    for (auto& index : r.by_driver)
        index.clear();
    r.kernel_functions.clear();
    r.ended_functions.clear();
    r.renewed_nodes.clear();
    r.renewed_graphs.clear();
    Beside beside;
    const Object* any = nullptr; // context that is there again
    for (const auto& [serial, object] : r.objects) {
        const bool is_context = object->kind == Kind::context;
        const Object* context = object->context || is_context ? object->context : any;
        if (!needs_memory(*object) && !make_again(*object, use(context), fail, &beside))
            return false;
        laps.add(kind_names[static_cast<size_t>(object->kind)]);
        if (is_context && object->active) {
            any = object.get();
            if (!number(object.get(), textures::take_numbers, fail))
                return false;
            laps.add("textures");
        }
        if (is_context) {
            if (!reservations.make(false, fail))
                return false;
            laps.add("reservations");
        }
    }
    if (!reservations.make(true, fail))
        return false;
    laps.add("reservations");
    for (const auto& [serial, object] : r.objects)
        if (object->kind == Kind::context && object->active &&
            !number(object.get(), textures::make_all, fail))
            return false;
    laps.add("textures");
    if (!register_host(holes, fail))
        return false;
    laps.add("host memory");
    for (const auto& [serial, object] : r.objects)
        if (!set_again(*object, fail))
            return false;
    laps.add("settings");
    if (!variables::write(fail))
        return false;
    renew_aliases();
    laps.add("variables");
    for (const auto& [serial, object] : r.objects) {
        if (object->kind != Kind::context || !object->active)
            continue;
        result = use(object.get());
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuCtxSynchronize)();
        if (result != CUDA_SUCCESS)
            return fail("waiting for what was made again", result);
    }
    beside.finish();
    laps.add("wait");
    return true;
}

// How long ago the context's events were recorded. All its work is done.
bool keep_ages(const Object& context, FirstFailure& fail) {
    CUevent now = nullptr;
    CUresult result = use(&context);
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuEventCreate)(&now, CU_EVENT_DEFAULT);
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuEventRecord)(now, nullptr);
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuEventSynchronize)(now);
    for (const auto& [serial, object] : registry().objects) {
        if (object->kind != Kind::event || object->context != &context || !object->marked.load())
            continue;
        float past = 0;
        // One that was made without times has none.
        const bool timed =
            result == CUDA_SUCCESS &&
            FG_DRIVER(cuEventElapsedTime)(&past, object->driver<CUevent>(), now) == CUDA_SUCCESS;
        object->kept_age = timed ? past + std::max(0.0, object->age.load()) : -1;
    }
    if (now)
        FG_DRIVER(cuEventDestroy_v2)(now);
    return result == CUDA_SUCCESS || fail("timing events", result);
}

// One that has been loaded will be again.
void keep_state(Object& function) {
    CUfunctionLoadingState state{};
    function.listed = use(function.context) == CUDA_SUCCESS &&
                      FG_DRIVER(cuFuncIsLoaded)(&state, function.driver<CUfunction>()) == 0 &&
                      state != CU_FUNCTION_LOADING_STATE_LOADED;
}

bool keep_all(FirstFailure& fail) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    std::set<const Object*> timed;
    for (const auto& [serial, object] : registry().objects)
        if (object->kind == Kind::event && object->context && object->marked.load())
            timed.insert(object->context);
    bool kept = std::all_of(timed.begin(), timed.end(),
                            [&](const Object* context) { return keep_ages(*context, fail); });
    kept = kept && variables::keep(fail);
    for (const auto& [serial, object] : registry().objects)
        if (object->listed)
            keep_state(*object);
    FG_DRIVER(cuCtxSetCurrent)(nullptr);
    return kept;
}

// While CUDA is made anew: the driver's descriptors get none of the standard ones' numbers, which a
// program that has closed those may want for others.
class StandardNumbers {
  public:
    StandardNumbers() {
        int fd;
        while ((fd = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0 && fd <= STDERR_FILENO)
            taken_[fd] = true;
        if (fd >= 0)
            close(fd);
    }
    ~StandardNumbers() {
        for (int fd = 0; fd <= STDERR_FILENO; fd++)
            if (taken_[fd])
                close(fd);
    }
    StandardNumbers(const StandardNumbers&) = delete;
    StandardNumbers& operator=(const StandardNumbers&) = delete;

  private:
    bool taken_[STDERR_FILENO + 1] = {};
};

enum class Driver { here, away, half_made }; // half made: to be rewound first
Driver driver = Driver::here;                // the service thread's alone, as the next
bool kept = false;                           // with the driver here

bool rewind_driver(char* detail, size_t bytes, bool* lost, Laps& laps) {
    std::vector<rewind::Range> keep;
    for (const Region& reserved : address_map().all(kReserved))
        keep.push_back({static_cast<uintptr_t>(reserved.address), reserved.bytes});
    const auto lose_memory = [] { task().memory.lose_all(); };
    return rewind::strip(keep.data(), keep.size(), detail, bytes, lost, lose_memory, &laps);
}

// Keeps what is in the driver's memory alone, while NVML ends. After a failure NVML comes back with
// the gate (service.cpp).
bool keep_and_leave(FirstFailure& fail, Laps& laps) {
    Helpers beside(1, [](size_t) { nvml::leave(); });
    const bool good = keep_all(fail);
    laps.add("variables");
    beside.wait_for_all();
    laps.add("NVML");
    return good;
}

} // namespace

bool stripped() {
    return driver != Driver::here;
}

bool keep(char* detail, size_t bytes) {
    FirstFailure fail(detail, bytes);
    Laps laps;
    if (!keep_and_leave(fail, laps))
        return false;
    rewind::before_copy();
    kept = true;
    laps.tell(detail, bytes);
    return true;
}

bool keeps() {
    return kept;
}

void forget_kept() {
    if (!kept)
        return;
    std::lock_guard<std::mutex> lock(registry().mutex);
    variables::forget();
    kept = false;
}

bool become_copy() {
    if (!kept || !rewind::is_copy())
        return false;
    kept = false;
    driver = Driver::half_made;
    return true;
}

bool strip(char* detail, size_t bytes, bool* lost) {
    FirstFailure fail(detail, bytes);
    Laps laps;
    if (!keep_and_leave(fail, laps))
        return false;
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (!rewind_driver(detail, bytes, lost, laps)) {
        if (!*lost)
            variables::forget();
        return false;
    }
    driver = Driver::away;
    flowgpu_page.contexts.fetch_add(1);
    laps.tell(detail, bytes);
    return true;
}

bool may_come_later() {
    return name_is_taken;
}

bool rebuild(char* detail, size_t bytes) {
    FirstFailure fail(detail, bytes);
    std::lock_guard<std::mutex> lock(registry().mutex);
    bool lost = false;
    Laps laps;
    if (driver == Driver::half_made && !rewind_driver(detail, bytes, &lost, laps))
        return false;
    driver = Driver::half_made;
    finished = false;
    const StandardNumbers standard;
    const bool made = make_all(fail, laps);
    const CUresult result = made ? user_objects::make_all() : CUDA_SUCCESS;
    FG_DRIVER(cuCtxSetCurrent)(nullptr);
    if (!made)
        return false;
    if (result != CUDA_SUCCESS)
        return fail("making a user object again", result);
    variables::forget();
    flowgpu_page.generation.fetch_add(1);
    flowgpu_page.contexts.fetch_add(1);
    driver = Driver::here;
    laps.tell(detail, bytes);
    return true;
}

bool finish(char* detail, size_t bytes) {
    FirstFailure fail(detail, bytes);
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (!variables::finish(fail))
        return false;
    // What an executable's nodes are called is known once all graphs are there.
    for (Kind kind : {Kind::graph, Kind::executable}) {
        for (const auto& [serial, object] : registry().objects) {
            // Parts are made with the graph that they are in.
            if (finished || object->kind != kind || object->parent || is_made(*object))
                continue;
            if (!make_again(*object, use(context_for(*object)), fail))
                return false;
            renew_parts(*object);
            CUresult result = CUDA_SUCCESS;
            if (kind == Kind::graph && object->graph)
                result = user_objects::retain(object->graph->retained, object->driver<CUgraph>());
            FG_DRIVER(cuCtxSetCurrent)(nullptr);
            if (result != CUDA_SUCCESS)
                return fail("giving a graph its user objects again", result);
        }
    }
    if (finished)
        return true;
    renew_twins();
    const CUresult result = user_objects::release_spare();
    finished = result == CUDA_SUCCESS;
    return finished || fail("letting go of user objects", result);
}

} // namespace flowgpu::replay
