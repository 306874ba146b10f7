#include "graph_nodes.h"

namespace flowgpu::emu {

CUresult spec_of(const CUDA_KERNEL_NODE_PARAMS_v2* params, NodeSpec* out) {
    if (params == nullptr || (params->func == nullptr && params->kern == nullptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    NodeParams& fixed = out->fixed;
    fixed.type = CU_GRAPH_NODE_TYPE_KERNEL;
    fixed.object = params->func != nullptr ? handle_of(params->func) : handle_of(params->kern);
    fixed.context = params->func != nullptr ? 0 : handle_of(params->ctx);
    fixed.by_extra = params->extra != nullptr;
    fixed.shape = {{params->gridDimX, params->gridDimY, params->gridDimZ},
                   {params->blockDimX, params->blockDimY, params->blockDimZ},
                   params->sharedMemBytes,
                   0};
    FunctionLayout layout;
    return pack_arguments(fixed.object, params->kernelParams, params->extra, &layout,
                          &out->arguments);
}

CUresult spec_of(const CUDA_KERNEL_NODE_PARAMS_v1* params, NodeSpec* out) {
    if (params == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_KERNEL_NODE_PARAMS_v2 newer{};
    std::memcpy(&newer, params, sizeof *params);
    return spec_of(&newer, out);
}

CUresult spec_of(const CUDA_MEMCPY3D* params, CUcontext context, NodeSpec* out) {
    if (params == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    out->fixed.type = CU_GRAPH_NODE_TYPE_MEMCPY;
    out->fixed.context = handle_of(context);
    out->fixed.copy = *params;
    return CUDA_SUCCESS;
}

CUresult spec_of(const CUDA_MEMSET_NODE_PARAMS_v1* params, CUcontext context, NodeSpec* out) {
    if (params == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    out->fixed.type = CU_GRAPH_NODE_TYPE_MEMSET;
    out->fixed.context = handle_of(context);
    out->fixed.fill = *params;
    return CUDA_SUCCESS;
}

CUresult spec_of(const CUDA_HOST_NODE_PARAMS_v1* params, NodeSpec* out) {
    if (params == nullptr || params->fn == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    out->fixed.type = CU_GRAPH_NODE_TYPE_HOST;
    out->fixed.object = reinterpret_cast<uint64_t>(params->fn);
    out->fixed.data = handle_of(params->userData);
    process().host_nodes = true;
    return CUDA_SUCCESS;
}

NodeSpec spec_of(CUevent event, CUgraphNodeType type) {
    NodeSpec spec;
    spec.fixed.type = type;
    spec.fixed.object = handle_of(event);
    return spec;
}

NodeSpec spec_of_child(CUgraph graph) {
    NodeSpec spec;
    spec.fixed.type = CU_GRAPH_NODE_TYPE_GRAPH;
    spec.fixed.object = handle_of(graph);
    return spec;
}

CUresult spec_of(const CUgraphNodeParams* params, NodeSpec* out) {
    if (params == nullptr || params->reserved2 != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        CUDA_KERNEL_NODE_PARAMS_v2 kernel;
        static_assert(sizeof kernel == sizeof params->kernel);
        std::memcpy(&kernel, &params->kernel, sizeof kernel);
        return spec_of(&kernel, out);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return params->memcpy.flags != 0
                   ? CUDA_ERROR_INVALID_VALUE
                   : spec_of(&params->memcpy.copyParams, params->memcpy.copyCtx, out);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
        CUDA_MEMSET_NODE_PARAMS_v1 fill;
        std::memcpy(&fill, &params->memset, sizeof fill);
        return spec_of(&fill, params->memset.ctx, out);
    }
    case CU_GRAPH_NODE_TYPE_HOST: {
        const CUDA_HOST_NODE_PARAMS_v1 host{params->host.fn, params->host.userData};
        return spec_of(&host, out);
    }
    case CU_GRAPH_NODE_TYPE_GRAPH:
        if (params->graph.ownership > CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *out = spec_of_child(params->graph.graph);
        out->fixed.data = params->graph.ownership;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        *out = spec_of(params->eventRecord.event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        *out = spec_of(params->eventWait.event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EMPTY:
        out->fixed.type = CU_GRAPH_NODE_TYPE_EMPTY;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return unsupported("nodes of semaphores, memory, memory operations and conditions");
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult fetch_spec(CUgraphNode node, CUgraphNodeType type, NodeSpec* out, uint64_t* graph) {
    Call call(Op::GraphNodeParams);
    call.in(handle_of(node));
    const CUresult r = call.go();
    if (r != CUDA_SUCCESS) {
        return r;
    }
    *graph = call.take<uint64_t>();
    *out = NodeSpec::take(call.reader());
    return out->fixed.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult kernel_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* out) {
    NodeSpec spec;
    uint64_t graph = 0;
    FunctionLayout layout;
    if (out == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = fetch_spec(node, CU_GRAPH_NODE_TYPE_KERNEL, &spec, &graph);
        r != CUDA_SUCCESS) {
        return r;
    }
    const NodeParams& fixed = spec.fixed;
    if (const CUresult r = pack_arguments(fixed.object, nullptr, nullptr, &layout, nullptr);
        r != CUDA_SUCCESS) {
        return r;
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    NodeArguments& kept = p.node_arguments[graph][handle_of(node)];
    if (kept.extra[0] == nullptr || kept.bytes != spec.arguments) { // else the caller may hold it
        kept.bytes = std::move(spec.arguments);
        kept.size = kept.bytes.size();
        kept.params.clear();
        for (const FunctionLayout::Param& param : layout.params) {
            kept.params.push_back(kept.bytes.data() + param.offset);
        }
        kept.extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
        kept.extra[1] = kept.bytes.data();
        kept.extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
        kept.extra[3] = &kept.size;
        kept.extra[4] = CU_LAUNCH_PARAM_END;
    }
    *out = {};
    out->func = reinterpret_cast<CUfunction>(fixed.object);
    out->gridDimX = fixed.shape.grid[0];
    out->gridDimY = fixed.shape.grid[1];
    out->gridDimZ = fixed.shape.grid[2];
    out->blockDimX = fixed.shape.block[0];
    out->blockDimY = fixed.shape.block[1];
    out->blockDimZ = fixed.shape.block[2];
    out->sharedMemBytes = fixed.shape.shared;
    out->kernelParams = fixed.by_extra != 0 || kept.params.empty() ? nullptr : kept.params.data();
    out->extra = fixed.by_extra != 0 ? kept.extra : nullptr;
    out->ctx = reinterpret_cast<CUcontext>(fixed.context);
    return CUDA_SUCCESS;
}

CUresult plain_edges(const char* function, const CUgraphEdgeData* data, size_t count) {
    const CUgraphEdgeData plain{};
    for (size_t i = 0; data != nullptr && i < count; ++i) {
        if (std::memcmp(&data[i], &plain, sizeof plain) != 0) {
            return unsupported(function);
        }
    }
    return CUDA_SUCCESS;
}

std::vector<uint64_t> handles_of(const CUgraphNode* nodes, size_t count) {
    std::vector<uint64_t> out;
    for (size_t i = 0; i < count; ++i) {
        out.push_back(handle_of(nodes[i]));
    }
    return out;
}

} // namespace flowgpu::emu
