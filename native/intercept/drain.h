// Waits, with an end, until nothing that the program submitted is in flight.
#ifndef FLOWGPU_INTERCEPT_DRAIN_H
#define FLOWGPU_INTERCEPT_DRAIN_H

#include <chrono>

#include <cuda.h>

namespace flowgpu {

// Behind a closed gate. CUDA_ERROR_NOT_READY: work was still in flight at the deadline.
CUresult drain_until(std::chrono::steady_clock::time_point deadline);

} // namespace flowgpu

#endif
