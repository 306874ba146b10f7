// Nanoseconds that the intercept library adds to a driver call, by kind of call and number of
// threads that make it.
//   bench_calls INTERCEPT_LIBRARY DO_NOTHING_DRIVER     prints one line of JSON
// And to one that comes after the program has used the caches and the TLB (cold.h).
//
// The clock counts also how long threads wait for each other, so there are no more threads than
// cores.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <dlfcn.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "cold.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kRounds = 50;
constexpr unsigned kCalls = 20'000; // a round
constexpr unsigned kThreads[] = {1, 2, 4, 8};
constexpr unsigned kColdKib = 256, kColdCalls = 1'500;
constexpr unsigned kSegments = 64; // what PyTorch's allocator holds in a job of some GiB
constexpr size_t kSegmentBytes = 20 << 20;
constexpr unsigned kFunctions = 64;

struct Library {
    void* handle;
    CUdeviceptr segments[kSegments];
    CUfunction functions[kFunctions]; // what a step of a model launches
    CUstream stream;
    CUcontext context; // a primary one, as every program has
};

// Makes a round of calls; what it needs it takes from the library that is measured.
using Round = void (*)(const Library&);

template <typename Function> Function* find(const Library& library, const char* name) {
    void* found = dlsym(library.handle, name);
    if (!found) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        exit(2);
    }
    return reinterpret_cast<Function*>(found);
}

#define FIND(library, name) find<decltype(name)>(library, #name)
#define REPEAT(...)                                                                                \
    for (unsigned i = 0; i < kCalls; i++)                                                          \
    __VA_ARGS__

struct Kind {
    const char* name;
    Round round;
};

const Kind kKinds[] = {
    {"cuCtxGetCurrent",
     [](const Library& l) {
         auto* call = FIND(l, cuCtxGetCurrent);
         CUcontext context;
         REPEAT(call(&context));
     }},
    {"cuCtxSetCurrent",
     [](const Library& l) {
         auto* call = FIND(l, cuCtxSetCurrent);
         REPEAT(call(l.context));
     }},
    {"cuLaunchKernel",
     [](const Library& l) {
         auto* call = FIND(l, cuLaunchKernel);
         REPEAT(call(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
     }},
    {"cuLaunchKernelEx",
     [](const Library& l) {
         auto* call = FIND(l, cuLaunchKernelEx);
         CUlaunchConfig config = {};
         REPEAT(call(&config, nullptr, nullptr, nullptr));
     }},
    {"cuEventRecord",
     [](const Library& l) {
         auto* call = FIND(l, cuEventRecord);
         REPEAT(call(nullptr, nullptr));
     }},
    {"cuEventQuery",
     [](const Library& l) {
         auto* call = FIND(l, cuEventQuery);
         REPEAT(call(nullptr));
     }},
    {"cuStreamIsCapturing",
     [](const Library& l) {
         auto* call = FIND(l, cuStreamIsCapturing);
         CUstreamCaptureStatus status;
         REPEAT(call(nullptr, &status));
     }},
    {"cuStreamSynchronize",
     [](const Library& l) {
         auto* call = FIND(l, cuStreamSynchronize);
         REPEAT(call(nullptr));
     }},
    {"cuMemcpyAsync",
     [](const Library& l) {
         auto* call = FIND(l, cuMemcpyAsync);
         REPEAT(call(l.segments[0], l.segments[1], 64, nullptr));
     }},
    {"cuPointerGetAttribute, device",
     [](const Library& l) {
         auto* call = FIND(l, cuPointerGetAttribute);
         CUdeviceptr answer;
         REPEAT(
             call(&answer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, l.segments[i % kSegments] + 512));
     }},
    {"cuPointerGetAttribute, host",
     [](const Library& l) {
         auto* call = FIND(l, cuPointerGetAttribute);
         CUdeviceptr answer;
         REPEAT(call(&answer, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                     reinterpret_cast<CUdeviceptr>(&answer)));
     }},
    {"cuPointerGetAttributes, device",
     [](const Library& l) {
         auto* call = FIND(l, cuPointerGetAttributes);
         CUdeviceptr address = 0;
         unsigned type = 0;
         CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                             CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
         void* answers[] = {&address, &type};
         REPEAT(call(2, attributes, answers, l.segments[i % kSegments] + 512));
     }},
    {"cuMemGetAddressRange",
     [](const Library& l) {
         auto* call = FIND(l, cuMemGetAddressRange_v2);
         CUdeviceptr base;
         size_t bytes;
         REPEAT(call(&base, &bytes, l.segments[i % kSegments] + 512));
     }},
    {"cuMemAllocAsync and cuMemFreeAsync",
     [](const Library& l) {
         auto* give = FIND(l, cuMemAllocAsync);
         auto* take = FIND(l, cuMemFreeAsync);
         CUdeviceptr address = reinterpret_cast<CUdeviceptr>(&address); // another one each thread
         REPEAT({
             give(&address, 512, nullptr);
             take(address, nullptr);
         });
     }},
};

// The slowest thread's median round, while all of them call.
double ns_per_call(const Library& library, Round round, unsigned threads) {
    std::vector<std::thread> running;
    std::vector<double> medians(threads);
    std::atomic<unsigned> ready{0};
    for (unsigned thread = 0; thread < threads; thread++)
        running.emplace_back([&, thread] {
            FIND(library, cuCtxSetCurrent)(library.context);
            round(library);
            ready++;
            while (ready.load() < threads)
                std::this_thread::yield();
            std::vector<double> spent(kRounds);
            for (double& ns : spent) {
                auto start = Clock::now();
                round(library);
                ns =
                    std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kCalls;
            }
            std::sort(spent.begin(), spent.end());
            medians[thread] = spent[kRounds / 2];
        });
    for (auto& thread : running)
        thread.join();
    return *std::max_element(medians.begin(), medians.end());
}

// As cudart makes it, which asks for driver functions by cuGetProcAddress. `ask`: with what
// PyTorch, by the linked symbol, and cudart ask before, as often as they do.
double ns_of_a_cold_launch(const Library& library, bool ask) {
    auto of_cudart = [&](const char* name) {
        void* found = nullptr;
        FIND(library, cuGetProcAddress_v2)(name, &found, CUDA_VERSION, 0, nullptr);
        return found;
    };
    auto* call = reinterpret_cast<decltype(&cuLaunchKernel)>(of_cudart("cuLaunchKernel"));
    auto* device = reinterpret_cast<decltype(&cuCtxGetDevice_v2)>(of_cudart("cuCtxGetDevice"));
    auto* state = FIND(library, cuDevicePrimaryCtxGetState);
    auto function = [&](unsigned i) { return library.functions[i % kFunctions]; };
    auto launch = [&](CUfunction one) {
        unsigned flags = 0;
        int active = 0;
        CUdevice current = 0;
        for (unsigned i = 0; ask && i < 4; i++)
            state(0, &flags, &active);
        for (unsigned i = 0; ask && i < 12; i++)
            device(&current, nullptr);
        call(one, 1, 1, 1, 1, 1, 1, 0, library.stream, nullptr, nullptr);
    };
    return flowgpu::cold_events(kColdKib, kColdCalls, function, launch).median;
}

Library open_library(const char* path) {
    Library library = {dlopen(path, RTLD_NOW | RTLD_LOCAL), {}, {}, {}, {}};
    if (!library.handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    FIND(library, cuInit)(0);
    FIND(library, cuDevicePrimaryCtxRetain)(&library.context, 0);
    for (CUdeviceptr& segment : library.segments)
        FIND(library, cuMemAlloc_v2)(&segment, kSegmentBytes);
    CUmodule module = nullptr;
    FIND(library, cuModuleLoadData)(&module, ".version 8.0");
    for (CUfunction& function : library.functions)
        FIND(library, cuModuleGetFunction)(&function, module, "kernel");
    FIND(library, cuStreamCreate)(&library.stream, CU_STREAM_NON_BLOCKING);
    return library;
}

} // namespace

int main(int count, char** arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: bench_calls INTERCEPT_LIBRARY DO_NOTHING_DRIVER\n");
        return 2;
    }
    setenv("FLOWGPU_REAL_LIBCUDA", arguments[2], 1);
    unsetenv("FLOWGPU_SOCKET"); // no coordinator is looked for
    Library ours = open_library(arguments[1]), bare = open_library(arguments[2]);
    const char* separator = "{";
    for (const Kind& kind : kKinds) {
        printf("%s\"%s\": {", separator, kind.name);
        for (unsigned threads : kThreads) {
            if (threads > std::max(std::thread::hardware_concurrency(), 1u))
                break;
            double direct = ns_per_call(bare, kind.round, threads);
            double added = ns_per_call(ours, kind.round, threads) - direct;
            printf("%s\"%u\": %.2f", threads == kThreads[0] ? "" : ", ", threads, added);
        }
        printf("}");
        separator = ", ";
    }
    for (bool ask : {false, true}) {
        const double direct = ns_of_a_cold_launch(bare, ask);
        printf(", \"cuLaunchKernel%s, %u KiB used in between\": {\"1\": %.2f}",
               ask ? " as of PyTorch" : "", kColdKib, ns_of_a_cold_launch(ours, ask) - direct);
    }
    printf("}\n");
    return 0;
}
