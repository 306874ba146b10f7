// The driver's threads: stopped where they hold nothing of libc's, then ended or let go on.
#ifndef FLOWGPU_REWIND_THREADS_H
#define FLOWGPU_REWIND_THREADS_H

#include <cstddef>

namespace flowgpu::rewind::threads {

// Stops all of them. False: `detail` names one that cannot be stopped; all run again.
bool stop(char* detail, size_t bytes);
void let_go();
// Ends those that were stopped. False: `detail` names one that has not ended in time.
bool end(char* detail, size_t bytes);

} // namespace flowgpu::rewind::threads

#endif
