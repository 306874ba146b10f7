#include "obstacles.h"

#include <algorithm>
#include <mutex>

#include "contexts.h"
#include "memstub.h"
#include "pinned.h"
#include "pools.h"
#include "replay/record.h"
#include "task.h"

namespace flowgpu {

namespace {

// By commas.
void add(std::string* names, const std::string& name) {
    if (!name.empty())
        *names += (names->empty() ? "" : ", ") + name;
}

std::string if_so(bool so, const char* name) {
    return so ? name : "";
}

std::string refused_calls(bool) {
    std::string names;
    for (unsigned i = 0; i < kSymbols; i++)
        if (refuses[i] && flowgpu_refused_calls[i].load(std::memory_order_relaxed))
            add(&names, symbol_names[i]);
    return names;
}

std::string shared_gpu(bool) {
    const char* device = contexts::not_a_whole_gpu();
    return if_so(device, device);
}

std::string communicators(bool) {
    return if_so(memstub::communicators(), "NCCL communicators (libnccl)");
}

std::string managed_variables(bool) {
    return if_so(task().has_managed_variables(), "managed variables of a module");
}

// Driver 580 answers CUDA_ERROR_NOT_SUPPORTED when it is to save managed memory.
std::string managed_memory(bool) {
    Task& t = task();
    std::lock_guard<std::mutex> lock(t.mutex);
    return if_so(!t.managed.empty(), "memory from cuMemAllocManaged");
}

// Memory that stays with the driver ends with it. Managed memory is among it, and named already.
std::string memory_of_the_driver(bool) {
    const uint64_t of_pools = pools::bytes();
    uint64_t bytes = 0;
    {
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        if (!t.managed.empty())
            return "";
        if (!t.not_plain.empty())
            return "memory from cuMemCreate that is not plain device memory";
        bytes = t.foreign_bytes;
    }
    return if_so(bytes > std::max(of_pools, pools::bytes()),
                 "device memory of the driver's or the program's own");
}

// It is not known that the driver takes such memory again, as replay has a new driver do.
std::string gaps_in_pinned_memory(bool) {
    return if_so(pinned::Gaps(pinned::all()).any(),
                 "registered memory of the host that was unmapped, closed or cut");
}

constexpr unsigned kNative = 1u << FLOWGPU_ENGINE_NATIVE, kReplay = 1u << FLOWGPU_ENGINE_REPLAY;
constexpr struct {
    unsigned engines;
    std::string (*find)(bool still);
} kRows[] = {
    {kNative | kReplay, refused_calls},  {kNative | kReplay, shared_gpu},
    {kNative | kReplay, communicators},  {kNative | kReplay, managed_variables},
    {kNative | kReplay, managed_memory}, {kReplay, memory_of_the_driver},
    {kNative, gaps_in_pinned_memory},    {kReplay, replay::unsaved},
};

} // namespace

std::string obstacles(uint32_t engine, bool still) {
    if (engine == FLOWGPU_ENGINE_REPLAY && !replay::prepared())
        return replay::why_not();
    std::string names;
    for (const auto& row : kRows)
        if (row.engines >> engine & 1)
            add(&names, row.find(still));
    return names;
}

} // namespace flowgpu
