// Why an engine cannot save this process now, or, for none, why its blocks cannot be taken. A part
// of the library that knows a reason has a row in obstacles.cpp, and names what it has found.
#ifndef FLOWGPU_INTERCEPT_OBSTACLES_H
#define FLOWGPU_INTERCEPT_OBSTACLES_H

#include <cstdint>
#include <string>

namespace flowgpu {

// The names of all of them, by commas; empty where the engine can save the process. `still`: no
// thread of the program is in the driver.
std::string obstacles(uint32_t engine, bool still);

} // namespace flowgpu

#endif
