// The environment as the driver's lives find it.
#ifndef FLOWGPU_REWIND_ENVIRONMENT_H
#define FLOWGPU_REWIND_ENVIRONMENT_H

namespace flowgpu::rewind::environment {

// libc's getenv, for the driver.
char* get(const char* name);

// See rewind.h. `sees_variables`: the driver asks by the function above.
bool see_devices(const char* visible, bool sees_variables);
void keep();

} // namespace flowgpu::rewind::environment

#endif
