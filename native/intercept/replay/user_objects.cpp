#include "user_objects.h"

#include <vector>

#include "arguments.h"
#include "graphs.h"
#include "recorded.h"
#include "registry.h"

namespace flowgpu::replay {

namespace {

struct All {
    std::map<CUuserObject, std::weak_ptr<UserObject>> known; // by the program's handle
    std::map<CUuserObject, std::shared_ptr<UserObject>> own; // to which the program has references
};

// Made on first use, never destroyed, as Task.
All& all() {
    static auto* made = new All();
    return *made;
}

// Null: none of ours, which the driver judges.
std::shared_ptr<UserObject> find(CUuserObject handle) {
    const auto found = all().known.find(handle);
    return found == all().known.end() ? nullptr : found->second.lock();
}

void let_go(CUuserObject handle, const std::shared_ptr<UserObject>& object, unsigned count) {
    object->own -= count < object->own ? count : object->own;
    if (!object->own)
        all().own.erase(handle);
}

// Calls the driver with its handle, and notes what became of it. The lock is not held in the call,
// which may call the program.
template <class Call, class Note> CUresult call_with(CUuserObject handle, Call call, Note note) {
    std::shared_ptr<UserObject> object;
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        object = find(handle);
    }
    const CUresult result = call(object ? object->driver : handle);
    if (result == CUDA_SUCCESS && object) {
        std::lock_guard<std::mutex> lock(registry().mutex);
        note(object);
    }
    return result;
}

// What is kept of a graph; null: it is not known.
GraphState* state_of(CUgraph graph) {
    Object* object = object_of(graph);
    return object && object->graph ? object->graph.get() : nullptr;
}

} // namespace

namespace user_objects {

std::vector<std::shared_ptr<UserObject>> living() {
    std::vector<std::shared_ptr<UserObject>> found;
    for (auto at = all().known.begin(); at != all().known.end();) {
        if (auto object = at->second.lock()) {
            found.push_back(std::move(object));
            ++at;
        } else {
            at = all().known.erase(at);
        }
    }
    return found;
}

CUresult make_all() {
    for (const auto& object : living()) {
        CUresult result = FG_DRIVER(cuUserObjectCreate)(
            &object->driver, object->data, object->destroy, object->own + 1, object->flags);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult retain(const Retained& retained, CUgraph driver) {
    for (const auto& [object, count] : retained) {
        CUresult result = FG_DRIVER(cuGraphRetainUserObject)(driver, object->driver, count, 0);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult release_spare() {
    for (const auto& object : living()) {
        CUresult result = FG_DRIVER(cuUserObjectRelease)(object->driver, 1);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

} // namespace user_objects

namespace recorded {

CUresult cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy,
                            unsigned initialRefcount, unsigned flags) {
    CUuserObject driver = nullptr;
    const CUresult result = FG_DRIVER(cuUserObjectCreate)(object_out ? &driver : nullptr, ptr,
                                                          destroy, initialRefcount, flags);
    if (result != CUDA_SUCCESS)
        return result;
    auto object =
        std::make_shared<UserObject>(UserObject{ptr, destroy, flags, initialRefcount, driver});
    const auto handle = reinterpret_cast<CUuserObject>(object.get());
    std::lock_guard<std::mutex> lock(registry().mutex);
    all().known[handle] = object;
    all().own[handle] = std::move(object);
    *object_out = handle;
    return result;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned count) {
    return call_with(
        object, [&](CUuserObject driver) { return FG_DRIVER(cuUserObjectRetain)(driver, count); },
        [&](const std::shared_ptr<UserObject>& noted) {
            noted->own += count;
            all().own[object] = noted;
        });
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
    return call_with(
        object, [&](CUuserObject driver) { return FG_DRIVER(cuUserObjectRelease)(driver, count); },
        [&](const std::shared_ptr<UserObject>& noted) { let_go(object, noted, count); });
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count,
                                 unsigned flags) {
    return call_with(
        object,
        [&](CUuserObject driver) {
            return FG_DRIVER(cuGraphRetainUserObject)(to_driver(graph), driver, count, flags);
        },
        [&](const std::shared_ptr<UserObject>& noted) {
            if (GraphState* state = state_of(graph))
                state->retained[noted] += count;
            if (flags & CU_GRAPH_USER_OBJECT_MOVE)
                let_go(object, noted, count);
        });
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
    return call_with(
        object,
        [&](CUuserObject driver) {
            return FG_DRIVER(cuGraphReleaseUserObject)(to_driver(graph), driver, count);
        },
        [&](const std::shared_ptr<UserObject>& noted) {
            GraphState* state = state_of(graph);
            if (!state || !state->retained.count(noted))
                return;
            unsigned& held = state->retained[noted];
            held -= count < held ? count : held;
            if (!held)
                state->retained.erase(noted);
        });
}

} // namespace recorded

} // namespace flowgpu::replay
