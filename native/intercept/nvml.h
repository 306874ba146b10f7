// NVML, where the program uses it: it holds devices of its own, which an image cannot have.
#ifndef FLOWGPU_INTERCEPT_NVML_H
#define FLOWGPU_INTERCEPT_NVML_H

namespace flowgpu::nvml {

// Shuts NVML down for as often as the program has initialised it. Its calls fail until come_back().
void leave();
// Initialises it as often again. The program's handles of devices are good again: they lead to the
// library's own tables. Does nothing without a leave().
void come_back();

} // namespace flowgpu::nvml

#endif
