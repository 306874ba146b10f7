// What calls do to memory while the gate is in the mode WATCH (gate.h): counts, and what copies and
// memsets write, in a log of a fixed size. What does not fit is counted as missed.
#ifndef FLOWGPU_INTERCEPT_WATCH_H
#define FLOWGPU_INTERCEPT_WATCH_H

#include <vector>

#include "flowgpu/wire.h"
#include "gate.h"

namespace flowgpu::watch {

// Whose writes are noted.
enum class What { all, host };

// Forgets what was noted, while no call is watched. False: there is no memory for the log.
bool begin(What what);

// The gate's watcher.
void note(const gate::Call& call);

// Gives what was noted since begin().
flowgpu_watched noted(std::vector<flowgpu_write>* writes);

} // namespace flowgpu::watch

#endif
