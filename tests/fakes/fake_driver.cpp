// A stand-in for libcuda in tests of the mover: "device" memory is host memory, a stream is a
// thread, and every call is stricter than the driver's. fake_* functions arrange faults and read
// counters.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kAlreadyRegistered = 712,
              kNotRegistered = 713, kLaunchFailure = 719;
constexpr uintptr_t kContext = 0xc0ffee;

std::atomic<int64_t> copies_until_failure{-1};
std::atomic<int> refuse_register{0};
std::atomic<int> copy_delay_us{0};
std::atomic<int64_t> live_objects{0};

std::mutex registered_lock;
std::map<uintptr_t, size_t> registered;
thread_local uintptr_t current;

bool is_registered(const void* host, size_t bytes) {
    std::lock_guard<std::mutex> guard(registered_lock);
    auto at = registered.upper_bound(reinterpret_cast<uintptr_t>(host));
    // A copy may span ranges that were registered one behind another.
    uintptr_t need = reinterpret_cast<uintptr_t>(host), end = need + bytes;
    if (at == registered.begin())
        return false;
    for (--at; at != registered.end() && at->first <= need; ++at) {
        need = at->first + at->second;
        if (need >= end)
            return true;
    }
    return false;
}

struct Event {
    std::mutex lock;
    std::condition_variable changed;
    bool recorded = false, done = false;
    int result = kSuccess;
};

struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool busy = false, end = false;
    int result = kSuccess;
    std::thread thread{[this] { loop(); }};

    void loop() {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            changed.wait(guard, [&] { return end || !work.empty(); });
            if (work.empty())
                return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            guard.unlock();
            next();
            guard.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void push(std::function<void()> item) {
        std::lock_guard<std::mutex> guard(lock);
        work.push_back(std::move(item));
        changed.notify_all();
    }
};

int copy(void* to, const void* from, const void* host, size_t bytes, Stream* stream) {
    if (current != kContext)
        return kInvalidContext;
    if (!bytes || !is_registered(host, bytes))
        return kInvalidValue;
    const int64_t left = copies_until_failure;
    const bool fails = left >= 0 && copies_until_failure-- == 0;
    stream->push([=] {
        if (const int delay = copy_delay_us)
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
        if (fails)
            stream->result = kLaunchFailure;
        else
            memcpy(to, from, bytes);
    });
    return kSuccess;
}

} // namespace

extern "C" {

void fake_fail_copy(int64_t number) {
    copies_until_failure = number;
}
void fake_refuse_register(int refuse) {
    refuse_register = refuse;
}
void fake_delay(int microseconds) {
    copy_delay_us = microseconds;
}
int64_t fake_live_objects() {
    std::lock_guard<std::mutex> guard(registered_lock);
    return live_objects + static_cast<int64_t>(registered.size());
}

int cuCtxSetCurrent(void* context) {
    if (reinterpret_cast<uintptr_t>(context) != kContext)
        return kInvalidContext;
    current = kContext;
    return kSuccess;
}
int cuStreamCreate(Stream** stream, unsigned) {
    if (current != kContext)
        return kInvalidContext;
    *stream = new Stream;
    live_objects++;
    return kSuccess;
}
int cuStreamDestroy_v2(Stream* stream) {
    {
        std::lock_guard<std::mutex> guard(stream->lock);
        stream->end = true;
        stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    live_objects--;
    return kSuccess;
}
int cuStreamSynchronize(Stream* stream) {
    std::unique_lock<std::mutex> guard(stream->lock);
    stream->changed.wait(guard, [&] { return stream->work.empty() && !stream->busy; });
    return stream->result;
}
int cuEventCreate(Event** event, unsigned) {
    *event = new Event;
    live_objects++;
    return kSuccess;
}
int cuEventDestroy_v2(Event* event) {
    delete event;
    live_objects--;
    return kSuccess;
}
int cuEventRecord(Event* event, Stream* stream) {
    {
        std::lock_guard<std::mutex> guard(event->lock);
        event->recorded = true;
        event->done = false;
    }
    stream->push([=] {
        std::lock_guard<std::mutex> guard(event->lock);
        event->done = true;
        event->result = stream->result;
        event->changed.notify_all();
    });
    return kSuccess;
}
int cuEventSynchronize(Event* event) {
    std::unique_lock<std::mutex> guard(event->lock);
    if (!event->recorded)
        return kInvalidValue;
    event->changed.wait(guard, [&] { return event->done; });
    return event->result;
}
int cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, Stream* stream) {
    return copy(host, reinterpret_cast<void*>(device), host, bytes, stream);
}
int cuMemcpyHtoDAsync_v2(uint64_t device, const void* host, size_t bytes, Stream* stream) {
    return copy(reinterpret_cast<void*>(device), host, host, bytes, stream);
}
int cuMemHostRegister_v2(void* host, size_t bytes, unsigned) {
    if (current != kContext)
        return kInvalidContext;
    if (refuse_register)
        return 801;
    std::lock_guard<std::mutex> guard(registered_lock);
    return registered.emplace(reinterpret_cast<uintptr_t>(host), bytes).second ? kSuccess
                                                                               : kAlreadyRegistered;
}
int cuMemHostUnregister(void* host) {
    if (current != kContext)
        return kInvalidContext;
    std::lock_guard<std::mutex> guard(registered_lock);
    return registered.erase(reinterpret_cast<uintptr_t>(host)) ? kSuccess : kNotRegistered;
}
int cuGetErrorName(int result, const char** name) {
    *name = result == kLaunchFailure ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_FAKE";
    return kSuccess;
}
}
