// The replay engine's two steps in a task, behind a closed gate.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ENGINE_H
#define FLOWGPU_INTERCEPT_REPLAY_ENGINE_H

#include <cstddef>

namespace flowgpu::replay {

// Whether the driver is away: between strip() and a rebuild() that succeeded.
bool stripped();

// Reads from the driver what rebuild() needs of it, for a copy of this process that is made without
// its devices. This process goes on as it is, and forgets that at the next forget_kept(). False:
// `detail` says why, and nothing was kept.
bool keep(char* detail, size_t bytes);
bool keeps();
void forget_kept();
// Whether this process is such a copy. Then it is from here on as after strip(): the driver must
// not be called before rebuild().
bool become_copy();

// Ends CUDA in this process; the program's device memory is with the ghost by now. False: `detail`
// says why, and the process is as before, unless *lost: it cannot go on.
bool strip(char* detail, size_t bytes, bool* lost);

// Makes CUDA anew with every object of the record. False: `detail` says why; it may be tried again.
bool rebuild(char* detail, size_t bytes);

// Says whether the last rebuild() has failed at what a moment may mend: a child that is about to
// run another program has the driver's socket too, and the driver takes its name only once.
bool may_come_later();

// Makes what needs the program's device memory, once that is back after a rebuild(): graphs. Does
// nothing where nothing is left to make. False: `detail` says why; it may be tried again.
bool finish(char* detail, size_t bytes);

} // namespace flowgpu::replay

#endif
