// The handles in the structures of driver functions: what each of them has, by its type.
#ifndef FLOWGPU_INTERCEPT_REPLAY_STRUCTURES_H
#define FLOWGPU_INTERCEPT_REPLAY_STRUCTURES_H

#include <type_traits>
#include <utility>

#include "aliases.h"
#include "quiet.h"
#include "record.h"

namespace flowgpu::replay {

// A function that is launched or becomes part of a graph; a kernel is launched as a function.
inline CUfunction launched(CUfunction value) {
    Slot* slot = slot_of(value);
    if (!slot)
        return value;
    if (__builtin_expect(slot->may_be_first_launch(), 0))
        FG_QUIETLY(flowgpu_replay_launched, slot);
    return static_cast<CUfunction>(slot->driver);
}

// Structures: each `translate` exchanges the handles in one, in the given direction.
struct ToDriver {
    template <class H> void operator()(H& handle) const { handle = to_driver(handle); }
    void operator()(CUfunction& function) const { function = launched(function); }
    void operator()(CUkernel& kernel) const {
        kernel = reinterpret_cast<CUkernel>(launched(reinterpret_cast<CUfunction>(kernel)));
    }
};
struct ToProgram {
    template <class H> void operator()(H& handle) const {
        if (handle)
            handle = to_program(handle);
    }
};

template <class Way> void translate(CUDA_KERNEL_NODE_PARAMS_v1& p, Way way) {
    way(p.func);
}
template <class Way> void translate(CUDA_KERNEL_NODE_PARAMS_v2& p, Way way) {
    way(p.func);
    way(p.kern);
    way(p.ctx);
}
template <class Way> void translate(CUDA_KERNEL_NODE_PARAMS_v3& p, Way way) {
    way(p.func);
    way(p.kern);
    way(p.ctx);
}
// An end of a copy that is no array names none.
template <class C, class Way> void translate_arrays(C& p, Way way) {
    if (p.srcMemoryType == CU_MEMORYTYPE_ARRAY)
        way(p.srcArray);
    if (p.dstMemoryType == CU_MEMORYTYPE_ARRAY)
        way(p.dstArray);
}
template <class Way> void translate(CUDA_MEMCPY2D_v1& p, Way way) {
    translate_arrays(p, way);
}
template <class Way> void translate(CUDA_MEMCPY3D_v1& p, Way way) {
    translate_arrays(p, way);
}
template <class Way> void translate(CUDA_MEMCPY2D& p, Way way) {
    way(p.srcDevice);
    way(p.dstDevice);
    translate_arrays(p, way);
}
template <class Way> void translate(CUDA_MEMCPY3D& p, Way way) {
    way(p.srcDevice);
    way(p.dstDevice);
    translate_arrays(p, way);
}
template <class Way> void translate(CUmemcpy3DOperand& p, Way way) {
    if (p.type == CU_MEMCPY_OPERAND_TYPE_ARRAY)
        way(p.op.array.array);
    else
        way(p.op.ptr.ptr);
}
template <class Way> void translate(CUDA_MEMCPY3D_BATCH_OP& p, Way way) {
    translate(p.src, way);
    translate(p.dst, way);
}
template <class Way> void translate(CUarrayMapInfo& p, Way way) {
    if (p.resourceType == CU_RESOURCE_TYPE_ARRAY)
        way(p.resource.array);
    else
        way(p.resource.mipmap);
}
template <class Way> void translate(CUDA_RESOURCE_DESC& p, Way way) {
    switch (p.resType) {
    case CU_RESOURCE_TYPE_ARRAY:
        way(p.res.array.hArray);
        break;
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
        way(p.res.mipmap.hMipmappedArray);
        break;
    case CU_RESOURCE_TYPE_LINEAR:
        way(p.res.linear.devPtr);
        break;
    case CU_RESOURCE_TYPE_PITCH2D:
        way(p.res.pitch2D.devPtr);
        break;
    default:
        break;
    }
}
template <class Way> void translate(CUDA_MEMSET_NODE_PARAMS_v1& p, Way way) {
    way(p.dst);
}
template <class Way> void translate(CUDA_MEMSET_NODE_PARAMS_v2& p, Way way) {
    way(p.dst);
    way(p.ctx);
}
template <class Way> void translate(CUDA_MEMCPY3D_PEER& p, Way way) {
    way(p.srcDevice);
    way(p.dstDevice);
    way(p.srcContext);
    way(p.dstContext);
    translate_arrays(p, way);
}
template <class Way> void translate(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1& p, Way way) {
    way(p.ctx);
}
template <class Way> void translate(CUDA_BATCH_MEM_OP_NODE_PARAMS_v2& p, Way way) {
    way(p.ctx);
}
template <class Way> void translate(CUgraphNodeParams& p, Way way) {
    switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        translate(p.kernel, way);
        break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        way(p.memcpy.copyCtx);
        translate(p.memcpy.copyParams, way);
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        translate(p.memset, way);
        break;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        way(p.graph.graph);
        break;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        way(p.eventWait.event);
        break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        way(p.eventRecord.event);
        break;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        translate(p.memOp, way);
        break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        way(p.conditional.ctx);
        break;
    default:
        break;
    }
}

template <class S, class = void> struct HasHandles : std::false_type {};
template <class S>
struct HasHandles<S, std::void_t<decltype(translate(std::declval<S&>(), ToDriver()))>>
    : std::true_type {};

} // namespace flowgpu::replay

#endif
