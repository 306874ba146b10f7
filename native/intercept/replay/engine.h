// The replay engine's two steps in a task, behind a closed gate.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ENGINE_H
#define FLOWGPU_INTERCEPT_REPLAY_ENGINE_H

#include <cstddef>

namespace flowgpu::replay {

// True while the driver is away: from strip() until a rebuild() succeeds.
bool stripped();

// Reads from the driver what rebuild() needs of it, for a copy of this process that is made without
// its devices. This process goes on as it is, and forgets that at the next forget_kept(). False:
// `detail` says why, and nothing was kept.
bool keep(char* detail, size_t bytes);
bool keeps();
void forget_kept();
// True if this process is such a copy. From then on it is as after strip(): nobody may call the
// driver before rebuild().
bool become_copy();

// Ends CUDA in this process, and with it the hold of device memory, which others have as well by
// now. False: `detail` says why, and the process is as before, unless *lost: it cannot go on.
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
