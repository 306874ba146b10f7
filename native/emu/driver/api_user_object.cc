// User objects: counted references to something of the program's, which graphs and executables may
// have as well. The device has no part in it. What the program gave is called in a thread of its
// own once nobody has a reference; of an executable in flight the real driver waits for its end.
#include "client.h"
#include "user_objects.h"

#include <pthread.h>

namespace flowgpu::emu {

namespace {

struct UserObject {
    void* data;
    CUhostFn destroy;
    uint64_t references;
};

struct UserObjects {
    std::mutex mutex;
    uint64_t next = 1;
    std::map<uint64_t, UserObject> live;                  // by handle, with all references
    std::map<uint64_t, std::map<uint64_t, uint64_t>> had; // by graph or executable
};

UserObjects& all() {
    static auto* made = new UserObjects();
    return *made;
}

void* run_destroy(void* argument) {
    std::unique_ptr<UserObject> object(static_cast<UserObject*>(argument));
    thread_state().in_callback = true;
    object->destroy(object->data);
    thread_state().in_callback = false;
    return nullptr;
}

// With the lock held. False: there are not so many.
bool drop(uint64_t handle, uint64_t count) {
    const auto found = all().live.find(handle);
    if (found == all().live.end() || found->second.references < count) {
        return false;
    }
    found->second.references -= count;
    if (found->second.references == 0) {
        auto ended = std::make_unique<UserObject>(found->second);
        all().live.erase(found);
        pthread_t thread;
        if (::pthread_create(&thread, nullptr, run_destroy, ended.get()) == 0) {
            ended.release();
            ::pthread_detach(thread);
        }
    }
    return true;
}

bool is_graph(CUgraph graph) {
    size_t count = 0;
    return cuGraphGetNodes(graph, nullptr, &count) == CUDA_SUCCESS;
}

uint64_t number(CUuserObject object) {
    return reinterpret_cast<uint64_t>(object);
}

} // namespace

void share_user_objects(uint64_t from, uint64_t to) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto found = all().had.find(from);
    if (found == all().had.end()) {
        return;
    }
    const auto held = found->second;
    for (const auto& [handle, count] : held) {
        all().live.at(handle).references += count;
        all().had[to][handle] += count;
    }
}

void replace_user_objects(uint64_t from, uint64_t to) {
    std::map<uint64_t, uint64_t> before;
    {
        std::lock_guard<std::mutex> lock(all().mutex);
        before.swap(all().had[to]);
    }
    share_user_objects(from, to);
    std::lock_guard<std::mutex> lock(all().mutex);
    for (const auto& [handle, count] : before) {
        drop(handle, count);
    }
}

void drop_user_objects(uint64_t from) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto found = all().had.find(from);
    if (found == all().had.end()) {
        return;
    }
    const auto held = found->second;
    all().had.erase(found);
    for (const auto& [handle, count] : held) {
        drop(handle, count);
    }
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuUserObjectCreate(CUuserObject* out, void* data, CUhostFn destroy,
                                    unsigned int count, unsigned int flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (out == nullptr || destroy == nullptr || count == 0 ||
        flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::lock_guard<std::mutex> lock(all().mutex);
    const uint64_t handle = all().next++;
    all().live[handle] = {data, destroy, count};
    *out = reinterpret_cast<CUuserObject>(handle);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuUserObjectRetain(CUuserObject object, unsigned int count) {
    Entry entry;
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto found = all().live.find(number(object));
    if (entry.status() != CUDA_SUCCESS || found == all().live.end() || count == 0) {
        return entry.status() != CUDA_SUCCESS ? entry.status() : CUDA_ERROR_INVALID_VALUE;
    }
    found->second.references += count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject object, unsigned int count) {
    Entry entry;
    std::lock_guard<std::mutex> lock(all().mutex);
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    return count != 0 && drop(number(object), count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count,
                                         unsigned int flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (count == 0 || (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) != 0 || !is_graph(graph)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto found = all().live.find(number(object));
    if (found == all().live.end()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((flags & CU_GRAPH_USER_OBJECT_MOVE) == 0) {
        found->second.references += count;
    }
    all().had[handle_of(graph)][number(object)] += count;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
    Entry entry;
    std::lock_guard<std::mutex> lock(all().mutex);
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    auto& held = all().had[handle_of(graph)][number(object)];
    if (count == 0 || held < count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    held -= count;
    if (held == 0) {
        all().had[handle_of(graph)].erase(number(object));
    }
    drop(number(object), count);
    return CUDA_SUCCESS;
}

} // extern "C"
