// Executable graphs.
#include "graph_nodes.h"
#include "user_objects.h"

namespace flowgpu::emu {

namespace {

template <class... From> CUresult set_from(CUgraphExec exec, CUgraphNode node, From... from) {
    return set_params(Op::ExecSetParams, {handle_of(exec), handle_of(node)}, from...);
}

CUresult set_event(CUgraphExec exec, CUgraphNode node, CUevent event, CUgraphNodeType type) {
    Call call(Op::ExecSetParams);
    call.in(handle_of(exec)).in(handle_of(node));
    spec_of(event, type).put(call.writer());
    return call.go();
}

// `bad`: of a structure that cannot be, a node in it.
CUresult instantiate(CUgraphExec* exec, CUgraph graph, uint64_t flags, CUgraphNode* bad) {
    if (exec == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::GraphInstantiate);
    call.in(handle_of(graph)).in(flags);
    const CUresult r = call.go();
    const auto handle = call.take<uint64_t>();
    *bad = reinterpret_cast<CUgraphNode>(r == CUDA_SUCCESS ? 0 : handle);
    if (r == CUDA_SUCCESS) {
        *exec = reinterpret_cast<CUgraphExec>(handle);
        share_user_objects(handle_of(graph), handle);
    }
    return r;
}

CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
    Call call(Op::ExecUpdate);
    call.in(handle_of(exec)).in(handle_of(graph));
    const CUresult r = call.go();
    info->result = static_cast<CUgraphExecUpdateResult>(call.take<int32_t>());
    info->errorNode = call.take<CUgraphNode>();
    info->errorFromNode = call.take<CUgraphNode>();
    if (r == CUDA_SUCCESS) {
        replace_user_objects(handle_of(graph), handle_of(exec));
    }
    return r;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph,
                                             unsigned long long flags) {
    CUgraphNode bad = nullptr;
    return instantiate(exec, graph, flags, &bad);
}

CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* bad,
                                       char* log, size_t size) {
    CUgraphNode found = nullptr;
    const CUresult r = instantiate(exec, graph, 0, &found);
    if (bad != nullptr) {
        *bad = found;
    }
    if (log != nullptr && size > 0) {
        *log = '\0';
    }
    return r;
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* bad, char* log,
                                    size_t size) {
    return cuGraphInstantiate_v2(exec, graph, bad, log, size);
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph,
                                              CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
    if (params == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t upload = params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    CUresult r = instantiate(exec, graph, params->flags & ~upload, &params->hErrNode_out);
    params->result_out = r == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS
                         : params->hErrNode_out != nullptr
                             ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
                             : CUDA_GRAPH_INSTANTIATE_ERROR;
    if (r == CUDA_SUCCESS && upload != 0) {
        r = cuGraphUpload(*exec, params->hUploadStream);
        if (r != CUDA_SUCCESS) {
            params->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
            cuGraphExecDestroy(*exec);
        }
    }
    return r;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    const CUresult r = rpc(Op::ExecDestroy, outs(), handle_of(exec));
    if (r == CUDA_SUCCESS) {
        drop_user_objects(handle_of(exec));
    }
    return r;
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t* flags) {
    return flags == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::ExecFlags, outs(flags), handle_of(exec));
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    // A restored process has no such thread before it is needed.
    if (process().host_nodes) {
        if (const CUresult r = ensure_callback_thread(); r != CUDA_SUCCESS) {
            return r;
        }
    }
    return rpc(Op::GraphLaunch, outs(), handle_of(exec), handle_of(stream));
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream stream) {
    return rpc(Op::GraphUpload, outs(), handle_of(exec), handle_of(stream));
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* node,
                                   CUgraphExecUpdateResult* result) {
    CUgraphExecUpdateResultInfo info{};
    const CUresult r = update(exec, graph, &info);
    if (node != nullptr) {
        *node = info.errorNode;
    }
    if (result != nullptr) {
        *result = info.result;
    }
    return r;
}

CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                                      CUgraphExecUpdateResultInfo* info) {
    return info == nullptr ? CUDA_ERROR_INVALID_VALUE : update(exec, graph, info);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_KERNEL_NODE_PARAMS_v1* params) {
    return set_from(exec, node, params);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                   const CUDA_KERNEL_NODE_PARAMS* params) {
    return set_from(exec, node, params);
}

CUresult CUDAAPI cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_MEMCPY3D* params, CUcontext context) {
    return set_from(exec, node, params, context);
}

CUresult CUDAAPI cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                const CUDA_MEMSET_NODE_PARAMS* params,
                                                CUcontext context) {
    return set_from(exec, node, params, context);
}

CUresult CUDAAPI cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                              const CUDA_HOST_NODE_PARAMS* params) {
    return set_from(exec, node, params);
}

CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                    CUgraph child) {
    Call call(Op::ExecSetParams);
    call.in(handle_of(exec)).in(handle_of(node));
    spec_of_child(child).put(call.writer());
    return call.go();
}

CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                          CUgraphNodeParams* params) {
    return set_from(exec, node, static_cast<const CUgraphNodeParams*>(params));
}

CUresult CUDAAPI cuGraphExecEventRecordNodeSetEvent(CUgraphExec exec, CUgraphNode node,
                                                    CUevent event) {
    return set_event(exec, node, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

CUresult CUDAAPI cuGraphExecEventWaitNodeSetEvent(CUgraphExec exec, CUgraphNode node,
                                                  CUevent event) {
    return set_event(exec, node, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled) {
    return node == nullptr ? CUDA_ERROR_INVALID_VALUE
                           : rpc(Op::ExecSetEnabled, outs(), handle_of(exec), handle_of(node),
                                 uint32_t{enabled});
}

CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int* enabled) {
    return enabled == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::ExecGetEnabled, outs(enabled), handle_of(exec), handle_of(node));
}

} // extern "C"
