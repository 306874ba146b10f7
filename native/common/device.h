// What ties a process to a GPU, real or emulated, and makes CRIU refuse it.
#ifndef FLOWGPU_COMMON_DEVICE_H
#define FLOWGPU_COMMON_DEVICE_H

namespace flowgpu::device {

// Of a descriptor that links to `target`: a device file, a socket that is connected to, or named as
// one of, the emulated device, or the socket that libcuda binds to "@cuda-uvmfd-<pidns>-<pid>".
bool is_descriptor(int fd, const char* target);

// Of the name of a mapping in /proc/self/maps.
bool is_mapping(const char* name);

// Closes every such descriptor of this process, without allocation.
void close_descriptors();

} // namespace flowgpu::device

#endif
