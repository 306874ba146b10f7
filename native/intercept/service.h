// The task's side of a checkpoint: one thread that answers the coordinator (wire.h), and what a
// fork must undo.
#ifndef FLOWGPU_INTERCEPT_SERVICE_H
#define FLOWGPU_INTERCEPT_SERVICE_H

namespace flowgpu::service {

// Starts the thread if FLOWGPU_SOCKET names a coordinator; called after each successful cuInit,
// acts once a process.
void start();

} // namespace flowgpu::service

#endif
