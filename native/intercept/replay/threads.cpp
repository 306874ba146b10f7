#include "threads.h"

#include <algorithm>
#include <cerrno>
#include <new>

#include <pthread.h>

#include "current.h"
#include "record.h"

namespace flowgpu::replay {

__thread ThreadState* own_thread __attribute__((tls_model("initial-exec")));

namespace {

pthread_key_t exit_key;
pthread_once_t exit_key_made = PTHREAD_ONCE_INIT;

void drop(void* state) {
    own_thread = nullptr;
    delete static_cast<ThreadState*>(state);
}

bool has_ended(CUcontext context) {
    return !object_of(context);
}

// A context that no thread has current yet, on the device of one that is on the stack.
CUcontext make_context(const std::vector<CUcontext>& stack) {
    CUdevice device = 0;
    CUcontext made = nullptr;
    const auto living = std::find_if_not(stack.begin(), stack.end(), has_ended);
    if (living != stack.end()) {
        const Current current(*living);
        FG_DRIVER(cuCtxGetDevice)(&device); // stays 0 where it fails
    }
    if (FG_DRIVER(cuCtxCreate_v2)(&made, 0, device) != CUDA_SUCCESS)
        return nullptr;
    FG_DRIVER(cuCtxPopCurrent_v2)(&made);
    return made;
}

// The driver's stack is as the thread's was. A context that ended stays there until it is popped,
// and calls fail by it; another one that ends now stands in for it. Where that cannot be made they
// are gone from both stacks.
void stack_again(ThreadState& thread) {
    std::vector<CUcontext>& stack = thread.contexts;
    const bool any_ended = std::any_of(stack.begin(), stack.end(), has_ended);
    thread.ended = any_ended ? make_context(stack) : nullptr;
    if (!thread.ended)
        stack.erase(std::remove_if(stack.begin(), stack.end(), has_ended), stack.end());
    for (CUcontext context : stack)
        FG_DRIVER(cuCtxPushCurrent_v2)(has_ended(context) ? thread.ended : to_driver(context));
    if (!thread.ended)
        return;
    FG_DRIVER(cuCtxPushCurrent_v2)(thread.ended); // which its end pops
    FG_DRIVER(cuCtxDestroy_v2)(thread.ended);
}

} // namespace

ThreadState* make_thread() {
    int error = errno;
    pthread_once(&exit_key_made, [] { pthread_key_create(&exit_key, drop); });
    auto* state = new (std::nothrow) ThreadState();
    if (state) {
        state->generation = flowgpu_page.generation.load();
        pthread_setspecific(exit_key, state);
    }
    own_thread = state;
    errno = error;
    return state;
}

FG_QUIET(flowgpu_replay_catch_up, flowgpu_replay_know);

extern "C" gate::ThreadRecord* flowgpu_replay_know(gate::ThreadRecord* record) {
    const uint32_t generation = flowgpu_page.generation.load(std::memory_order_relaxed);
    if (record->used.load(std::memory_order_relaxed)) // else of several threads, which come here
        record->generation.store(generation, std::memory_order_relaxed);
    ThreadState* thread = own_thread;
    if (!thread || thread->generation == generation)
        return record;
    int error = errno;
    thread->generation = generation;
    stack_again(*thread);
    CUstreamCaptureMode mode = thread->capture_mode;
    if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL)
        FG_DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    errno = error;
    return record;
}

CUcontext current_context() {
    ThreadState* thread = own_thread;
    return thread && !thread->contexts.empty() ? thread->contexts.back() : nullptr;
}

void know_current(CUcontext context, uint32_t contexts) {
    gate::ThreadRecord* record = knowing_record();
    if (!record)
        return;
    record->context.store(context, std::memory_order_relaxed);
    record->in_context.store(contexts, std::memory_order_relaxed);
}

KnownCurrent doubt_current() {
    const gate::ThreadRecord* record = gate::find_record();
    const KnownCurrent known = {record->on_device.load(std::memory_order_relaxed),
                                record->in_context.load(std::memory_order_relaxed)};
    forget_current();
    return known;
}

void confirm_current(const KnownCurrent& known) {
    gate::ThreadRecord* record = gate::find_record();
    if (!known.in_context || known.in_context != flowgpu_page.contexts.load())
        return;
    const void* context = record->context.load(std::memory_order_relaxed);
    CUcontext now = nullptr;
    if (FG_DRIVER(cuCtxGetCurrent)(&now) != CUDA_SUCCESS ||
        now != to_driver(static_cast<CUcontext>(const_cast<void*>(context))))
        return;
    record->on_device.store(known.on_device, std::memory_order_relaxed);
    record->in_context.store(known.in_context, std::memory_order_relaxed);
}

void now_current(CUcontext context) {
    forget_current();
    ThreadState* thread = this_thread();
    if (!thread)
        return;
    if (!thread->contexts.empty())
        thread->contexts.pop_back();
    if (context)
        thread->contexts.push_back(context);
}

void now_pushed(CUcontext context) {
    forget_current();
    if (ThreadState* thread = this_thread())
        thread->contexts.push_back(context);
}

void now_popped() {
    forget_current();
    ThreadState* thread = own_thread;
    if (thread && !thread->contexts.empty())
        thread->contexts.pop_back();
}

} // namespace flowgpu::replay
