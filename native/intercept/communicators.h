// The interposer of NCCL (native/nccl), when it is preloaded beside this library; without it
// nothing here does anything. Functions as in flowgpu/nccl.h.
#ifndef FLOWGPU_INTERCEPT_COMMUNICATORS_H
#define FLOWGPU_INTERCEPT_COMMUNICATORS_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "flowgpu/wire.h"

namespace flowgpu::communicators {

// The memfd with the counts, which stays the interposer's, or -1.
int counts_fd();
// Those that live, as far as the interposer sees.
uint32_t living();
// Threads that wait for the cut of a checkpoint go on, unless communicators are ended.
void open();
// A step of ending communicators and making them anew; gives text for what went wrong.
flowgpu_status renew(flowgpu_renewal step, char* detail, size_t bytes);
// The number of stream captures under way has changed.
void captures_changed(const std::atomic<uint32_t>& under_way);

// Tells if a graph may have operations of NCCL.
bool any_graph();
enum class Graph { becomes, takes, ends };
void graph(Graph what, const void* graph, const void* other);
// Around the launch of a graph. True: it counts, and has an end. Waits for the cut of a checkpoint.
bool begin_launch(const void* executable, void* stream);
void end_launch(const void* executable, bool well);

} // namespace flowgpu::communicators

#endif
