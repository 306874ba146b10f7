// Graphs: which operations of NCCL one has, so that its launch is counted as they are
// (flowgpu/nccl.h). Without such a graph in the process nothing is looked at.
#include "communicators.h"
#include "gate.h"
#include "handlers.h"

namespace flowgpu::handle {

namespace {

using communicators::Graph;

// `to` has what `from` has.
template <class To, class From> CUresult inherited(CUresult result, To* to, From from) {
    if (result == CUDA_SUCCESS && to && communicators::any_graph())
        communicators::graph(Graph::becomes, *to, from);
    return result;
}

template <class Handle> CUresult ended(CUresult result, Handle handle) {
    if (result == CUDA_SUCCESS && communicators::any_graph())
        communicators::graph(Graph::ends, handle, nullptr);
    return result;
}

template <class F> CUresult launched(CUgraphExec executable, CUstream stream, F launch) {
    if (!communicators::any_graph())
        return launch(executable, stream);
    // The thread may wait for the cut of a checkpoint, which is no work in the driver.
    gate::leave(0);
    const bool counted = communicators::begin_launch(executable, stream);
    gate::enter();
    const CUresult result = launch(executable, stream);
    if (counted)
        communicators::end_launch(executable, result == CUDA_SUCCESS);
    return result;
}

} // namespace

CUresult cuGraphLaunch(CUgraphExec hGraph, CUstream hStream) {
    return launched(hGraph, hStream, FG_REAL(cuGraphLaunch));
}

CUresult cuGraphLaunch_ptsz(CUgraphExec hGraph, CUstream hStream) {
    return launched(hGraph, hStream, FG_REAL(cuGraphLaunch_ptsz));
}

CUresult cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                            char* logBuffer, size_t bufferSize) {
    return inherited(
        FG_REAL(cuGraphInstantiate)(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize),
        phGraphExec, hGraph);
}

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode,
                               char* logBuffer, size_t bufferSize) {
    return inherited(
        FG_REAL(cuGraphInstantiate_v2)(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize),
        phGraphExec, hGraph);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph,
                                     unsigned long long flags) {
    return inherited(FG_REAL(cuGraphInstantiateWithFlags)(phGraphExec, hGraph, flags), phGraphExec,
                     hGraph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    return inherited(FG_REAL(cuGraphInstantiateWithParams)(phGraphExec, hGraph, instantiateParams),
                     phGraphExec, hGraph);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec* phGraphExec, CUgraph hGraph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
    return inherited(
        FG_REAL(cuGraphInstantiateWithParams_ptsz)(phGraphExec, hGraph, instantiateParams),
        phGraphExec, hGraph);
}

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
    return inherited(FG_REAL(cuGraphClone)(phGraphClone, originalGraph), phGraphClone,
                     originalGraph);
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
    return inherited(
        FG_REAL(cuGraphExecUpdate)(hGraphExec, hGraph, hErrorNode_out, updateResult_out),
        &hGraphExec, hGraph);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
                              CUgraphExecUpdateResultInfo* resultInfo) {
    return inherited(FG_REAL(cuGraphExecUpdate_v2)(hGraphExec, hGraph, resultInfo), &hGraphExec,
                     hGraph);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph,
                                  const CUgraphNode* dependencies, size_t numDependencies,
                                  CUgraph childGraph) {
    const CUresult result = FG_REAL(cuGraphAddChildGraphNode)(phGraphNode, hGraph, dependencies,
                                                              numDependencies, childGraph);
    if (result == CUDA_SUCCESS && communicators::any_graph())
        communicators::graph(Graph::takes, hGraph, childGraph);
    return result;
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    return ended(FG_REAL(cuGraphExecDestroy)(hGraphExec), hGraphExec);
}

CUresult cuGraphDestroy(CUgraph hGraph) {
    return ended(FG_REAL(cuGraphDestroy)(hGraph), hGraph);
}

} // namespace flowgpu::handle
