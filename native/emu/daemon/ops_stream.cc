// Streams, events and host functions.
#include "graph.h"

#include "transport.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

constexpr int32_t kGreatestPriority = -5;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
        .count();
}

// Runs in a stream's thread: the client calls the function and says when it returned.
void call_client(const std::shared_ptr<Client>& client, const std::vector<uint8_t>& what) {
    std::lock_guard<std::mutex> one(client->callback_mutex);
    const RequestHeader request{static_cast<uint32_t>(what.size()), Op::StreamCallback, 0, 0, 0};
    ReplyHeader reply{};
    std::vector<uint8_t> payload;
    if (send_message(client->callback_socket, &request, sizeof request, what, -1)) {
        receive_message(client->callback_socket, &reply, sizeof reply, payload, nullptr);
    }
}

std::shared_ptr<Event> event_of(Session& s, CUresult* error) {
    auto event = s.client.find<Event>(s.in.take<uint64_t>());
    if (event == nullptr) {
        *error = CUDA_ERROR_INVALID_HANDLE;
    } else if (event->context->sticky != CUDA_SUCCESS) {
        *error = static_cast<CUresult>(event->context->sticky.load());
        return nullptr;
    }
    return event;
}

// A query of an event that a capture recorded, or of another that a capture would not see.
int32_t queried(Session& s, const Event& event) {
    if (!event.captured) {
        return s.unsafe_call();
    }
    if (const auto capture = event.capture.lock()) {
        capture->invalid = true;
    }
    return CUDA_ERROR_CAPTURED_EVENT;
}

} // namespace

std::function<void()> host_work(Client& client, HostKind kind, uint64_t function, uint64_t data,
                                uint64_t stream) {
    Writer what;
    what.put(kind);
    what.put(function);
    what.put(data);
    what.put(stream);
    what.put(int32_t{CUDA_SUCCESS});
    return [self = client.shared_from_this(), bytes = what.buffer()] { call_client(self, bytes); };
}

std::function<void()> record_work(Event& event) {
    event.stamp = std::make_shared<EventStamp>();
    event.recorded = true;
    event.captured = false;
    event.capture.reset();
    return [stamp = event.stamp] { stamp->nanoseconds = now_ns(); };
}

int32_t op_StreamCreate(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto flags = s.in.take<uint32_t>();
    const auto priority = s.in.take<int32_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    auto stream = s.client.make<Stream>();
    stream->context = context;
    stream->flags = flags;
    stream->priority = std::clamp(priority, kGreatestPriority, 0);
    stream->id = ++s.client.next_id;
    context->streams[stream->handle] = stream;
    s.out.put(stream->handle);
    return CUDA_SUCCESS;
}

int32_t op_StreamDestroy(Session& s) {
    const auto stream = s.client.find<Stream>(s.in.take<uint64_t>());
    if (stream == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != nullptr) {
        return s.breaks_capture(*stream);
    }
    // Its work goes on behind the handle, and is waited for with the context's.
    auto& ended = stream->context->ended;
    ended.erase(std::remove_if(ended.begin(), ended.end(), [](const auto& s) { return s->idle(); }),
                ended.end());
    if (!stream->idle()) {
        ended.push_back(stream);
    }
    stream->context->streams.erase(stream->handle);
    s.client.objects.erase(stream->handle);
    return CUDA_SUCCESS;
}

int32_t op_StreamSynchronize(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return s.breaks_capture(*stream);
    }
    const auto context = stream->context;
    if (stream == context->null_stream) {
        // Everything before it on blocking streams is before its end.
        for (const auto& other : s.client.streams_of(*context)) {
            if ((other->flags & CU_STREAM_NON_BLOCKING) == 0) {
                s.wait(other->last);
            }
        }
    } else {
        s.wait(stream->last);
    }
    return context->sticky.load();
}

int32_t op_StreamQuery(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return s.breaks_capture(*stream);
    }
    return stream->idle() ? stream->context->sticky.load() : CUDA_ERROR_NOT_READY;
}

int32_t op_StreamWaitEvent(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    const auto event = s.client.find<Event>(s.in.take<uint64_t>());
    const auto flags = s.in.take<uint32_t>();
    if (stream == nullptr) {
        return error;
    }
    if (event == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != nullptr || event->captured) {
        return wait_captured(s, stream, *event, flags);
    }
    if (flags != CU_EVENT_WAIT_DEFAULT) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!event->done()) {
        submit(s.client, stream, [] {}, {event->ticket});
    }
    return CUDA_SUCCESS;
}

int32_t op_StreamInfo(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const auto stream = s.stream(s.in.take<uint64_t>(), &error)) {
        s.out.put(stream->flags);
        s.out.put(stream->priority);
        s.out.put(stream->id);
        s.out.put(stream->context->handle);
        s.out.put(s.client.ordinal(*stream->context->device));
    }
    return error;
}

namespace {

// Gives the value that an attribute of a stream has before the program sets it.
bool initial_attribute(const Stream& stream, int32_t attribute, CUstreamAttrValue* value) {
    switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        value->priority = stream.priority;
        return true;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        value->syncPolicy = static_cast<CUsynchronizationPolicy>(-1); // measured: none
        return true;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        value->memSyncDomainMap.remote = 1;
        return true;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        return true;
    default:
        return false;
    }
}

} // namespace

int32_t op_StreamGetAttribute(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    const auto attribute = s.in.take<int32_t>();
    if (stream == nullptr) {
        return error;
    }
    CUstreamAttrValue value{};
    if (!initial_attribute(*stream, attribute, &value)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto set = stream->attributes.find(attribute);
    s.out.put(set != stream->attributes.end() ? set->second : value);
    return CUDA_SUCCESS;
}

namespace {

bool is_valid(int32_t attribute, const CUstreamAttrValue& value) {
    switch (attribute) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        return value.syncPolicy >= CU_SYNC_POLICY_AUTO &&
               value.syncPolicy <= CU_SYNC_POLICY_BLOCKING_SYNC;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        return value.memSyncDomain == CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT ||
               value.memSyncDomain == CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
    default:
        return true;
    }
}

} // namespace

// But for the priority they change nothing here.
int32_t op_StreamSetAttribute(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    const auto attribute = s.in.take<int32_t>();
    const auto value = s.in.take<CUstreamAttrValue>();
    CUstreamAttrValue initial{};
    if (stream == nullptr) {
        return error;
    }
    if (!initial_attribute(*stream, attribute, &initial) || !is_valid(attribute, value)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
        stream->priority = std::clamp(value.priority, kGreatestPriority, 0);
    } else {
        stream->attributes[attribute] = value;
    }
    return CUDA_SUCCESS;
}

int32_t op_StreamCopyAttributes(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto to = s.stream(s.in.take<uint64_t>(), &error);
    const auto from = s.stream(s.in.take<uint64_t>(), &error);
    if (to == nullptr || from == nullptr) {
        return error;
    }
    if (to->context != from->context) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    to->priority = from->priority;
    to->attributes = from->attributes;
    return CUDA_SUCCESS;
}

int32_t op_StreamCallback(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto kind = s.in.take<HostKind>();
    const auto function = s.in.take<uint64_t>();
    const auto data = s.in.take<uint64_t>();
    const auto handle = s.in.take<uint64_t>();
    const auto stream = s.work_stream(handle, &error);
    if (stream == nullptr) {
        return error;
    }
    if (s.client.callback_socket < 0) {
        return CUDA_ERROR_NOT_PERMITTED;
    }
    if (stream->capture != nullptr) {
        if (kind == HostKind::kStreamCallback) {
            return s.breaks_capture(*stream);
        }
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_HOST;
        spec.fixed.object = function;
        spec.fixed.data = data;
        return capture_node(s, *stream, std::move(spec));
    }
    submit(s.client, stream, host_work(s.client, kind, function, data, handle));
    return CUDA_SUCCESS;
}

int32_t op_EventCreate(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto flags = s.in.take<uint32_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    auto event = s.client.make<Event>();
    event->context = context;
    event->flags = flags;
    s.out.put(event->handle);
    return CUDA_SUCCESS;
}

int32_t op_EventDestroy(Session& s) {
    const auto event = s.client.find<Event>(s.in.take<uint64_t>());
    if (event == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    s.client.objects.erase(event->handle);
    return CUDA_SUCCESS;
}

int32_t op_EventRecord(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    const auto event = event_of(s, &error);
    if (event == nullptr) {
        return error;
    }
    if (stream->context != event->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const auto flags = s.in.take<uint32_t>();
    if (stream->capture != nullptr) {
        return record_captured(s, *stream, *event, flags);
    }
    if (flags != CU_EVENT_RECORD_DEFAULT) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    event->ticket = submit(s.client, stream, record_work(*event));
    return CUDA_SUCCESS;
}

int32_t op_EventQuery(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto event = event_of(s, &error);
    if (event == nullptr) {
        return error;
    }
    if (const int32_t r = queried(s, *event); r != CUDA_SUCCESS) {
        return r;
    }
    return event->done() ? event->context->sticky.load() : CUDA_ERROR_NOT_READY;
}

int32_t op_EventSynchronize(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto event = event_of(s, &error);
    if (event == nullptr) {
        return error;
    }
    if (const int32_t r = queried(s, *event); r != CUDA_SUCCESS) {
        return r;
    }
    s.wait(event->ticket);
    return event->context->sticky.load();
}

int32_t op_EventElapsed(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto start = event_of(s, &error);
    const auto end = event_of(s, &error);
    if (start == nullptr || end == nullptr) {
        return error;
    }
    if (start->captured || end->captured) {
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (!start->recorded || !end->recorded ||
        ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!start->done() || !end->done()) {
        return CUDA_ERROR_NOT_READY;
    }
    s.out.put(static_cast<float>(end->stamp->nanoseconds - start->stamp->nanoseconds) / 1e6f);
    return CUDA_SUCCESS;
}

// Everything that was submitted before a lock finishes; 0 ms means to wait as long as it takes.
int32_t op_Drain(Session& s) {
    const auto timeout = s.in.take<uint32_t>();
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout);
    std::vector<TicketRef> pending;
    for (const auto& [handle, context] : s.client.contexts) {
        for (const auto& stream : s.client.streams_of(*context)) {
            if (!stream->idle()) {
                pending.push_back(stream->last);
            }
        }
    }
    for (const TicketRef& ticket : pending) {
        if (timeout == 0) {
            s.wait(ticket);
            continue;
        }
        s.lock.unlock();
        const bool done = ticket->wait_until(deadline);
        s.lock.lock();
        if (!done) {
            return CUDA_ERROR_NOT_READY;
        }
    }
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
