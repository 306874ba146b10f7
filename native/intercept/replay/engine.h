// The replay engine's two steps in a task, behind a closed gate.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ENGINE_H
#define FLOWGPU_INTERCEPT_REPLAY_ENGINE_H

#include <cstddef>

namespace flowgpu::replay {

// Whether the driver is away: between strip() and a rebuild() that succeeded.
bool stripped();

// Ends CUDA in this process; the program's device memory is with the ghost by now. False: `detail`
// says why, and the process is as before, unless *lost: it cannot go on.
bool strip(char* detail, size_t bytes, bool* lost);

// Makes CUDA anew with every object of the record. False: `detail` says why; it may be tried again.
bool rebuild(char* detail, size_t bytes);

// Makes what needs the program's device memory, once that is back after a rebuild(): graphs. Does
// nothing where nothing is left to make. False: `detail` says why; it may be tried again.
bool finish(char* detail, size_t bytes);

} // namespace flowgpu::replay

#endif
