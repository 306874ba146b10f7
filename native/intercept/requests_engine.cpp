// ASK, STRIP, KEEP, REBUILD and MANAGED: what saves the process's CUDA, and its end and return.
#include <chrono>
#include <thread>

#include "gate.h"
#include "managed.h"
#include "pools.h"
#include "replay/arrays.h"
#include "replay/engine.h"
#include "replay/listing.h"
#include "replay/record.h"
#include "requests.h"
#include "rewind.h"
#include "task.h"

namespace flowgpu::service {

namespace {

constexpr std::chrono::seconds kNameTaken(5);
constexpr std::chrono::milliseconds kNameLook(20);

// For people alone: who asked reads as far as it comes.
void list_record(const Packet& packet) {
    if (packet.fd_count == 1)
        replay::list_record(packet.fds[0]);
}

} // namespace

void on_ask(Packet& packet, flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_ask*>(packet.bytes);
    if (packet.size != sizeof *request || request->engine > FLOWGPU_ENGINE_REPLAY)
        return fail(reply, FLOWGPU_PROTOCOL, "ASK has another form");
    refused(reply, request->engine, false);
}

void on_strip(Packet& packet, flowgpu_reply& reply) {
    if (!gate::is_closed() || !replay::prepared() || replay::stripped() || !memory_is_safe())
        return fail(reply, FLOWGPU_PROTOCOL,
                    "STRIP needs HANDOVER or LEND, and a process prepared for it");
    bool lost = false;
    if (!replay::strip(reply.detail, sizeof reply.detail, &lost))
        reply.status = lost ? FLOWGPU_LOST : FLOWGPU_SYSTEM;
    else
        list_record(packet);
}

void on_keep(Packet& packet, flowgpu_reply& reply) {
    if (!gate::is_closed() || !replay::prepared() || replay::stripped() ||
        !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "KEEP needs a closed gate, the memory and CUDA");
    if (!replay::keep(reply.detail, sizeof reply.detail))
        reply.status = FLOWGPU_SYSTEM;
    else
        list_record(packet);
}

void on_rebuild(Packet& packet, flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_rebuild*>(packet.bytes);
    const bool others = packet.size == sizeof *request;
    if (others ? request->visible[sizeof request->visible - 1] != '\0'
               : packet.size != sizeof request->header)
        return fail(reply, FLOWGPU_PROTOCOL, "REBUILD has another form");
    // Who asks may not know how far STRIP or another REBUILD came.
    if (!replay::stripped())
        return;
    ManyDescriptors many; // the driver opens its own anew
    if (others && !rewind::see_devices(request->visible))
        return fail(reply, FLOWGPU_SYSTEM, "the driver cannot be told which GPUs to use");
    const auto deadline = std::chrono::steady_clock::now() + kNameTaken;
    while (!replay::rebuild(reply.detail, sizeof reply.detail)) {
        if (!replay::may_come_later() || std::chrono::steady_clock::now() > deadline) {
            reply.status = FLOWGPU_SYSTEM;
            return;
        }
        std::this_thread::sleep_for(kNameLook);
    }
    pools::driver_is_new();
    replay::arrays::driver_is_new();
}

void on_managed(Packet& packet, flowgpu_reply& reply) {
    if (!gate::is_closed() || replay::stripped())
        return fail(reply, FLOWGPU_PROTOCOL, "MANAGED needs a closed gate and CUDA");
    bool held = false;
    managed::Step step = managed::Step::done;
    const auto ask = [&](auto action, auto... arguments) {
        step = action(arguments..., reply.detail, sizeof reply.detail);
    };
    switch (packet.header().count) {
    case FLOWGPU_MANAGED_STEP_LEAVE:
        ask(managed::begin_leaving, &held);
        break;
    case FLOWGPU_MANAGED_STEP_LEAVE_HELD:
        ask(managed::leave);
        break;
    case FLOWGPU_MANAGED_STEP_COME:
        ask(managed::begin_coming, &held);
        break;
    case FLOWGPU_MANAGED_STEP_COME_HELD:
        ask(managed::come);
        break;
    case FLOWGPU_MANAGED_STEP_TO_HOST:
        managed::to_host();
        break;
    default:
        return fail(reply, FLOWGPU_PROTOCOL, "MANAGED has another form");
    }
    reply.waited_us = held;
    if (step != managed::Step::done)
        reply.status = step == managed::Step::lost ? FLOWGPU_LOST : FLOWGPU_SYSTEM;
}

bool finish_rebuild(flowgpu_reply& reply) {
    const bool finished = replay::finish(reply.detail, sizeof reply.detail) &&
                          replay::arrays::copy_back(reply.detail, sizeof reply.detail);
    if (!finished)
        reply.status = FLOWGPU_SYSTEM;
    return finished;
}

} // namespace flowgpu::service
