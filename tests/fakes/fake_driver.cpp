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
#include <string>
#include <thread>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201,
              kInvalidImage = 200, kNotFound = 500, kAlreadyRegistered = 712,
              kNotRegistered = 713, kLaunchFailure = 719;
constexpr uintptr_t kContext = 0xc0ffee;

std::atomic<int64_t> copies_until_failure{-1};
std::atomic<int> refuse_register{0};
std::atomic<int> copy_delay_us{0};
std::atomic<int64_t> live_objects{0};
std::atomic<int64_t> copies{0}, launches{0};
std::atomic<uint64_t> memory_limit{UINT64_MAX};

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
    copies++;
    stream->push([=] {
        if (const int delay = copy_delay_us)
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
        if (fails)
            stream->result = kLaunchFailure;
        // As in a context that has failed, nothing runs any more.
        if (stream->result == kSuccess)
            memcpy(to, from, bytes);
    });
    return kSuccess;
}

// The kernels on chunks, as plain loops. Arguments are those of kernels/chunks.h.
constexpr size_t kChunk = 32768;
struct Arguments {
    uint64_t *one, *other;
    uint8_t *result, *zero;
    uint32_t count;
    uint64_t pattern;
};
using Kernel = void (*)(const Arguments&);

void* chunk(uint64_t address) {
    if (address % kChunk)
        abort();
    return reinterpret_cast<void*>(address);
}
void digest_kernel(const Arguments& a) {
    static const char zeros[kChunk] = {};
    for (uint32_t i = 0; i < a.count; i++) {
        XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(a.result + 16 * i),
                                 XXH3_128bits(chunk(a.one[i]), kChunk));
        a.zero[i] = !memcmp(chunk(a.one[i]), zeros, kChunk);
    }
}
void compare_kernel(const Arguments& a) {
    for (uint32_t i = 0; i < a.count; i++)
        a.result[i] = memcmp(chunk(a.one[i]), chunk(a.other[i]), kChunk) != 0;
}
void copy_kernel(const Arguments& a) {
    for (uint32_t i = 0; i < a.count; i++)
        memcpy(chunk(a.other[i]), chunk(a.one[i]), kChunk);
}
void fill_kernel(const Arguments& a) {
    for (uint32_t i = 0; i < a.count; i++)
        for (size_t at = 0; at < kChunk; at += 8)
            memcpy(static_cast<char*>(chunk(a.one[i])) + at, &a.pattern, 8);
}

template <typename T> T argument(void** arguments, int index) {
    return *static_cast<T*>(arguments[index]);
}
Arguments arguments_of(Kernel kernel, void** from) {
    Arguments to{};
    to.one = argument<uint64_t*>(from, 0);
    if (kernel == digest_kernel || kernel == fill_kernel) {
        to.count = argument<uint32_t>(from, 1);
        if (kernel == fill_kernel) {
            to.pattern = argument<uint64_t>(from, 2);
        } else {
            to.result = argument<uint8_t*>(from, 2);
            to.zero = argument<uint8_t*>(from, 3);
        }
        return to;
    }
    to.other = argument<uint64_t*>(from, 1);
    to.count = argument<uint32_t>(from, 2);
    if (kernel == compare_kernel)
        to.result = argument<uint8_t*>(from, 3);
    return to;
}

} // namespace

extern "C" {

void fake_limit_memory(uint64_t bytes) {
    memory_limit = bytes;
}
int64_t fake_copies() {
    return copies.exchange(0);
}
int64_t fake_launches() {
    return launches.exchange(0);
}
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
int cuMemHostAlloc(void** host, size_t bytes, unsigned flags) {
    *host = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset(*host, 0xa5, bytes);
    return cuMemHostRegister_v2(*host, bytes, flags);
}
int cuMemFreeHost(void* host) {
    const int result = cuMemHostUnregister(host);
    free(host);
    return result;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (current != kContext)
        return kInvalidContext;
    if (bytes > memory_limit)
        return kOutOfMemory;
    void* memory = aligned_alloc(kChunk, (bytes + kChunk - 1) / kChunk * kChunk);
    memset(memory, 0x5a, bytes);
    *address = reinterpret_cast<uint64_t>(memory);
    live_objects++;
    return kSuccess;
}
int cuMemFree_v2(uint64_t address) {
    free(reinterpret_cast<void*>(address));
    live_objects--;
    return kSuccess;
}
int cuModuleLoadData(void** module, const char* text) {
    if (std::string(text).find(".version") == std::string::npos)
        return kInvalidImage;
    *module = new char;
    live_objects++;
    return kSuccess;
}
int cuModuleUnload(void* module) {
    delete static_cast<char*>(module);
    live_objects--;
    return kSuccess;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    static const std::map<std::string, Kernel> kernels = {{"fgk_digest", digest_kernel},
                                                          {"fgk_compare", compare_kernel},
                                                          {"fgk_copy", copy_kernel},
                                                          {"fgk_fill", fill_kernel}};
    const auto found = kernels.find(name);
    if (found == kernels.end())
        return kNotFound;
    *function = reinterpret_cast<void*>(found->second);
    return kSuccess;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned shared, Stream* stream, void** arguments, void**) {
    if (current != kContext)
        return kInvalidContext;
    const auto kernel = reinterpret_cast<Kernel>(function);
    const Arguments values = arguments_of(kernel, arguments);
    const unsigned warps = 8, halves = 16;
    const unsigned a_block = kernel == digest_kernel ? halves : warps;
    if (threads != 256 || shared || !values.count ||
        blocks != (values.count + a_block - 1) / a_block)
        return kInvalidValue;
    launches++;
    stream->push([=] {
        if (stream->result == kSuccess)
            kernel(values);
    });
    return kSuccess;
}
int cuGetErrorName(int result, const char** name) {
    *name = result == kLaunchFailure ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_FAKE";
    return kSuccess;
}
}
