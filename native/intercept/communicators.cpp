#include "communicators.h"

#include <dlfcn.h>
#include <pthread.h>

#include "flowgpu/nccl.h"

namespace flowgpu::communicators {

namespace {

decltype(&flowgpu_nccl_fd) other_fd;
decltype(&flowgpu_nccl_communicators) other_communicators;
decltype(&flowgpu_nccl_open) other_open;
decltype(&flowgpu_nccl_renew) other_renew;
decltype(&flowgpu_nccl_captures) other_captures;
decltype(&flowgpu_nccl_any_graph) other_any_graph;
decltype(&flowgpu_nccl_graph) other_graph;
decltype(&flowgpu_nccl_begin_launch) other_begin_launch;
decltype(&flowgpu_nccl_end_launch) other_end_launch;
const uint32_t none = 0;
std::atomic<const uint32_t*> graphs{&none};
pthread_once_t found = PTHREAD_ONCE_INIT;

template <typename Function> void find(Function& slot, const char* name) {
    slot = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

void find_all() {
    find(other_fd, "flowgpu_nccl_fd");
    find(other_communicators, "flowgpu_nccl_communicators");
    find(other_open, "flowgpu_nccl_open");
    find(other_renew, "flowgpu_nccl_renew");
    find(other_captures, "flowgpu_nccl_captures");
    find(other_any_graph, "flowgpu_nccl_any_graph");
    find(other_graph, "flowgpu_nccl_graph");
    find(other_begin_launch, "flowgpu_nccl_begin_launch");
    find(other_end_launch, "flowgpu_nccl_end_launch");
    if (other_any_graph && other_graph && other_begin_launch && other_end_launch)
        graphs = other_any_graph();
}

} // namespace

int counts_fd() {
    pthread_once(&found, find_all);
    return other_fd ? other_fd() : -1;
}

uint32_t living() {
    pthread_once(&found, find_all);
    return other_communicators ? other_communicators() : 0;
}

void open() {
    pthread_once(&found, find_all);
    if (other_open)
        other_open();
}

flowgpu_status renew(flowgpu_renewal step, char* detail, size_t bytes) {
    pthread_once(&found, find_all);
    return other_renew ? static_cast<flowgpu_status>(other_renew(step, detail, bytes))
                       : FLOWGPU_PROTOCOL;
}

void captures_changed(const std::atomic<uint32_t>& under_way) {
    pthread_once(&found, find_all);
    static_assert(sizeof under_way == sizeof(uint32_t), "read as a plain word");
    if (other_captures)
        other_captures(reinterpret_cast<const uint32_t*>(&under_way));
}

// A graph is captured before, so what is to be found has been.
bool any_graph() {
    return __atomic_load_n(graphs.load(std::memory_order_relaxed), __ATOMIC_RELAXED) != 0;
}

void graph(Graph what, const void* graph, const void* other) {
    other_graph(static_cast<int>(what), graph, other);
}

bool begin_launch(const void* executable, void* stream) {
    return other_begin_launch(executable, stream) != 0;
}

void end_launch(const void* executable, bool well) {
    other_end_launch(executable, well);
}

} // namespace flowgpu::communicators
