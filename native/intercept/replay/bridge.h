// Every driver function as the rest of the library calls it in a process that is prepared for the
// replay engine: with the program's handles. FG_REAL leads here instead of to the driver.
#ifndef FLOWGPU_INTERCEPT_REPLAY_BRIDGE_H
#define FLOWGPU_INTERCEPT_REPLAY_BRIDGE_H

#include "driver.h"

namespace flowgpu::replay {

// The function of ours for a symbol; the driver's where there is none.
void* bridge_for(unsigned symbol, void* driver);

// Bodies for the table's rows with replay:record.
namespace recorded {
#define FG_PASS(name, parameters, arguments)
#define FG_UNSAVED(name, parameters, arguments)
#define FG_LIVES(name, parameters, arguments)
#define FG_ENDS(name, parameters, arguments)
#define FG_RECORD(name, parameters, arguments) CUresult name parameters;
#include "generated/replay.inc"
#undef FG_PASS
#undef FG_UNSAVED
#undef FG_LIVES
#undef FG_ENDS
#undef FG_RECORD
} // namespace recorded

} // namespace flowgpu::replay

#endif
