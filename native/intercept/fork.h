// Children that fork without exec: they cannot use CUDA, and must not keep what only the parent may
// hold.
#ifndef FLOWGPU_INTERCEPT_FORK_H
#define FLOWGPU_INTERCEPT_FORK_H

namespace flowgpu::fork_guard {

// Installs the handlers; once a process, after the driver is initialised. `close_sockets` is called
// in the child, and again in a child of the child: what it closed is then no longer its own.
void install(void (*close_sockets)());

} // namespace flowgpu::fork_guard

#endif
