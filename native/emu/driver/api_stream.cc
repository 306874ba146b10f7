// Streams, events and host functions.
#include "client.h"

#include <csignal>
#include <pthread.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

uint64_t handle_of(CUstream stream) {
    return reinterpret_cast<uint64_t>(stream);
}

uint64_t handle_of(CUevent event) {
    return reinterpret_cast<uint64_t>(event);
}

struct StreamInfo {
    uint32_t flags = 0;
    int32_t priority = 0;
    uint64_t id = 0;
    CUcontext context = nullptr;
    int32_t device = 0;
};

template <class Field, class T>
CUresult stream_field(CUstream stream, Field StreamInfo::* field, T* value) {
    StreamInfo info;
    const CUresult r = rpc(Op::StreamInfo,
                           outs(&info.flags, &info.priority, &info.id, &info.context, &info.device),
                           handle_of(stream));
    if (r == CUDA_SUCCESS && value != nullptr) {
        *value = info.*field;
    }
    return r == CUDA_SUCCESS && value == nullptr ? CUDA_ERROR_INVALID_VALUE : r;
}

// On this connection the device asks and the library answers.
void* run_callbacks(void* argument) {
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(argument));
    ::pthread_setname_np(::pthread_self(), "cuda-callbacks");
    thread_state().in_callback = true;
    for (;;) {
        RequestHeader request{};
        std::vector<uint8_t> payload;
        if (!receive_message(fd, &request, sizeof request, payload, nullptr)) {
            break;
        }
        Reader reader(payload.data(), payload.size());
        const auto kind = reader.take<HostKind>();
        const auto function = reader.take<uint64_t>();
        void* data = reinterpret_cast<void*>(reader.take<uint64_t>());
        const auto stream = reader.take<uint64_t>();
        const auto status = static_cast<CUresult>(reader.take<int32_t>());
        if (kind == HostKind::kHostFunc) {
            reinterpret_cast<CUhostFn>(function)(data);
        } else {
            reinterpret_cast<CUstreamCallback>(function)(reinterpret_cast<CUstream>(stream), status,
                                                         data);
        }
        const ReplyHeader reply{0, CUDA_SUCCESS};
        if (!send_message(fd, &reply, sizeof reply, {}, -1)) {
            break;
        }
    }
    return nullptr;
}

CUresult enqueue_host(HostKind kind, uint64_t function, void* data, CUstream stream) {
    if (function == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (const CUresult r = ensure_callback_thread(); r != CUDA_SUCCESS) {
        return r;
    }
    process().host_nodes = true; // should the stream be capturing
    return rpc(Op::StreamCallback, outs(), kind, function, reinterpret_cast<uint64_t>(data),
               handle_of(stream));
}

// What a wait and a write take is laid out alike.
CUresult value_operation(CUstream stream, CUstreamBatchMemOpType operation, CUdeviceptr address,
                         cuuint64_t value, unsigned int flags) {
    CUstreamBatchMemOpParams params{};
    params.operation = operation;
    params.waitValue.address = address;
    params.waitValue.value64 = value;
    params.waitValue.flags = flags;
    return cuStreamBatchMemOp_v2(stream, 1, &params, 0);
}

} // namespace

CUresult ensure_callback_thread() {
    Process& p = process();
    static std::mutex start_mutex;
    std::lock_guard<std::mutex> start(start_mutex);
    if (p.callbacks_running) {
        return CUDA_SUCCESS;
    }
    int fd;
    if (const CUresult r = take_connection(&fd); r != CUDA_SUCCESS) {
        return r;
    }
    RequestHeader request{0, Op::CallbackListen, 0, 0, 0};
    ReplyHeader reply{};
    std::vector<uint8_t> payload;
    if (!send_message(fd, &request, sizeof request, {}, -1) ||
        !receive_message(fd, &reply, sizeof reply, payload, nullptr)) {
        return_connection(fd, false);
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    // The application's signals are for the application's threads.
    sigset_t standard;
    sigset_t before;
    ::sigemptyset(&standard);
    for (int signal = 1; signal < 32; ++signal) {
        ::sigaddset(&standard, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &standard, &before);
    const int failed = ::pthread_create(&p.callbacks, nullptr, run_callbacks,
                                        reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed != 0) {
        return_connection(fd, false);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    p.callbacks_running = true;
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
    return stream == nullptr || flags > CU_STREAM_NON_BLOCKING
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::StreamCreate, outs(stream), flags, priority);
}

CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned int flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream) {
    return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE // also before cuInit: measured
                             : rpc(Op::StreamDestroy, outs(), handle_of(stream));
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    return rpc(Op::StreamSynchronize, outs(), handle_of(stream));
}

CUresult CUDAAPI cuStreamQuery(CUstream stream) {
    return rpc(Op::StreamQuery, outs(), handle_of(stream));
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    return flags > CU_EVENT_WAIT_EXTERNAL
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::StreamWaitEvent, outs(), handle_of(stream), handle_of(event), flags);
}

CUresult CUDAAPI cuStreamGetFlags(CUstream stream, unsigned int* flags) {
    return stream_field(stream, &StreamInfo::flags, flags);
}

CUresult CUDAAPI cuStreamGetPriority(CUstream stream, int* priority) {
    return stream_field(stream, &StreamInfo::priority, priority);
}

CUresult CUDAAPI cuStreamGetId(CUstream stream, unsigned long long* id) {
    return stream_field(stream, &StreamInfo::id, id);
}

CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext* context) {
    return stream_field(stream, &StreamInfo::context, context);
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
    if (green != nullptr) {
        *green = nullptr;
    }
    return cuStreamGetCtx(stream, context);
}

CUresult CUDAAPI cuStreamGetDevice(CUstream stream, CUdevice* device) {
    return stream_field(stream, &StreamInfo::device, device);
}

CUresult CUDAAPI cuStreamGetAttribute(CUstream stream, CUstreamAttrID attribute,
                                      CUstreamAttrValue* value) {
    return value == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::StreamGetAttribute, outs(value), handle_of(stream),
                                  static_cast<int>(attribute));
}

CUresult CUDAAPI cuStreamSetAttribute(CUstream stream, CUstreamAttrID attribute,
                                      const CUstreamAttrValue* value) {
    return value == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::StreamSetAttribute, outs(), handle_of(stream),
                                  static_cast<int>(attribute), *value);
}

CUresult CUDAAPI cuStreamCopyAttributes(CUstream to, CUstream from) {
    return rpc(Op::StreamCopyAttributes, outs(), handle_of(to), handle_of(from));
}

CUresult CUDAAPI cuStreamBatchMemOp_v2(CUstream stream, unsigned int count,
                                       CUstreamBatchMemOpParams* params, unsigned int flags) {
    constexpr unsigned int kMost = 256;
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (count == 0 || count > kMost || params == nullptr || flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Call call(Op::StreamValues);
    call.in(handle_of(stream)).in(count);
    for (unsigned int i = 0; i < count; ++i) {
        call.in(params[i]);
    }
    return call.go();
}

CUresult CUDAAPI cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                        unsigned int flags) {
    return value_operation(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value, flags);
}

CUresult CUDAAPI cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                        unsigned int flags) {
    return value_operation(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                         unsigned int flags) {
    return value_operation(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                         unsigned int flags) {
    return value_operation(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    return enqueue_host(HostKind::kHostFunc, reinterpret_cast<uint64_t>(function), data, stream);
}

CUresult CUDAAPI cuStreamAddCallback(CUstream stream, CUstreamCallback function, void* data,
                                     unsigned int flags) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE
                      : enqueue_host(HostKind::kStreamCallback,
                                     reinterpret_cast<uint64_t>(function), data, stream);
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int flags) {
    constexpr unsigned int kKnown =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    const bool interprocess = (flags & CU_EVENT_INTERPROCESS) != 0;
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (event == nullptr || (flags & ~kKnown) != 0 ||
        (interprocess && (flags & CU_EVENT_DISABLE_TIMING) == 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return rpc(Op::EventCreate, outs(event), flags); // though it has no handles for others
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent event) {
    return rpc(Op::EventDestroy, outs(), handle_of(event));
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    return cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_DEFAULT);
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    return flags > CU_EVENT_RECORD_EXTERNAL
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::EventRecord, outs(), handle_of(stream), handle_of(event), flags);
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
    return event == nullptr ? CUDA_ERROR_INVALID_HANDLE
                            : rpc(Op::EventQuery, outs(), handle_of(event));
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
    return event == nullptr ? CUDA_ERROR_INVALID_HANDLE
                            : rpc(Op::EventSynchronize, outs(), handle_of(event));
}

CUresult CUDAAPI cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    if (start == nullptr || end == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return milliseconds == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::EventElapsed, outs(milliseconds), handle_of(start), handle_of(end));
}

CUresult CUDAAPI cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

} // extern "C"
