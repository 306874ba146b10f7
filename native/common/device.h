// What ties a process to a GPU, real or emulated, and makes CRIU refuse it.
#ifndef FLOWGPU_COMMON_DEVICE_H
#define FLOWGPU_COMMON_DEVICE_H

namespace flowgpu::device {

// The names of what stands in a restored process for what a dump has left out (native/criu_plugin):
// of a memfd that is mapped, and the beginning of a socket's abstract one.
constexpr char kLeftOutMapping[] = "flowgpu-left-out";
constexpr char kLeftOutSocket[] = "\0flowgpu-left-out-";

// True if a descriptor that links to `target` ties the process to a GPU. Such descriptors are
//   a device file,
//   a socket that is connected to the emulated device or has one of its names,
//   the socket that libcuda binds to "@cuda-uvmfd-<pidns>-<pid>",
//   what stands for one of these in a restored process.
bool is_descriptor(int fd, const char* target);

// True if a mapping with this name in /proc/self/maps ties the process to a GPU.
bool is_mapping(const char* name);

// True if CRIU made this process from a dump that left such descriptors out. Allocates nothing.
bool left_out();

// Closes every such descriptor of this process, without allocation.
void close_descriptors();

} // namespace flowgpu::device

#endif
