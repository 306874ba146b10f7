// NVML, where the program uses it: it holds devices of its own, which an image cannot have. While
// the gate is closed or NVML is away, its calls wait, so that no program finds it shut down: dlsym
// gives guards for its functions (native/memstub/dlsym.cpp), and lead_to_guards() sees to those who
// are linked with it.
#ifndef FLOWGPU_INTERCEPT_NVML_H
#define FLOWGPU_INTERCEPT_NVML_H

namespace flowgpu::nvml {

// The slots of libraries that are linked with NVML hold guards from now on. The service thread's,
// as all of this, and before it closes the gate.
void lead_to_guards();
// Shuts NVML down for as often as the program has initialised it, until come_back().
void leave();
// Initialises it as often again. The program's handles of devices are good again: they lead to the
// library's own tables. Does nothing without a leave(). The gate may be open: NVML takes 20 ms.
void come_back();
// Where threads of the program wait until it is back, inside the gate: nothing closes that before.
void wait_until_back();

} // namespace flowgpu::nvml

#endif
