// Where a process passes before it begins to use the GPU. A checkpoint waits until all who have
// passed are connected, and lets nobody else pass until the job goes on. So no process can begin
// between the look at who uses the GPU and the stop of the job's tree: one that waits here is an
// ordinary process, and goes on here in a restored job.
//
// The entrance is two bytes of an empty file in the job's folder. A process has a read lock
// (fcntl(2)) of the first byte while it passes, and of the second until it is connected. The
// coordinator has a write lock of the first byte while nobody is to pass, and looks who is at the
// second (coordinator/entrance.py). The kernel lets go of the locks of a process that ends, and a
// child of fork(2) has none of them.
#ifndef FLOWGPU_INTERCEPT_ENTRANCE_H
#define FLOWGPU_INTERCEPT_ENTRANCE_H

namespace flowgpu::entrance {

// Waits while a checkpoint is under way. Acts once a process; a process without an entrance (its
// coordinator is older, or it may not open files there) passes.
void pass();

// The process is connected, or will not be. A second call does nothing.
void leave();

} // namespace flowgpu::entrance

#endif
