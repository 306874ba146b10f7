// Children that fork without exec: they cannot use CUDA, and must not keep what only the parent may
// hold.
#ifndef FLOWGPU_INTERCEPT_FORK_H
#define FLOWGPU_INTERCEPT_FORK_H

namespace flowgpu::fork_guard {

// Installs the handlers; once a process, after the driver is initialised. `socket` is read in the
// child.
void install(const int* socket);

} // namespace flowgpu::fork_guard

#endif
