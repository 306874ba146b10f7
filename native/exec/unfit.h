// Programs that FlowGPU's libraries cannot be preloaded into: they would not start.
#ifndef FLOWGPU_EXEC_UNFIT_H
#define FLOWGPU_EXEC_UNFIT_H

namespace flowgpu::exec {

// Why the program that is open as `fd` takes none, or null. The interpreter of a script counts for
// the script. What cannot be read counts as a program that takes them.
const char* unfit(int fd);
// The same of the file that execve would run; `path` is relative to `folder`, as for openat.
const char* unfit_at(int folder, const char* path);
// The same of the file that execvp would run.
const char* unfit_in_path(const char* file);

} // namespace flowgpu::exec

#endif
