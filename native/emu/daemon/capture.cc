// Stream capture: what a capturing stream is given becomes nodes of a graph, in the order that
// streams and events give it. What conflicts with a capture is refused and makes it invalid.
#include "graph.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

bool touches(const Capture& capture, const Context& context, bool blocking_only) {
    return std::any_of(capture.streams.begin(), capture.streams.end(), [&](const auto& stream) {
        return stream->context.get() == &context &&
               (!blocking_only || (stream->flags & CU_STREAM_NON_BLOCKING) == 0);
    });
}

// The legacy stream would depend on each blocking stream that is captured.
std::vector<std::shared_ptr<Capture>> implicit_captures(const Client& client,
                                                        const Stream& stream) {
    std::vector<std::shared_ptr<Capture>> found;
    if (&stream == stream.context->null_stream.get()) {
        for (const auto& capture : client.captures) {
            if (touches(*capture, *stream.context, true)) {
                found.push_back(capture);
            }
        }
    }
    return found;
}

void join(Stream& stream, const std::vector<uint64_t>& nodes) {
    for (const uint64_t node : nodes) {
        if (std::find(stream.frontier.begin(), stream.frontier.end(), node) ==
            stream.frontier.end()) {
            stream.frontier.push_back(node);
        }
    }
}

// True if the origin stream's last nodes depend on the last nodes of every other captured stream.
bool joined(const Capture& capture) {
    std::set<uint64_t> before;
    std::vector<uint64_t> left = capture.origin->frontier;
    while (!left.empty()) {
        const auto node = capture.graph->find(left.back());
        left.pop_back();
        if (node != nullptr && before.insert(node->handle).second) {
            left.insert(left.end(), node->after.begin(), node->after.end());
        }
    }
    return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const auto& stream) {
        return std::all_of(stream->frontier.begin(), stream->frontier.end(),
                           [&](uint64_t node) { return before.count(node) != 0; });
    });
}

int32_t begin(Session& s, const std::shared_ptr<Stream>& stream, int32_t mode,
              const std::shared_ptr<Graph>& into, const std::vector<uint64_t>& after) {
    if (stream == stream->context->null_stream) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->capture != nullptr) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    auto capture = std::make_shared<Capture>();
    capture->id = ++s.client.next_id;
    capture->into_existing = into != nullptr;
    capture->graph = into != nullptr ? into : new_graph(s.client);
    capture->graph->capturing = true;
    capture->origin = stream;
    capture->thread = s.header.thread;
    capture->mode = mode;
    capture->streams.insert(stream);
    stream->capture = capture;
    stream->frontier = after;
    s.client.captures.push_back(std::move(capture));
    return CUDA_SUCCESS;
}

bool nodes_of(const Graph& graph, const std::vector<uint64_t>& nodes) {
    return std::all_of(nodes.begin(), nodes.end(), [&](uint64_t node) {
        const auto found = graph.find(node);
        return found != nullptr && found->graph == graph.handle;
    });
}

} // namespace

std::shared_ptr<Stream> Session::work_stream(uint64_t handle, CUresult* error) {
    const auto found = stream(handle, error);
    if (found == nullptr) {
        return nullptr;
    }
    const auto implicit = implicit_captures(client, *found);
    for (const auto& capture : implicit) {
        capture->invalid = true;
    }
    if (!implicit.empty() || (found->capture != nullptr && found->capture->invalid)) {
        *error = implicit.empty() ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                  : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        return nullptr;
    }
    return found;
}

CUresult Session::unsafe_call() {
    const int mode = header.flags >> kCaptureModeShift;
    bool refused = false;
    for (const auto& capture : client.captures) {
        const bool own = capture->thread == header.thread;
        if ((own && mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
             capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) ||
            (!own && mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
             capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
            capture->invalid = true;
            refused = true;
        }
    }
    return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

std::shared_ptr<Context> Session::context_for_unsafe(CUresult* error) {
    auto found = context(error);
    if (found != nullptr && (*error = unsafe_call()) != CUDA_SUCCESS) {
        return nullptr;
    }
    return found;
}

CUresult Session::breaks_capture(const Stream& stream) {
    stream.capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult Session::breaks_captures(const Context& context) {
    CUresult result = CUDA_SUCCESS;
    for (const auto& capture : client.captures) {
        if (touches(*capture, context, false)) {
            capture->invalid = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

int32_t capture_node(Session& s, Stream& stream, NodeSpec spec) {
    spec.fixed.context = stream.context->handle;
    int32_t error = CUDA_SUCCESS;
    const auto node = add_node(s, *stream.capture->graph, stream.frontier, std::move(spec), &error);
    if (node == nullptr) {
        stream.capture->invalid = true;
        return error;
    }
    stream.frontier = {node->handle};
    return CUDA_SUCCESS;
}

int32_t record_captured(Session& s, Stream& stream, Event& event, uint32_t flags) {
    if (flags == CU_EVENT_RECORD_EXTERNAL) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
        spec.fixed.object = event.handle;
        return capture_node(s, stream, std::move(spec));
    }
    event.captured = true;
    event.capture = stream.capture;
    event.frontier = stream.frontier;
    return CUDA_SUCCESS;
}

int32_t wait_captured(Session& s, const std::shared_ptr<Stream>& stream, const Event& event,
                      uint32_t flags) {
    const auto from = event.capture.lock();
    if (stream->capture != nullptr && flags == CU_EVENT_WAIT_EXTERNAL) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
        spec.fixed.object = event.handle;
        return capture_node(s, *stream, std::move(spec));
    }
    if (from == nullptr) { // never captured, or by a capture that has ended
        if (stream->capture != nullptr) {
            stream->capture->invalid = true;
        }
        return event.captured ? CUDA_ERROR_CAPTURED_EVENT : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (from->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (stream == stream->context->null_stream) {
        from->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture != nullptr && stream->capture != from) {
        stream->capture->invalid = from->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = from;
    from->streams.insert(stream);
    join(*stream, event.frontier);
    return CUDA_SUCCESS;
}

void end_capture(Client& client, const std::shared_ptr<Capture>& capture) {
    for (const auto& stream : capture->streams) {
        stream->capture.reset();
        stream->frontier.clear();
    }
    capture->streams.clear();
    capture->origin.reset();
    capture->graph->capturing = false;
    auto& all = client.captures;
    all.erase(std::remove(all.begin(), all.end(), capture), all.end());
}

int32_t op_CaptureBegin(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    const auto mode = s.in.take<int32_t>();
    const auto handle = s.in.take<uint64_t>();
    const std::vector<uint64_t> after = take_handles(s.in);
    if (stream == nullptr) {
        return error;
    }
    const auto into = s.client.find<Graph>(handle);
    if (handle != 0 && (into == nullptr || into->capturing || !nodes_of(*into, after))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return begin(s, stream, mode, into, after);
}

int32_t op_CaptureEnd(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    const auto capture = stream->capture;
    if (capture == nullptr) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (capture->origin != stream) {
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != s.header.thread) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    const CUresult result = capture->invalid   ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                            : joined(*capture) ? CUDA_SUCCESS
                                               : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    end_capture(s.client, capture);
    if (result != CUDA_SUCCESS && !capture->into_existing) {
        remove_graph(s.client, capture->graph);
    }
    s.out.put(capture->graph->handle);
    return result;
}

int32_t op_CaptureInfo(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (!implicit_captures(s.client, *stream).empty()) {
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    const auto& capture = stream->capture;
    s.out.put(int32_t{capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
                      : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                         : CU_STREAM_CAPTURE_STATUS_ACTIVE});
    s.out.put(capture == nullptr ? uint64_t{0} : capture->id);
    s.out.put(capture == nullptr ? uint64_t{0} : capture->graph->handle);
    put_handles(s.out, stream->frontier);
    return CUDA_SUCCESS;
}

int32_t op_CaptureUpdate(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    const std::vector<uint64_t> nodes = take_handles(s.in);
    const bool replace = s.in.take<uint8_t>() != 0;
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture == nullptr) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (!nodes_of(*stream->capture->graph, nodes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (replace) {
        stream->frontier.clear();
    }
    join(*stream, nodes);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
