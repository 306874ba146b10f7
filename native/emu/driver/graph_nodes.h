// A node's parameters in the driver's forms, and in the one that crosses to the device.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "client.h"

#include "graph_wire.h"

namespace flowgpu::emu {

// Each null if the parameters are; the arguments of a kernel are copied.
CUresult spec_of(const CUDA_KERNEL_NODE_PARAMS_v2* params, NodeSpec* out);
CUresult spec_of(const CUDA_KERNEL_NODE_PARAMS_v1* params, NodeSpec* out);
CUresult spec_of(const CUDA_MEMCPY3D* params, CUcontext context, NodeSpec* out);
CUresult spec_of(const CUDA_MEMSET_NODE_PARAMS_v1* params, CUcontext context, NodeSpec* out);
CUresult spec_of(const CUDA_HOST_NODE_PARAMS_v1* params, NodeSpec* out);
NodeSpec spec_of(CUevent event, CUgraphNodeType type);
NodeSpec spec_of_child(CUgraph graph);
CUresult spec_of(const CUgraphNodeParams* params, NodeSpec* out);

// Gives a node, named by these handles, parameters in one of those forms.
template <class... From>
CUresult set_params(Op op, std::initializer_list<uint64_t> handles, From... from) {
    if (std::find(handles.begin(), handles.end(), 0) != handles.end()) {
        return CUDA_ERROR_INVALID_VALUE; // of a process without CUDA as well
    }
    Entry entry;
    NodeSpec spec;
    CUresult r = entry.status();
    r = r != CUDA_SUCCESS ? r : spec_of(from..., &spec);
    if (r != CUDA_SUCCESS) {
        return r;
    }
    Call call(op);
    for (const uint64_t handle : handles) {
        call.in(handle);
    }
    spec.put(call.writer());
    return call.go();
}

// The parameters of a node of the type; INVALID_VALUE if it is of another.
CUresult fetch_spec(CUgraphNode node, CUgraphNodeType type, NodeSpec* out, uint64_t* graph);
CUresult kernel_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* out);

// Dependencies with their data; data other than the default is not supported.
CUresult plain_edges(const char* function, const CUgraphEdgeData* data, size_t count);
std::vector<uint64_t> handles_of(const CUgraphNode* nodes, size_t count);

} // namespace flowgpu::emu
