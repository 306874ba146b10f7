// Graphs may hold operations of NCCL: each launch of such a graph is a unit that takes their
// numbers.
#ifndef FLOWGPU_NCCL_GRAPHS_H
#define FLOWGPU_NCCL_GRAPHS_H

#include "page.h"

namespace flowgpu::nccl {

// One more operation of a channel.
void capture(const void* graph, uint32_t row);
// A clone or an executable of `other`; an executable that was updated by it.
void become(const void* graph, const void* other);
// `other` is in it, as a child.
void take(const void* graph, const void* other);
void end(const void* graph);
// The row's communicator has ended.
void forget_captured(uint32_t row);
// False: nothing of NCCL is in it.
bool launch_of(const void* graph, Unit* unit);

} // namespace flowgpu::nccl

#endif
