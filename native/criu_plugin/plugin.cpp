// A plugin of CRIU's for dumping tasks that hold a GPU and go on: what ties them to it is left out
// of the image, and the copy's driver is rewound before it is used (docs/design/replay-engine.md).
//
// Left out is what device.h takes for a device, and nothing else: what CRIU refuses without this
// plugin, it refuses with it. In a restored process stands instead of
//   a descriptor   a socket on which poll() never finds anything to read, since the driver's
//                  threads wait there and have to be at rest when they are ended,
//   a mapping      pages of zeros,
// both under names by which the copy finds them.
//
// And where FLOWGPU_AMX is set, the tasks that CRIU restores may use AMX: the kernel asks each
// process to ask for that once, its children have it too, and CRIU does not save who had it.
//
// Takes nothing but names from the C library it meets, which is the one that CRIU comes with.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "device.h"
#include "interface.h"

namespace {

using namespace flowgpu::criu;

// asm/prctl.h, and the number of the state with the contents of AMX's tiles.
constexpr int kRequestPermission = 0x1023; // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;

// More than any mapping has: reading behind the end of a file is fatal.
constexpr off_t kMappingBytes = off_t{1} << 46;

bool is_device_file(int fd) {
    char path[32], target[128] = {};
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct stat about;
    return fstat(fd, &about) == 0 && S_ISCHR(about.st_mode) &&
           readlink(path, target, sizeof target - 1) > 0 &&
           flowgpu::device::is_descriptor(fd, target);
}

int dump_unix_socket(int fd, int) {
    return flowgpu::device::is_descriptor(fd, "socket:") ? 0 : -ENOTSUP;
}

// Makes a socket without a peer, because a peer could end the connection. A random number makes its
// name unique, and the copy finds the socket by the name's beginning.
int stand_in(int) {
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    unsigned long number = 0;
    if (fd < 0 || getrandom(&number, sizeof number, 0) != sizeof number)
        return -1;
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    constexpr size_t head = sizeof flowgpu::device::kLeftOutSocket - 1;
    memcpy(name.sun_path, flowgpu::device::kLeftOutSocket, head);
    const int tail = snprintf(name.sun_path + head, sizeof name.sun_path - head, "%016lx", number);
    const size_t bytes = offsetof(sockaddr_un, sun_path) + head + static_cast<size_t>(tail);
    return bind(fd, reinterpret_cast<sockaddr*>(&name), static_cast<socklen_t>(bytes)) == 0 ? fd
                                                                                            : -1;
}

int dump_file(int fd, int) {
    return is_device_file(fd) ? 0 : -ENOTSUP;
}

int dump_mapping(int fd, const struct stat*) {
    return is_device_file(fd) ? 0 : -ENOTSUP;
}

// CRIU maps neighbours of one file from the descriptor that it has got first, and forgets about the
// others: the copy closes them by their name.
int restore_mapping(const char* name, uint64_t, uint64_t, uint64_t* offset, int* fd) {
    if (!flowgpu::device::is_mapping(name))
        return -ENOTSUP;
    *fd = memfd_create(flowgpu::device::kLeftOutMapping, MFD_CLOEXEC);
    *offset = 0;
    return *fd >= 0 && ftruncate(*fd, kMappingBytes) == 0 ? 1 : -1;
}

// Before CRIU forks. Where it is not granted, the tasks did not have it on such a system.
int begin(int stage) {
    if (stage == kRestoreStage && getenv("FLOWGPU_AMX"))
        syscall(SYS_arch_prctl, kRequestPermission, kTileData);
    return 0;
}

} // namespace

extern "C" __attribute__((visibility("default"))) Plugin CR_PLUGIN_DESC;
Plugin CR_PLUGIN_DESC = {
    "flowgpu-left-out", begin, nullptr, kInterface, kRestoreMapping + 1, {},
};

// CRIU has no hooks of ours before its loader has called this.
__attribute__((constructor)) static void fill_in() {
    CR_PLUGIN_DESC.hooks[kDumpUnixSocket] = hook(dump_unix_socket);
    CR_PLUGIN_DESC.hooks[kRestoreUnixSocket] = hook(stand_in);
    CR_PLUGIN_DESC.hooks[kDumpFile] = hook(dump_file);
    CR_PLUGIN_DESC.hooks[kRestoreFile] = hook(stand_in);
    CR_PLUGIN_DESC.hooks[kDumpMapping] = hook(dump_mapping);
    CR_PLUGIN_DESC.hooks[kRestoreMapping] = hook(restore_mapping);
}
