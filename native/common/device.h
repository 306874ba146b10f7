// What ties a process to a GPU, real or emulated, and makes CRIU refuse it.
#ifndef FLOWGPU_COMMON_DEVICE_H
#define FLOWGPU_COMMON_DEVICE_H

namespace flowgpu::device {

// The names of what stands in a restored process for what a dump has left out (native/criu_plugin):
// of a memfd that is mapped, and the beginning of a socket's abstract one.
constexpr char kLeftOutMapping[] = "flowgpu-left-out";
constexpr char kLeftOutSocket[] = "\0flowgpu-left-out-";

// Of a descriptor that links to `target`: a device file, a socket that is connected to, or named as
// one of, the emulated device, the socket that libcuda binds to "@cuda-uvmfd-<pidns>-<pid>", or
// what stands for one of these.
bool is_descriptor(int fd, const char* target);

// Of the name of a mapping in /proc/self/maps.
bool is_mapping(const char* name);

// Whether this process is a copy that a dump has left such descriptors out of. No allocation.
bool left_out();

// Closes every such descriptor of this process, without allocation.
void close_descriptors();

} // namespace flowgpu::device

#endif
