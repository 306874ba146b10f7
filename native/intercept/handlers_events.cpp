// Events that several processes have (cuIpcGetEventHandle). The driver has plain ones: its own for
// several processes are not known to live through a checkpoint.
//
// Who opens one gets an event that is never recorded, and so is done. Whatever waits for it asks
// its owner first, until that one's event is done. Such a wait holds up the thread that asks for
// it, not its stream. The few functions that wait are led here once an event is opened, so that
// nobody pays for it who opens none.
#include <atomic>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <vector>

#include "gate.h"
#include "handlers.h"
#include "ipc.h"
#include "replay/handles.h"
#include "replay/record.h"

namespace flowgpu::ipc {

namespace {

constexpr long kFirstLookNs = 20'000, kLongestLookNs = 1'000'000;

struct Shareable {
    uint64_t number; // never used again
    CUcontext context;
};

struct Events {
    std::mutex mutex; // guards what follows; the driver is not called with it
    uint64_t next = 1;
    std::map<CUevent, Shareable> own; // made for other processes
    std::map<CUevent, Ticket> opened;
};

// Made on first use, never destroyed, as Task.
Events& events() {
    static auto* made = new Events();
    return *made;
}

std::atomic<bool> any_opened{false};

// The event that the driver has, where the call passes a bridge first.
CUevent as_called(CUevent event) {
    return replay::prepared() ? replay::to_driver(event) : event;
}

bool find_opened(CUevent called, Ticket* ticket) {
    Events& e = events();
    std::lock_guard<std::mutex> lock(e.mutex);
    for (auto& [event, one] : e.opened)
        if (as_called(event) == called) {
            *ticket = one;
            return true;
        }
    return false;
}

// An owner that has ended or let go of the event has nothing more to wait for.
bool is_done(const Ticket& ticket) {
    return ask_event(ticket) != CUDA_ERROR_NOT_READY;
}

void wait_for(const Ticket& ticket) {
    timespec pause = {0, kFirstLookNs};
    while (!is_done(ticket)) {
        nanosleep(&pause, nullptr);
        pause.tv_nsec = pause.tv_nsec * 2 < kLongestLookNs ? pause.tv_nsec * 2 : kLongestLookNs;
    }
}

// What the program calls in the place of each function, and the function.
#define FG_LED(DO)                                                                                 \
    DO(cuEventQuery)                                                                               \
    DO(cuEventSynchronize)                                                                         \
    DO(cuStreamWaitEvent)                                                                          \
    DO(cuStreamWaitEvent_ptsz)                                                                     \
    DO(cuEventRecord)                                                                              \
    DO(cuEventRecord_ptsz)                                                                         \
    DO(cuEventRecordWithFlags)                                                                     \
    DO(cuEventRecordWithFlags_ptsz)                                                                \
    DO(cuGraphAddEventRecordNode)                                                                  \
    DO(cuGraphAddEventWaitNode)

struct Real {
#define FG_SLOT(name) decltype(&::name) name;
    FG_LED(FG_SLOT)
#undef FG_SLOT
} real;

namespace led {

CUresult cuEventQuery(CUevent event) {
    Ticket ticket;
    if (find_opened(event, &ticket) && !is_done(ticket))
        return CUDA_ERROR_NOT_READY;
    return real.cuEventQuery(event);
}

CUresult cuEventSynchronize(CUevent event) {
    Ticket ticket;
    if (find_opened(event, &ticket))
        wait_for(ticket);
    return real.cuEventSynchronize(event);
}

template <class Function>
CUresult wait(Function function, CUstream stream, CUevent event, unsigned flags) {
    Ticket ticket;
    if (find_opened(event, &ticket)) {
        if (flags) // each launch of a graph would have to wait
            return CUDA_ERROR_NOT_SUPPORTED;
        wait_for(ticket);
    }
    return function(stream, event, flags);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return wait(real.cuStreamWaitEvent, stream, event, flags);
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
    return wait(real.cuStreamWaitEvent_ptsz, stream, event, flags);
}

// Only its owner records an event.
template <class Function, class... Arguments>
CUresult unless_opened(CUevent event, Function function, Arguments... arguments) {
    Ticket ticket;
    return find_opened(event, &ticket) ? CUDA_ERROR_NOT_SUPPORTED : function(arguments...);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return unless_opened(event, real.cuEventRecord, event, stream);
}

CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) {
    return unless_opened(event, real.cuEventRecord_ptsz, event, stream);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    return unless_opened(event, real.cuEventRecordWithFlags, event, stream, flags);
}

CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags) {
    return unless_opened(event, real.cuEventRecordWithFlags_ptsz, event, stream, flags);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                   size_t count, CUevent event) {
    return unless_opened(event, real.cuGraphAddEventRecordNode, node, graph, after, count, event);
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                 size_t count, CUevent event) {
    return unless_opened(event, real.cuGraphAddEventWaitNode, node, graph, after, count, event);
}

} // namespace led

// With the lock held. A bridge calls the driver by another word than a wrapper.
void lead_here() {
    if (any_opened.exchange(true))
        return;
    const auto lead = [](unsigned symbol, void** before, void* now) {
        Function& function = flowgpu_page.functions[symbol];
        void** word = replay::prepared() ? &function.driver : &function.next;
        *before = *word;
        __atomic_store_n(word, now, __ATOMIC_RELEASE);
    };
#define FG_LEAD(name)                                                                              \
    real_function(I_##name); /* the driver is open */                                              \
    lead(I_##name, reinterpret_cast<void**>(&real.name), reinterpret_cast<void*>(&led::name));
    FG_LED(FG_LEAD)
#undef FG_LEAD
}

} // namespace

CUresult event_state(uint64_t number) {
    if (gate::is_closed()) // the driver may be gone, or about to go
        return CUDA_ERROR_NOT_READY;
    CUevent event = nullptr;
    CUcontext context = nullptr;
    {
        Events& e = events();
        std::lock_guard<std::mutex> lock(e.mutex);
        for (auto& [one, shareable] : e.own)
            if (shareable.number == number) {
                event = one;
                context = shareable.context;
            }
    }
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    FG_REAL(cuCtxSetCurrent)(context);
    const CUresult result = FG_REAL(cuEventQuery)(event);
    FG_REAL(cuCtxSetCurrent)(nullptr);
    return result;
}

void lock_events() {
    events().mutex.lock();
}

void unlock_events() {
    events().mutex.unlock();
}

void forget_parents_events() {
    events().own.clear();
    events().opened.clear();
}

} // namespace flowgpu::ipc

namespace flowgpu::handle {

namespace {

template <class Function> CUresult destroy(CUevent event, Function function) {
    ipc::Events& e = ipc::events();
    {
        // First: the driver may give another one the same handle.
        std::lock_guard<std::mutex> lock(e.mutex);
        e.own.erase(event);
        e.opened.erase(event);
    }
    return function(event);
}

} // namespace

CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
    const bool shareable = Flags & CU_EVENT_INTERPROCESS && Flags & CU_EVENT_DISABLE_TIMING;
    if (!shareable)
        return FG_REAL(cuEventCreate)(phEvent, Flags);
    const CUresult result =
        FG_REAL(cuEventCreate)(phEvent, Flags & ~static_cast<unsigned>(CU_EVENT_INTERPROCESS));
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = nullptr;
    FG_REAL(cuCtxGetCurrent)(&context);
    ipc::Events& e = ipc::events();
    std::lock_guard<std::mutex> lock(e.mutex);
    e.own[*phEvent] = ipc::Shareable{e.next++, context};
    return result;
}

CUresult cuEventDestroy(CUevent hEvent) {
    return destroy(hEvent, FG_REAL(cuEventDestroy));
}

CUresult cuEventDestroy_v2(CUevent hEvent) {
    return destroy(hEvent, FG_REAL(cuEventDestroy_v2));
}

CUresult cuIpcGetEventHandle(CUipcEventHandle* pHandle, CUevent event) {
    uint64_t number = 0;
    {
        ipc::Events& e = ipc::events();
        std::lock_guard<std::mutex> lock(e.mutex);
        const auto found = e.own.find(event);
        number = found == e.own.end() ? 0 : found->second.number;
    }
    if (!number) { // it was not made for that, or is none
        const CUresult result = FG_REAL(cuIpcGetEventHandle)(pHandle, event);
        if (result == CUDA_SUCCESS)
            count_refused(I_cuIpcGetEventHandle);
        return result;
    }
    return pHandle ? ipc::make(ipc::kEventMagic, number, reinterpret_cast<ipc::Ticket*>(pHandle))
                   : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcOpenEventHandle(CUevent* phEvent, CUipcEventHandle handle) {
    ipc::Ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    if (memcmp(ticket.magic, ipc::kEventMagic, sizeof ticket.magic) != 0) {
        // The event is of a process that FlowGPU does not know.
        const CUresult result = FG_REAL(cuIpcOpenEventHandle)(phEvent, handle);
        if (result == CUDA_SUCCESS)
            count_refused(I_cuIpcOpenEventHandle);
        return result;
    }
    if (ticket.owner == ipc::token())
        return CUDA_ERROR_INVALID_CONTEXT;
    // The driver opens an event whose owner has ended or let go of it, too.
    const CUresult result = FG_REAL(cuEventCreate)(phEvent, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    ipc::Events& e = ipc::events();
    std::lock_guard<std::mutex> lock(e.mutex);
    e.opened[*phEvent] = ticket;
    ipc::lead_here();
    return CUDA_SUCCESS;
}

} // namespace flowgpu::handle
