// Graphs and executables.
#include "arguments.h"
#include "graphs.h"
#include "recorded.h"
#include "registry.h"
#include "threads.h"

namespace flowgpu::replay::recorded {

namespace {

using Plan = std::shared_ptr<GraphPlan>;

// `driver`: a graph that nothing contains. `context`: of its nodes, if that is known.
CUgraph note_graph(CUgraph driver, bool fresh, CUcontext context) {
    return note(driver, fresh, [&](Object& object) {
        object.context = nullptr;
        object.graph = std::make_shared<GraphState>();
        object.graph->context = context;
    });
}

// Runs with what is kept of a graph, a node or an executable.
template <class F> void with_state(const void* handle, F work) {
    with_object(handle, [&](Object& object) {
        if (object.graph)
            work(*object.graph);
    });
}

void set_plan(Object& object, const Plan& plan, const std::string& why) {
    object.graph->plan = plan;
    object.graph->by_origin.clear();
    object.why = why;
    object.make = nullptr;
    if (plan)
        object.make = Make(
            I_cuGraphInstantiateWithFlags,
            [state = object.graph](void** again, uint64_t flags) {
                return make_executable(*state, flags, reinterpret_cast<CUgraphExec*>(again));
            },
            object.uses);
}

// `call`: instantiates the driver's graph. `bad`: where it puts a node of it.
template <class F>
CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long flags, CUgraphNode* bad,
                     F call) {
    CUgraphExec made = nullptr;
    CUresult result = call(out ? &made : nullptr, to_driver(graph));
    if (bad)
        *bad = node_to_program(*bad, graph);
    if (result != CUDA_SUCCESS)
        return result;
    std::string why;
    Plan plan;
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
        why = "that the device may launch";
    else
        plan = read_graph(to_driver(graph), &why);
    Retained retained;
    with_state(graph, [&](const GraphState& state) { retained = state.retained; });
    *out = note(made, true, [&](Object& object) {
        object.context = nullptr;
        object.uses = flags;
        object.graph = std::make_shared<GraphState>();
        object.graph->retained = retained;
        set_plan(object, plan, why);
    });
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
        *out = made; // a kernel may be given it, so the program has the driver's own handle
    return result;
}

// What the record has of an executable that the program knows by the driver's handle, if it has.
CUgraphExec noted(CUgraphExec handle) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto& index = registry().index_of(Kind::executable);
    const auto found = index.find(handle);
    return found == index.end() ? handle : reinterpret_cast<CUgraphExec>(found->second->slot);
}

template <class F> CUresult update(CUgraphExec executable, CUgraph graph, F call) {
    CUresult result = call(to_driver(executable), to_driver(graph));
    if (result != CUDA_SUCCESS)
        return result;
    std::string why;
    Plan plan = read_graph(to_driver(graph), &why);
    Retained retained;
    with_state(graph, [&](const GraphState& state) { retained = state.retained; });
    with_object(executable, [&](Object& object) {
        object.graph->retained = retained; // they take the place of what it had
        if (plan && (!object.graph->plan || !take_place(*plan, *object.graph->plan))) {
            plan = nullptr;
            why = "that was updated from a graph whose nodes are in another order";
        }
        set_plan(object, plan, why);
    });
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
    // A per-thread stream under its null name is of the current context, as any without a handle.
    FG_DRIVER(cuStreamGetCtx)(to_driver(stream), &context);
    context = to_program(context);
    // Known is one that it was captured into, or that was asked for before.
    *out = note_graph(driver, false, context);
    with_state(*out, [&](GraphState& state) {
        state.capturing = false;
        if (!state.context)
            state.context = context;
        if (state.context != context)
            state.lost = kMixed;
    });
    return result;
}

std::vector<CUgraphNode> drivers_of(const CUgraphNode* nodes, size_t count) {
    std::vector<CUgraphNode> drivers;
    for (size_t i = 0; nodes && i < count; i++)
        drivers.push_back(to_driver(nodes[i]));
    return drivers;
}

struct Asked {
    const CUstreamCaptureStatus* status;
    CUgraph* graph;
    const CUgraphNode** nodes;
    size_t* count;
};

// What a program asks of a capture. `call` puts the driver's graph, and its nodes if they are
// asked.
template <class F> CUresult capture_asked(const Asked& asked, F call) {
    CUgraph driver = nullptr;
    const CUgraphNode* nodes = nullptr;
    size_t count = 0;
    CUresult result =
        call(asked.graph || asked.nodes ? &driver : nullptr, asked.nodes ? &nodes : nullptr,
             asked.nodes || asked.count ? &count : nullptr);
    if (result != CUDA_SUCCESS || *asked.status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return result;
    const CUgraph graph = note(driver, false, [&](Object& object) {
        object.context = nullptr;
        object.graph = std::make_shared<GraphState>();
        object.graph->capturing = true;
    });
    if (asked.graph)
        *asked.graph = graph;
    if (asked.count)
        *asked.count = count;
    if (!asked.nodes)
        return result;
    std::vector<CUgraphNode> ours;
    for (size_t i = 0; i < count; i++)
        ours.push_back(node_to_program(nodes[i], graph));
    std::lock_guard<std::mutex> lock(registry().mutex);
    *asked.nodes = count ? (registry().frontiers[nodes] = std::move(ours)).data() : nodes;
    return result;
}

} // namespace

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
    return end_capture(hStream, phGraph, FG_DRIVER(cuStreamEndCapture));
}

CUresult cuStreamEndCapture_ptsz(CUstream hStream, CUgraph* phGraph) {
    return end_capture(hStream, phGraph, FG_DRIVER(cuStreamEndCapture_ptsz));
}

CUresult cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                cuuint64_t* id_out) {
    return DriverCall(FG_DRIVER(cuStreamGetCaptureInfo))(hStream, captureStatus_out, id_out);
}

CUresult cuStreamGetCaptureInfo_ptsz(CUstream hStream, CUstreamCaptureStatus* captureStatus_out,
                                     cuuint64_t* id_out) {
    return DriverCall(FG_DRIVER(cuStreamGetCaptureInfo_ptsz))(hStream, captureStatus_out, id_out);
}

#define FG_CAPTURE_INFO_V2(name)                                                                   \
    CUresult name(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,  \
                  CUgraph* graph_out, const CUgraphNode** dependencies_out,                        \
                  size_t* numDependencies_out) {                                                   \
        return capture_asked(                                                                      \
            {captureStatus_out, graph_out, dependencies_out, numDependencies_out},                 \
            [&](CUgraph* graph, const CUgraphNode** nodes, size_t* count) {                        \
                return FG_DRIVER(name)(to_driver(hStream), captureStatus_out, id_out, graph,       \
                                       nodes, count);                                              \
            });                                                                                    \
    }
FG_CAPTURE_INFO_V2(cuStreamGetCaptureInfo_v2)
FG_CAPTURE_INFO_V2(cuStreamGetCaptureInfo_v2_ptsz)
#undef FG_CAPTURE_INFO_V2

#define FG_CAPTURE_INFO_V3(name)                                                                   \
    CUresult name(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,  \
                  CUgraph* graph_out, const CUgraphNode** dependencies_out,                        \
                  const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out) {             \
        return capture_asked(                                                                      \
            {captureStatus_out, graph_out, dependencies_out, numDependencies_out},                 \
            [&](CUgraph* graph, const CUgraphNode** nodes, size_t* count) {                        \
                return FG_DRIVER(name)(to_driver(hStream), captureStatus_out, id_out, graph,       \
                                       nodes, edgeData_out, count);                                \
            });                                                                                    \
    }
FG_CAPTURE_INFO_V3(cuStreamGetCaptureInfo_v3)
FG_CAPTURE_INFO_V3(cuStreamGetCaptureInfo_v3_ptsz)
#undef FG_CAPTURE_INFO_V3

#define FG_UPDATE_FRONTIER(name)                                                                   \
    CUresult name(CUstream hStream, CUgraphNode* dependencies, size_t numDependencies,             \
                  unsigned flags) {                                                                \
        std::vector<CUgraphNode> drivers = drivers_of(dependencies, numDependencies);              \
        return FG_DRIVER(name)(to_driver(hStream), dependencies ? drivers.data() : nullptr,        \
                               numDependencies, flags);                                            \
    }
FG_UPDATE_FRONTIER(cuStreamUpdateCaptureDependencies)
FG_UPDATE_FRONTIER(cuStreamUpdateCaptureDependencies_ptsz)
#undef FG_UPDATE_FRONTIER

#define FG_UPDATE_FRONTIER_V2(name)                                                                \
    CUresult name(CUstream hStream, CUgraphNode* dependencies,                                     \
                  const CUgraphEdgeData* dependencyData, size_t numDependencies, unsigned flags) { \
        std::vector<CUgraphNode> drivers = drivers_of(dependencies, numDependencies);              \
        return FG_DRIVER(name)(to_driver(hStream), dependencies ? drivers.data() : nullptr,        \
                               dependencyData, numDependencies, flags);                            \
    }
FG_UPDATE_FRONTIER_V2(cuStreamUpdateCaptureDependencies_v2)
FG_UPDATE_FRONTIER_V2(cuStreamUpdateCaptureDependencies_v2_ptsz)
#undef FG_UPDATE_FRONTIER_V2

CUresult cuGraphCreate(CUgraph* phGraph, unsigned flags) {
    CUgraph driver = nullptr;
    CUresult result = FG_DRIVER(cuGraphCreate)(phGraph ? &driver : nullptr, flags);
    if (result == CUDA_SUCCESS)
        *phGraph = note_graph(driver, true, nullptr);
    return result;
}

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
    CUgraph driver = nullptr;
    CUresult result =
        FG_DRIVER(cuGraphClone)(phGraphClone ? &driver : nullptr, to_driver(originalGraph));
    if (result != CUDA_SUCCESS)
        return result;
    bool mixed = false;
    CUcontext context = nullptr;
    std::pair<const void*, uint64_t> source;
    Retained retained;
    with_object(originalGraph, [&](const Object& object) {
        if (!object.graph)
            return;
        mixed = object.graph->mixed;
        context = object.graph->context;
        source = {originalGraph, object.serial};
        retained = object.graph->retained;
    });
    *phGraphClone = note_graph(driver, true, context);
    with_state(*phGraphClone, [&](GraphState& state) {
        state.lost = mixed ? kMixed : nullptr;
        state.source = source;
        state.retained = retained;
    });
    return result;
}

CUresult cuGraphDestroy(CUgraph hGraph) {
    return destroy(hGraph, FG_DRIVER(cuGraphDestroy));
}

CUresult cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                            char* logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0, phErrorNode, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiate)(made, graph, phErrorNode, logBuffer, bufferSize);
    });
}

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                               char* logBuffer, size_t bufferSize) {
    return instantiate(phGraphExec, hGraph, 0, phErrorNode, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiate_v2)(made, graph, phErrorNode, logBuffer, bufferSize);
    });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph,
                                     unsigned long long flags) {
    return instantiate(phGraphExec, hGraph, flags, nullptr, [&](CUgraphExec* made, CUgraph graph) {
        return FG_DRIVER(cuGraphInstantiateWithFlags)(made, graph, flags);
    });
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    constexpr unsigned long long once = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    const unsigned long long flags = instantiateParams ? instantiateParams->flags & ~once : 0;
    CUgraphNode* bad = instantiateParams ? &instantiateParams->hErrNode_out : nullptr;
    return instantiate(phGraphExec, hGraph, flags, bad, [&](CUgraphExec* made, CUgraph graph) {
        return DriverCall(FG_DRIVER(cuGraphInstantiateWithParams))(made, graph, instantiateParams);
    });
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* phGraphExec, CUgraph hGraph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    constexpr unsigned long long once = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    const unsigned long long flags = instantiateParams ? instantiateParams->flags & ~once : 0;
    CUgraphNode* bad = instantiateParams ? &instantiateParams->hErrNode_out : nullptr;
    return instantiate(phGraphExec, hGraph, flags, bad, [&](CUgraphExec* made, CUgraph graph) {
        return DriverCall(FG_DRIVER(cuGraphInstantiateWithParams_ptsz))(made, graph,
                                                                        instantiateParams);
    });
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    CUgraph own = nullptr;
    hGraphExec = noted(hGraphExec);
    with_state(hGraphExec, [&](const GraphState& state) { own = state.own; });
    CUresult result = destroy(hGraphExec, FG_DRIVER(cuGraphExecDestroy));
    if (result == CUDA_SUCCESS && own)
        FG_DRIVER(cuGraphDestroy)(own);
    return result;
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
    return update(hGraphExec, hGraph, [&](CUgraphExec executable, CUgraph graph) {
        CUresult result =
            FG_DRIVER(cuGraphExecUpdate)(executable, graph, hErrorNode_out, updateResult_out);
        if (hErrorNode_out)
            *hErrorNode_out = node_to_program(*hErrorNode_out, hGraph);
        return result;
    });
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
                              CUgraphExecUpdateResultInfo* resultInfo) {
    return update(hGraphExec, hGraph, [&](CUgraphExec executable, CUgraph graph) {
        CUresult result = FG_DRIVER(cuGraphExecUpdate_v2)(executable, graph, resultInfo);
        if (resultInfo) {
            resultInfo->errorNode = node_to_program(resultInfo->errorNode, hGraph);
            resultInfo->errorFromNode = node_to_program(resultInfo->errorFromNode, hGraph);
        }
        return result;
    });
}

} // namespace flowgpu::replay::recorded
