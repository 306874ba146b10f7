// Which memory of the host devices may have written since a checkpoint has begun to copy the pages
// of this process (native/pages/tracked.h). No fault tells of such writes.
#ifndef FLOWGPU_INTERCEPT_DEVICE_WRITES_H
#define FLOWGPU_INTERCEPT_DEVICE_WRITES_H

#include <vector>

#include "pinned.h"

namespace flowgpu::device_writes {

// From now on what calls copy into memory of the host is noted, and what the driver holds
// registered. Calls that are under way are waited for; where one does not end soon, all memory
// counts as written. The gate is watched until it closes.
void begin();
// Nobody asks any more. A gate that is watched for this is open again.
void end();
bool begun();
// What was noted, behind the closed gate.
std::vector<pinned::Range> noted();

} // namespace flowgpu::device_writes

#endif
