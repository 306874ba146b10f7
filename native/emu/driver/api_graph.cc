// Graphs and their nodes.
#include "graph_nodes.h"
#include "user_objects.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

CUresult add(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count,
             const NodeSpec& spec) {
    if (out == nullptr || (after == nullptr && count != 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::GraphAddNode);
    call.in(handle_of(graph));
    put_handles(call.writer(), handles_of(after, count));
    spec.put(call.writer());
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        *out = call.take<CUgraphNode>();
    }
    return r;
}

// The parameters are read inside the call, and only by a library that may be used.
template <class... From>
CUresult add_from(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count,
                  From... from) {
    Entry entry;
    NodeSpec spec;
    CUresult r = entry.status();
    r = r != CUDA_SUCCESS ? r : spec_of(from..., &spec);
    return r != CUDA_SUCCESS ? r : add(out, graph, after, count, spec);
}

template <class... From> CUresult set_from(CUgraphNode node, From... from) {
    return set_params(Op::GraphNodeSetParams, {handle_of(node)}, from...);
}

CUresult set_event(CUgraphNode node, CUevent event, CUgraphNodeType type) {
    Call call(Op::GraphNodeSetParams);
    call.in(handle_of(node));
    spec_of(event, type).put(call.writer());
    return call.go();
}

// `take`: what of the node's parameters goes where.
template <class Out, class Take>
CUresult get_params(CUgraphNode node, CUgraphNodeType type, Out* out, Take take) {
    NodeSpec spec;
    uint64_t graph = 0;
    const CUresult r =
        out == nullptr ? CUDA_ERROR_INVALID_VALUE : fetch_spec(node, type, &spec, &graph);
    if (r == CUDA_SUCCESS) {
        take(spec.fixed);
    }
    return r;
}

template <class Out> CUresult get_object(CUgraphNode node, CUgraphNodeType type, Out* out) {
    return get_params(node, type, out, [=](const NodeParams& params) {
        *out = reinterpret_cast<Out>(params.object);
    });
}

// Fills the places that the caller has, null past the end; without places only counts.
CUresult list(GraphList what, uint64_t handle, CUgraphNode* first, CUgraphNode* second,
              size_t* count) {
    const bool edges = what == GraphList::kEdges;
    if (count == nullptr || (edges && (first == nullptr) != (second == nullptr))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::GraphContents);
    call.in(what).in(handle);
    if (const CUresult r = call.go(); r != CUDA_SUCCESS) {
        return r;
    }
    const std::vector<uint64_t> found = take_handles(call.reader());
    const size_t width = edges ? 2 : 1;
    const size_t total = found.size() / width;
    if (first == nullptr) {
        *count = total;
        return CUDA_SUCCESS;
    }
    for (size_t i = 0; i < *count; ++i) {
        first[i] = reinterpret_cast<CUgraphNode>(i < total ? found[i * width] : 0);
        if (second != nullptr) {
            second[i] = reinterpret_cast<CUgraphNode>(i < total ? found[i * width + 1] : 0);
        }
    }
    *count = std::min(*count, total);
    return CUDA_SUCCESS;
}

CUresult list_with_data(GraphList what, uint64_t handle, CUgraphNode* first, CUgraphNode* second,
                        CUgraphEdgeData* data, size_t* count) {
    if (data != nullptr && first == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = list(what, handle, first, second, count);
    if (r == CUDA_SUCCESS && data != nullptr) {
        std::fill_n(data, *count, CUgraphEdgeData{});
    }
    return r;
}

CUresult edit(Op op, CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, size_t count) {
    if (count != 0 && (from == nullptr || to == nullptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(op);
    call.in(handle_of(graph));
    put_handles(call.writer(), handles_of(from, count));
    put_handles(call.writer(), handles_of(to, count));
    return call.go();
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuGraphCreate(CUgraph* graph, unsigned int flags) {
    return graph == nullptr || flags != 0 ? CUDA_ERROR_INVALID_VALUE
                                          : rpc(Op::GraphCreate, outs(graph));
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
    const CUresult r = rpc(Op::GraphDestroy, outs(), handle_of(graph));
    if (r == CUDA_SUCCESS) {
        Process& p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        p.node_arguments.erase(handle_of(graph));
    }
    if (r == CUDA_SUCCESS) {
        drop_user_objects(handle_of(graph));
    }
    return r;
}

CUresult CUDAAPI cuGraphClone(CUgraph* clone, CUgraph graph) {
    if (clone == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = rpc(Op::GraphClone, outs(clone), handle_of(graph));
    if (r == CUDA_SUCCESS) {
        share_user_objects(handle_of(graph), handle_of(*clone));
    }
    return r;
}

CUresult CUDAAPI cuGraphNodeFindInClone(CUgraphNode* node, CUgraphNode original, CUgraph clone) {
    return node == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::GraphFindInClone, outs(node), handle_of(original), handle_of(clone));
}

CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode node) {
    return rpc(Op::GraphDestroyNode, outs(), handle_of(node));
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
    uint64_t graph = 0;
    int32_t found = 0;
    if (type == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = rpc(Op::GraphNodeParams, outs(&graph, &found), handle_of(node));
    if (r == CUDA_SUCCESS) {
        *type = static_cast<CUgraphNodeType>(found);
    }
    return r;
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                      size_t count, const CUDA_KERNEL_NODE_PARAMS_v1* params) {
    return add_from(node, graph, after, count, params);
}

CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         size_t count, const CUDA_KERNEL_NODE_PARAMS* params) {
    return add_from(node, graph, after, count, params);
}

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                      size_t count, const CUDA_MEMCPY3D* params,
                                      CUcontext context) {
    return add_from(node, graph, after, count, params, context);
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                      size_t count, const CUDA_MEMSET_NODE_PARAMS* params,
                                      CUcontext context) {
    return add_from(node, graph, after, count, params, context);
}

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                    size_t count, const CUDA_HOST_NODE_PARAMS* params) {
    return add_from(node, graph, after, count, params);
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                     size_t count) {
    return add(node, graph, after, count, {});
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph,
                                          const CUgraphNode* after, size_t count, CUgraph child) {
    const CUresult r = add(node, graph, after, count, spec_of_child(child));
    if (r == CUDA_SUCCESS) {
        share_user_objects(handle_of(child), handle_of(graph));
    }
    return r;
}

CUresult CUDAAPI cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph,
                                           const CUgraphNode* after, size_t count, CUevent event) {
    return add(node, graph, after, count, spec_of(event, CU_GRAPH_NODE_TYPE_EVENT_RECORD));
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         size_t count, CUevent event) {
    return add(node, graph, after, count, spec_of(event, CU_GRAPH_NODE_TYPE_WAIT_EVENT));
}

CUresult CUDAAPI cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                size_t count, CUgraphNodeParams* params) {
    return add_from(node, graph, after, count, static_cast<const CUgraphNodeParams*>(params));
}

CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                   const CUgraphEdgeData* data, size_t count,
                                   CUgraphNodeParams* params) {
    const CUresult r = plain_edges("cuGraphAddNode_v2 with edge data", data, count);
    return r != CUDA_SUCCESS ? r : cuGraphAddNode(node, graph, after, count, params);
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1* params) {
    CUDA_KERNEL_NODE_PARAMS_v2 newer;
    const CUresult r = params == nullptr ? CUDA_ERROR_INVALID_VALUE : kernel_params(node, &newer);
    if (r == CUDA_SUCCESS) {
        std::memcpy(params, &newer, sizeof *params);
    }
    return r;
}

CUresult CUDAAPI cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
    return kernel_params(node, params);
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode node,
                                            const CUDA_KERNEL_NODE_PARAMS_v1* params) {
    return set_from(node, params);
}

CUresult CUDAAPI cuGraphKernelNodeSetParams_v2(CUgraphNode node,
                                               const CUDA_KERNEL_NODE_PARAMS* params) {
    return set_from(node, params);
}

CUresult CUDAAPI cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                               CUkernelNodeAttrValue* value) {
    if (attribute != CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
        return unsupported("cuGraphKernelNodeGetAttribute but for cooperative launches");
    }
    return get_params(node, CU_GRAPH_NODE_TYPE_KERNEL, value, [=](const NodeParams& params) {
        value->cooperative = static_cast<int>(params.shape.cooperative);
    });
}

CUresult CUDAAPI cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                               const CUkernelNodeAttrValue* value) {
    if (attribute != CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
        return unsupported("cuGraphKernelNodeSetAttribute but for cooperative launches");
    }
    return value == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::GraphSetCooperative, outs(), handle_of(node),
                                  uint32_t{value->cooperative != 0});
}

CUresult CUDAAPI cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D* params) {
    return get_params(node, CU_GRAPH_NODE_TYPE_MEMCPY, params,
                      [=](const NodeParams& found) { *params = found.copy; });
}

CUresult CUDAAPI cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D* params) {
    return set_from(node, params, CUcontext{nullptr});
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS* params) {
    return get_params(node, CU_GRAPH_NODE_TYPE_MEMSET, params,
                      [=](const NodeParams& found) { *params = found.fill; });
}

CUresult CUDAAPI cuGraphMemsetNodeSetParams(CUgraphNode node,
                                            const CUDA_MEMSET_NODE_PARAMS* params) {
    return set_from(node, params, CUcontext{nullptr});
}

CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS* params) {
    return get_params(node, CU_GRAPH_NODE_TYPE_HOST, params, [=](const NodeParams& found) {
        params->fn = reinterpret_cast<CUhostFn>(found.object);
        params->userData = reinterpret_cast<void*>(found.data);
    });
}

CUresult CUDAAPI cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS* params) {
    return set_from(node, params);
}

CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams* params) {
    return set_from(node, static_cast<const CUgraphNodeParams*>(params));
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
    return get_object(node, CU_GRAPH_NODE_TYPE_GRAPH, graph);
}

CUresult CUDAAPI cuGraphEventRecordNodeGetEvent(CUgraphNode node, CUevent* event) {
    return get_object(node, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult CUDAAPI cuGraphEventRecordNodeSetEvent(CUgraphNode node, CUevent event) {
    return set_event(node, event, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
}

CUresult CUDAAPI cuGraphEventWaitNodeGetEvent(CUgraphNode node, CUevent* event) {
    return get_object(node, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult CUDAAPI cuGraphEventWaitNodeSetEvent(CUgraphNode node, CUevent event) {
    return set_event(node, event, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    return list(GraphList::kNodes, handle_of(graph), nodes, nullptr, count);
}

CUresult CUDAAPI cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    return list(GraphList::kRoots, handle_of(graph), nodes, nullptr, count);
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
    return list(GraphList::kEdges, handle_of(graph), from, to, count);
}

CUresult CUDAAPI cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to,
                                    CUgraphEdgeData* data, size_t* count) {
    return list_with_data(GraphList::kEdges, handle_of(graph), from, to, data, count);
}

CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
    return list(GraphList::kDependencies, handle_of(node), nodes, nullptr, count);
}

CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* nodes,
                                               CUgraphEdgeData* data, size_t* count) {
    return list_with_data(GraphList::kDependencies, handle_of(node), nodes, nullptr, data, count);
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode* nodes, size_t* count) {
    return list(GraphList::kDependents, handle_of(node), nodes, nullptr, count);
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode* nodes,
                                                 CUgraphEdgeData* data, size_t* count) {
    return list_with_data(GraphList::kDependents, handle_of(node), nodes, nullptr, data, count);
}

CUresult CUDAAPI cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from,
                                        const CUgraphNode* to, size_t count) {
    return edit(Op::GraphAddEdges, graph, from, to, count);
}

CUresult CUDAAPI cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode* from,
                                           const CUgraphNode* to, const CUgraphEdgeData* data,
                                           size_t count) {
    const CUresult r = plain_edges("cuGraphAddDependencies_v2 with edge data", data, count);
    return r != CUDA_SUCCESS ? r : edit(Op::GraphAddEdges, graph, from, to, count);
}

CUresult CUDAAPI cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode* from,
                                           const CUgraphNode* to, size_t count) {
    return edit(Op::GraphRemoveEdges, graph, from, to, count);
}

CUresult CUDAAPI cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode* from,
                                              const CUgraphNode* to, const CUgraphEdgeData* data,
                                              size_t count) {
    const CUresult r = plain_edges("cuGraphRemoveDependencies_v2 with edge data", data, count);
    return r != CUDA_SUCCESS ? r : edit(Op::GraphRemoveEdges, graph, from, to, count);
}

} // extern "C"
