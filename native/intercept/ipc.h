// Legacy IPC (cuIpcGetMemHandle) of memory from cuMemAlloc, which lives in VMM blocks and has no
// such handle of the driver's.
#ifndef FLOWGPU_INTERCEPT_IPC_H
#define FLOWGPU_INTERCEPT_IPC_H

namespace flowgpu::ipc {

// Around a fork. In the child, what is the parent's business is forgotten.
void lock();
void unlock();
void forget_parents();

} // namespace flowgpu::ipc

#endif
