// NVML, where the program uses it: it holds devices of its own, which an image cannot have. While
// the gate is closed its calls wait there, so that no program finds it shut down: dlsym gives
// guards for its functions (native/memstub/dlsym.cpp), and lead_to_guards() sees to those who are
// linked with it.
#ifndef FLOWGPU_INTERCEPT_NVML_H
#define FLOWGPU_INTERCEPT_NVML_H

namespace flowgpu::nvml {

// The slots of libraries that are linked with NVML hold guards from now on. The service thread's,
// as all of this, and before it closes the gate.
void lead_to_guards();
// Shuts NVML down for as often as the program has initialised it, until come_back().
void leave();
// Initialises it as often again. The program's handles of devices are good again: they lead to the
// library's own tables. Does nothing without a leave().
void come_back();

} // namespace flowgpu::nvml

#endif
