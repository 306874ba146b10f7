// Stream capture.
#include "graph_nodes.h"

namespace flowgpu::emu {

namespace {

CUresult begin(CUstream stream, CUgraph graph, const CUgraphNode* after, size_t count,
               CUstreamCaptureMode mode) {
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED ||
        (after == nullptr && count != 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::CaptureBegin);
    call.in(handle_of(stream)).in(static_cast<int32_t>(mode)).in(handle_of(graph));
    put_handles(call.writer(), handles_of(after, count));
    return call.go();
}

struct CaptureInfo {
    CUstreamCaptureStatus status;
    uint64_t id;
    CUgraph graph;
    const CUgraphNode* frontier;
    const CUgraphEdgeData* edges;
    size_t count;
};

CUresult capture_info(CUstream stream, CaptureInfo* info) {
    Call call(Op::CaptureInfo);
    call.in(handle_of(stream));
    if (const CUresult r = call.go(); r != CUDA_SUCCESS) {
        return r;
    }
    info->status = static_cast<CUstreamCaptureStatus>(call.take<int32_t>());
    info->id = call.take<uint64_t>();
    info->graph = call.take<CUgraph>();
    const std::vector<uint64_t> nodes = take_handles(call.reader());
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    CaptureFrontier& kept = p.capture_frontiers[handle_of(stream)];
    kept.nodes.clear();
    for (const uint64_t node : nodes) {
        kept.nodes.push_back(reinterpret_cast<CUgraphNode>(node));
    }
    kept.edges.assign(nodes.size(), {});
    info->frontier = kept.nodes.data();
    info->edges = kept.edges.data();
    info->count = nodes.size();
    return CUDA_SUCCESS;
}

template <class T> void give(T* to, T value) {
    if (to != nullptr) {
        *to = value;
    }
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuStreamBeginCapture(CUstream stream) {
    return begin(stream, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin(stream, nullptr, nullptr, 0, mode);
}

CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph,
                                             const CUgraphNode* after, const CUgraphEdgeData* data,
                                             size_t count, CUstreamCaptureMode mode) {
    const CUresult r = plain_edges("cuStreamBeginCaptureToGraph with edge data", data, count);
    return graph == nullptr    ? CUDA_ERROR_INVALID_VALUE
           : r != CUDA_SUCCESS ? r
                               : begin(stream, graph, after, count, mode);
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    if (graph == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *graph = nullptr;
    return rpc(Op::CaptureEnd, outs(graph), handle_of(stream));
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status,
                                           cuuint64_t* id, CUgraph* graph,
                                           const CUgraphNode** after, const CUgraphEdgeData** data,
                                           size_t* count) {
    CaptureInfo info{};
    if (status == nullptr || (data != nullptr && after == nullptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = capture_info(stream, &info);
    if (r != CUDA_SUCCESS) {
        return r;
    }
    *status = info.status;
    if (info.status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        give(id, static_cast<cuuint64_t>(info.id));
        give(graph, info.graph);
        give(after, info.frontier);
        give(data, info.edges);
        give(count, info.count);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status,
                                           cuuint64_t* id, CUgraph* graph,
                                           const CUgraphNode** after, size_t* count) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, after, nullptr, count);
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status,
                                        cuuint64_t* id) {
    return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    return cuStreamGetCaptureInfo(stream, status, nullptr);
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* nodes,
                                                   size_t count, unsigned int flags) {
    if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (nodes == nullptr && count != 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::CaptureUpdate);
    call.in(handle_of(stream));
    put_handles(call.writer(), handles_of(nodes, count));
    call.in(uint8_t{flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES});
    return call.go();
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode* nodes,
                                                      const CUgraphEdgeData* data, size_t count,
                                                      unsigned int flags) {
    const CUresult r =
        plain_edges("cuStreamUpdateCaptureDependencies_v2 with edge data", data, count);
    return r != CUDA_SUCCESS ? r : cuStreamUpdateCaptureDependencies(stream, nodes, count, flags);
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS || mode == nullptr || *mode < 0 ||
        *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return entry.status() != CUDA_SUCCESS ? entry.status() : CUDA_ERROR_INVALID_VALUE;
    }
    const int now = *mode;
    *mode = static_cast<CUstreamCaptureMode>(thread_state().capture_mode);
    thread_state().capture_mode = now;
    return CUDA_SUCCESS;
}

} // extern "C"
