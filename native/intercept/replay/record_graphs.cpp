// Captured graphs and executables.
#include "arguments.h"
#include "graphs.h"
#include "recorded.h"
#include "threads.h"

namespace flowgpu::replay::recorded {

namespace {

using Plan = std::shared_ptr<const GraphPlan>;

void refuse(unsigned symbol) {
    unsaved_calls[symbol].fetch_add(1, std::memory_order_relaxed);
}

CUgraph note_graph(CUgraph driver, bool fresh, const Plan& plan, const std::string& why) {
    return note(driver, fresh, [&](Object& object) {
        object.context = nullptr;
        object.plan = plan;
        object.why = why;
        if (plan)
            object.make =
                maker<CUgraph>([plan](CUgraph* again) { return build_graph(*plan, again); });
    });
}

// The plan of a graph or of an executable; null for one that is not recorded, with the reason.
Plan plan_of(const void* handle, std::string* why) {
    Plan plan;
    *why = "of a graph that is not recorded";
    with_object(handle, [&](Object& object) {
        plan = object.plan;
        *why = object.why;
    });
    return plan;
}

Make instantiate_again(const Plan& plan, unsigned long long flags) {
    return maker<CUgraphExec>([plan, flags](CUgraphExec* again) {
        CUgraph graph = nullptr;
        CUresult result = build_graph(*plan, &graph);
        if (result != CUDA_SUCCESS)
            return result;
        result = FG_DRIVER(cuGraphInstantiateWithFlags)(again, graph, flags);
        FG_DRIVER(cuGraphDestroy)(graph);
        return result;
    });
}

void set_plan(Object& object, const Plan& plan, const std::string& why) {
    object.plan = plan;
    object.why = why;
    object.make = plan ? instantiate_again(plan, object.uses) : nullptr;
}

// `call`: instantiates the driver's graph.
template <class F>
CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long flags, F call) {
    CUgraphExec made = nullptr;
    CUresult result = call(out ? &made : nullptr, to_driver(graph));
    if (result != CUDA_SUCCESS)
        return result;
    std::string why;
    Plan plan = plan_of(graph, &why);
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
        plan = nullptr;
        why = "that the device may launch";
    }
    *out = note(made, true, [&](Object& object) {
        object.context = nullptr;
        object.uses = flags;
        set_plan(object, plan, why);
    });
    return result;
}

template <class F> CUresult update(CUgraphExec executable, CUgraph graph, F call) {
    CUresult result = call(to_driver(executable), to_driver(graph));
    if (result != CUDA_SUCCESS)
        return result;
    std::string why;
    const Plan plan = plan_of(graph, &why);
    with_object(executable, [&](Object& object) { set_plan(object, plan, why); });
    return result;
}

CUresult end_capture(CUstream stream, CUgraph* out, CUresult (*function)(CUstream, CUgraph*)) {
    CUgraph driver = nullptr;
    CUresult result = function(to_driver(stream), out ? &driver : nullptr);
    if (result != CUDA_SUCCESS || !driver) {
        if (out)
            *out = nullptr;
        return result;
    }
    CUcontext context = nullptr;
    std::string why;
    // A per-thread stream under its null name is of the current context, as any without a handle.
    if (FG_DRIVER(cuStreamGetCtx)(to_driver(stream), &context) != CUDA_SUCCESS)
        why = "from a stream of unknown context";
    const Plan plan = why.empty() ? read_graph(driver, to_program(context), &why) : nullptr;
    // Known is one that it was captured into, or that was asked for before: refused by that call.
    *out = note_graph(driver, false, plan, why);
    return result;
}

// Nodes have no handles of ours, and what has one of a graph under capture may change it.
CUresult capture_asked(CUresult result, const CUstreamCaptureStatus* status, unsigned symbol,
                       CUgraph* graph, const void* nodes) {
    if (result != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return result;
    if (graph)
        *graph = to_program(*graph);
    if (graph || nodes)
        refuse(symbol);
    return result;
}

// Nodes have none at any time; to count them is harmless.
CUresult nodes_asked(CUresult result, unsigned symbol, bool handles) {
    if (result == CUDA_SUCCESS && handles)
        refuse(symbol);
    return result;
}

} // namespace

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
    return end_capture(hStream, phGraph, FG_DRIVER(cuStreamEndCapture));
}

CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph* phGraph) {
    return end_capture(hStream, phGraph, FG_DRIVER(cuStreamEndCapture_ptsz));
}

#define FG_CAPTURE_INFO(name, graph, nodes, parameters, arguments)                                 \
    CUresult name parameters {                                                                     \
        return capture_asked(FG_DRIVER(name) arguments, captureStatus_out, I_##name, graph,        \
                             nodes);                                                               \
    }
FG_CAPTURE_INFO(cuStreamGetCaptureInfo, nullptr, nullptr,
                (CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out),
                (to_driver(hStream), captureStatus_out, id_out))
FG_CAPTURE_INFO(cuStreamGetCaptureInfo_ptsz, nullptr, nullptr,
                (CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out),
                (to_driver(hStream), captureStatus_out, id_out))
#define FG_CAPTURE_INFO_V2(name)                                                                   \
    FG_CAPTURE_INFO(name, graph_out, dependencies_out,                                             \
                    (CUstream hStream, CUstreamCaptureStatus * captureStatus_out,                  \
                     cuuint64_t * id_out, CUgraph * graph_out,                                     \
                     const CUgraphNode** dependencies_out, size_t* numDependencies_out),           \
                    (to_driver(hStream), captureStatus_out, id_out, graph_out, dependencies_out,   \
                     numDependencies_out))
FG_CAPTURE_INFO_V2(cuStreamGetCaptureInfo_v2)
FG_CAPTURE_INFO_V2(cuStreamGetCaptureInfo_v2_ptsz)
#define FG_CAPTURE_INFO_V3(name)                                                                   \
    FG_CAPTURE_INFO(name, graph_out, dependencies_out,                                             \
                    (CUstream hStream, CUstreamCaptureStatus * captureStatus_out,                  \
                     cuuint64_t * id_out, CUgraph * graph_out,                                     \
                     const CUgraphNode** dependencies_out, const CUgraphEdgeData** edgeData_out,   \
                     size_t* numDependencies_out),                                                 \
                    (to_driver(hStream), captureStatus_out, id_out, graph_out, dependencies_out,   \
                     edgeData_out, numDependencies_out))
FG_CAPTURE_INFO_V3(cuStreamGetCaptureInfo_v3)
FG_CAPTURE_INFO_V3(cuStreamGetCaptureInfo_v3_ptsz)
#undef FG_CAPTURE_INFO_V3
#undef FG_CAPTURE_INFO_V2
#undef FG_CAPTURE_INFO

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
    CUgraph driver = nullptr;
    CUresult result =
        FG_DRIVER(cuGraphClone)(phGraphClone ? &driver : nullptr, to_driver(originalGraph));
    if (result != CUDA_SUCCESS)
        return result;
    std::string why;
    const Plan plan = plan_of(originalGraph, &why);
    *phGraphClone = note_graph(driver, true, plan, why);
    return result;
}

CUresult cuGraphDestroy(CUgraph hGraph) {
    return destroy(hGraph, FG_DRIVER(cuGraphDestroy));
}

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes, size_t* numNodes) {
    return nodes_asked(FG_DRIVER(cuGraphGetNodes)(to_driver(hGraph), nodes, numNodes),
                       I_cuGraphGetNodes, nodes);
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes, size_t* numRootNodes) {
    return nodes_asked(FG_DRIVER(cuGraphGetRootNodes)(to_driver(hGraph), rootNodes, numRootNodes),
                       I_cuGraphGetRootNodes, rootNodes);
}

CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, size_t* numEdges) {
    return nodes_asked(FG_DRIVER(cuGraphGetEdges)(to_driver(hGraph), from, to, numEdges),
                       I_cuGraphGetEdges, from);
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to,
                            CUgraphEdgeData* edgeData, size_t* numEdges) {
    return nodes_asked(
        FG_DRIVER(cuGraphGetEdges_v2)(to_driver(hGraph), from, to, edgeData, numEdges),
        I_cuGraphGetEdges_v2, from);
}

CUresult cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                            char* logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiate)(made, graph, phErrorNode, logBuffer, bufferSize);
    });
}

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                               char* logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiate_v2)(made, graph, phErrorNode, logBuffer, bufferSize);
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph,
                                     unsigned long long flags) {
    return instantiate(phGraphExec, hGraph, flags, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiateWithFlags)(made, graph, flags);
    });
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    constexpr unsigned long long once = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    const unsigned long long flags = instantiateParams ? instantiateParams->flags & ~once : 0;
    return instantiate(phGraphExec, hGraph, flags, [&](CUgraphExec* made, CUgraph graph) {
        return DriverCall(FG_DRIVER(cuGraphInstantiateWithParams))(made, graph, instantiateParams);
    });
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* phGraphExec, CUgraph hGraph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    constexpr unsigned long long once = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    const unsigned long long flags = instantiateParams ? instantiateParams->flags & ~once : 0;
    return instantiate(phGraphExec, hGraph, flags, [&](CUgraphExec* made, CUgraph graph) {
        return DriverCall(FG_DRIVER(cuGraphInstantiateWithParams_ptsz))(made, graph,
                                                                        instantiateParams);
    });
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    return destroy(hGraphExec, FG_DRIVER(cuGraphExecDestroy));
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
    return update(hGraphExec, hGraph, [&](CUgraphExec executable, CUgraph graph) {
        return FG_DRIVER(cuGraphExecUpdate)(executable, graph, hErrorNode_out, updateResult_out);
    });
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
                              CUgraphExecUpdateResultInfo* resultInfo) {
    return update(hGraphExec, hGraph, [&](CUgraphExec executable, CUgraph graph) {
        return FG_DRIVER(cuGraphExecUpdate_v2)(executable, graph, resultInfo);
    });
}

} // namespace flowgpu::replay::recorded
