// GATE, OPEN, WATCH, RENEW and DETACH: when the program's threads may be in the driver.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include <sys/prctl.h>

#include "communicators.h"
#include "drain.h"
#include "driver.h"
#include "gate.h"
#include "line.h"
#include "managed.h"
#include "memstub.h"
#include "pools.h"
#include "replay/arrays.h"
#include "replay/engine.h"
#include "requests.h"
#include "task.h"
#include "watch.h"

namespace flowgpu::service {

namespace {

constexpr uint32_t kWatchMs = 1000, kRenewMs = 1000;
constexpr std::chrono::milliseconds
    kStill(50); // after which work is thought to wait for the program
constexpr std::chrono::microseconds kMoment(100); // and up to 32 times that, on a busy machine
constexpr unsigned kMoments = 6;

void let_go(flowgpu_gate_state mode) {
    replay::forget_kept();
    pools::stay();
    replay::arrays::stay();
    if (mode == FLOWGPU_GATE_WATCH)
        gate::watch(watch::note);
    else
        gate::open();
    communicators::open(); // what was cut off for this checkpoint goes on
    task().page.load()->gate = mode;
}

void fail_busy(flowgpu_reply& reply) {
    open_gate();
    fail(reply, FLOWGPU_BUSY,
         gate::exiting() ? "the program is in exit()"
                         : "a thread did not leave the driver in time");
}

// Closes the gate where the live bytes are low. The program may have gone on between the look and
// the gate, by a whole step where this thread had to wait for a core: then it is let go again.
bool close_at_low(const flowgpu_gate& request, flowgpu_reply& reply) {
    using std::chrono::microseconds;
    const auto began = std::chrono::steady_clock::now();
    const auto waited = [&] {
        const auto span = std::chrono::steady_clock::now() - began;
        return std::chrono::duration_cast<microseconds>(span);
    };
    if (!request.wait_ms)
        return gate::close(request.timeout_ms);
    const auto longest = microseconds(std::chrono::milliseconds(request.wait_ms));
    const memstub::LiveSum live;
    const auto high = [&] {
        const auto so_far = waited();
        // What the step before had at its lowest may not come again.
        const bool late = so_far >= longest * 3 / 4;
        const uint64_t enough = request.live_bytes + (late ? request.live_bytes / 24 : 0);
        return live.bytes() > enough && so_far < longest;
    };
    bool closed = false;
    prctl(PR_SET_TIMERSLACK, 1UL); // ns; else sleeps are 50 us longer
    do {
        if (closed)
            gate::open();
        while (high())
            std::this_thread::sleep_for(microseconds(20));
        reply.waited_us = static_cast<uint32_t>(waited().count());
        closed = gate::close(request.timeout_ms);
    } while (closed && high());
    prctl(PR_SET_TIMERSLACK, 0UL); // the default
    return closed;
}

// Opens a closed gate to `mode`, once the task has its memory and CUDA back.
void go_on(flowgpu_reply& reply, flowgpu_gate_state mode) {
    if (replay::stripped() || managed::away() || !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "the gate stays closed until all memory is mapped");
    if (!finish_rebuild(reply))
        return;
    close_handover();
    let_go(mode);
}

// Behind a closed gate, where no capture can begin any more. A question of ours may break one.
bool captures(flowgpu_reply& reply) {
    const bool any = task().captures.load() != 0;
    if (any)
        fail(reply, FLOWGPU_BUSY, "a CUDA graph is being captured");
    return any;
}

// What a kernel's fault, or one of the hardware, leaves a context with until it is destroyed.
bool is_lasting(CUresult result) {
    return result == CUDA_ERROR_ECC_UNCORRECTABLE || result == CUDA_ERROR_NVLINK_UNCORRECTABLE ||
           (result >= CUDA_ERROR_ILLEGAL_ADDRESS && result <= CUDA_ERROR_LAUNCH_FAILED);
}

void fail_broken(flowgpu_reply& reply, CUresult result) {
    const char* name = nullptr;
    FG_REAL(cuGetErrorName)(result, &name);
    char detail[FLOWGPU_DETAIL_BYTES];
    snprintf(detail, sizeof detail, "a CUDA context whose work has failed (%s)",
             name ? name : "unknown error");
    fail(reply, FLOWGPU_REFUSED, detail, result);
}

bool drained(std::chrono::steady_clock::time_point deadline, flowgpu_reply& reply) {
    const CUresult result = drain_until(deadline);
    if (result == CUDA_ERROR_NOT_READY)
        fail(reply, FLOWGPU_BUSY, "work was still in flight");
    else if (is_lasting(result))
        fail_broken(reply, result);
    else if (result != CUDA_SUCCESS)
        fail_driver(reply, "waiting for the work in flight", result);
    return result == CUDA_SUCCESS;
}

// Behind a closed gate, until the GPUs are idle. A queue of work drains while nothing is added, so
// the gate stays closed in the first try and in every second one. Otherwise work may wait for the
// program's next call (a stream for a value, a kernel for a flag), so threads go on for moments.
bool stands_still(std::chrono::steady_clock::time_point deadline, uint32_t engine,
                  flowgpu_reply& reply) {
    using std::chrono::steady_clock;
    static bool by_moments;
    const bool opens = by_moments;
    by_moments = false;
    for (unsigned moment = 0;; moment++) {
        // Read behind the gate: what is refused cannot begin any more either.
        if (captures(reply) || refused(reply, engine, true))
            return false;
        const auto still = steady_clock::now() + kStill;
        if (drained(opens ? std::min(deadline, still) : deadline, reply))
            return true;
        if (reply.status != FLOWGPU_BUSY || steady_clock::now() >= deadline) {
            by_moments = !opens && reply.status == FLOWGPU_BUSY;
            return false;
        }
        gate::open();
        std::this_thread::sleep_for(kMoment * (1U << moment % kMoments));
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - steady_clock::now());
        if (!gate::close(static_cast<uint32_t>(std::max<int64_t>(left.count(), 1)))) {
            fail(reply, FLOWGPU_BUSY, "a thread did not leave the driver in time");
            return false;
        }
        reply.status = FLOWGPU_OK;
        reply.detail[0] = '\0';
    }
}

// What was issued is done. The program goes on, but for who calls NCCL.
bool stand_still_once(flowgpu_reply& reply) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kRenewMs);
    if (!gate::close(kRenewMs)) {
        fail(reply, FLOWGPU_BUSY, "a thread did not leave the driver in time");
        return false;
    }
    const bool done = !captures(reply) && drained(deadline, reply);
    gate::open();
    return done;
}

} // namespace

void open_gate() {
    let_go(FLOWGPU_GATE_OPEN);
}

void on_gate(Packet& packet, flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_gate*>(packet.bytes);
    if (packet.size != sizeof *request || request->engine > FLOWGPU_ENGINE_NONE ||
        request->reserved0 || gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "GATE has another form, or the gate is closed");
    if (refused(reply, request->engine, false))
        return;
    const bool closed = close_at_low(*request, reply);
    auto deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(request->timeout_ms);
    if (!closed)
        return fail_busy(reply);
    if (!stands_still(deadline, request->engine, reply))
        return open_gate();
    if (request->engine == FLOWGPU_ENGINE_REPLAY &&
        (!pools::copy_out(reply.detail, sizeof reply.detail) ||
         !replay::arrays::copy_out(reply.detail, sizeof reply.detail))) {
        open_gate();
        reply.status = FLOWGPU_REFUSED;
        return;
    }
    if (memstub::is_profiled())
        snprintf(reply.detail, sizeof reply.detail, "what a profiler (CUPTI) had not read yet");
    task().page.load()->gate = FLOWGPU_GATE_CLOSED;
    task().page.load()->threads = gate::thread_count();
}

void on_open(Packet&, flowgpu_reply& reply) {
    go_on(reply, FLOWGPU_GATE_OPEN);
}

void on_watch(Packet&, flowgpu_reply& reply) {
    const bool was_closed = gate::is_closed();
    // No call that is under way now may be left out.
    if (!was_closed && !gate::close(kWatchMs))
        return fail_busy(reply);
    if (watch::begin(watch::What::all))
        go_on(reply, FLOWGPU_GATE_WATCH);
    else
        fail(reply, FLOWGPU_SYSTEM, "there is no memory to note calls in");
    if (reply.status != FLOWGPU_OK && !was_closed)
        open_gate();
}

void on_renew(Packet& packet, flowgpu_reply& reply) {
    const auto step = static_cast<flowgpu_renewal>(packet.header().count);
    if (packet.size != sizeof(flowgpu_header) || gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "RENEW has another form, or the gate is closed");
    reply.status = communicators::renew(step, reply.detail, sizeof reply.detail);
    if (step == FLOWGPU_RENEWAL_HOLD && reply.status == FLOWGPU_OK)
        stand_still_once(reply);
    if (step == FLOWGPU_RENEWAL_HOLD && reply.status != FLOWGPU_OK)
        communicators::open();
}

void on_detach(Packet& packet, flowgpu_reply& reply) {
    if (!gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "DETACH needs a closed gate");
    close_handover();
    line::mend();
    line::drain(&packet);
}

} // namespace flowgpu::service
