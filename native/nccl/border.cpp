// What the intercept library asks of this one.
#include "communicators.h"
#include "graphs.h"
#include "issuing.h"

FGN_EXPORT int flowgpu_nccl_fd() {
    return flowgpu::nccl::share();
}

FGN_EXPORT uint32_t flowgpu_nccl_communicators() {
    return __atomic_load_n(&flowgpu::nccl::header().living, __ATOMIC_SEQ_CST);
}

FGN_EXPORT const uint32_t* flowgpu_nccl_any_graph() {
    return &flowgpu::nccl::header().captured;
}

FGN_EXPORT void flowgpu_nccl_graph(int what, const void* graph, const void* other) {
    using namespace flowgpu::nccl;
    if (what == 0)
        become(graph, other);
    else if (what == 1)
        take(graph, other);
    else
        end(graph);
}

FGN_EXPORT int flowgpu_nccl_begin_launch(const void* executable, void* stream) {
    using namespace flowgpu::nccl;
    Unit unit;
    if (!launch_of(executable, &unit))
        return 0;
    if (const void* graph = captured_into(stream)) { // it becomes a part of that
        take(graph, executable);
        return 0;
    }
    enter(unit);
    return 1;
}

FGN_EXPORT void flowgpu_nccl_end_launch(const void* executable, int well) {
    using namespace flowgpu::nccl;
    Unit unit;
    launch_of(executable, &unit);
    leave(unit, !well, false);
}

FGN_EXPORT void flowgpu_nccl_captures(const uint32_t* under_way) {
    flowgpu::nccl::note_captures(under_way);
}
