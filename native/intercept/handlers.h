// Handlers of the table's TRACK rows: same signature as the driver's function, called inside the
// gate.
#ifndef FLOWGPU_INTERCEPT_HANDLERS_H
#define FLOWGPU_INTERCEPT_HANDLERS_H

#include "driver.h"

namespace flowgpu::handle {

#define FG_FORWARD(name, parameters, arguments)
#define FG_GATE(name, parameters, arguments)
#define FG_REFUSE(name, parameters, arguments)
#define FG_HANDLE(name, parameters, arguments) CUresult name parameters;
#include "generated/api.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_REFUSE
#undef FG_HANDLE

// Managed memory that a checkpoint can save; CUDA_ERROR_NOT_SUPPORTED: there is none. `lasting`:
// managed.h.
CUresult allocate_managed(CUdeviceptr* address, size_t bytes, bool lasting);

// From now on a checkpoint refuses by the symbol's name.
inline void count_refused(unsigned symbol) {
    flowgpu_refused_calls[symbol].fetch_add(1, std::memory_order_relaxed);
}

} // namespace flowgpu::handle

#endif
