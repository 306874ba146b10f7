// Faults on purpose, for tests: FLOWGPU_FAULT=name:nth makes the nth pass of a point of fault.def
// fail.
#ifndef FLOWGPU_COMMON_FAULT_H
#define FLOWGPU_COMMON_FAULT_H

namespace flowgpu {

enum class Fault {
#define FLOWGPU_FAULT_POINT(name, what) at_##name,
#include "flowgpu/fault.def"
#undef FLOWGPU_FAULT_POINT
};

// Counts a pass of `point`; true if this is the one that is to fail. For one thread.
bool fires(Fault point);

} // namespace flowgpu

#endif
