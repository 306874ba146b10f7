// What CRIU 4.2 documents of its plugins, at version 0.2 of their interface.
#ifndef FLOWGPU_CRIU_PLUGIN_INTERFACE_H
#define FLOWGPU_CRIU_PLUGIN_INTERFACE_H

namespace flowgpu::criu {

// An answer of -ENOTSUP: not ours.
enum Hook {
    kDumpUnixSocket = 0,    // int (int fd, int inode)
    kRestoreUnixSocket = 1, // int (int inode): the descriptor
    kDumpFile = 2,          // int (int fd, int id), of a kind of file that CRIU does not know
    kRestoreFile = 3,       // int (int id): the descriptor
    kDumpMapping = 7,       // int (int fd, const struct stat*), of such a file
    kRestoreMapping = 8,    // int (name, address, offset, uint64_t* new offset, int* fd): 1
    kResumeDevicesLate = 9, // int (int pid), restored and not let go yet
    kPauseDevices = 10,     // int (int pid), before it is stopped
    kHooks = 11,
};
enum Stage { kDumpStage = 0, kPreDumpStage = 1, kRestoreStage = 2 };
constexpr unsigned kInterface = 2 << 8;

// CRIU reads one where the symbol CR_PLUGIN_DESC is. A null hook is none.
struct Plugin {
    const char* name;
    int (*begin)(int stage);
    void (*end)(int stage, int result);
    unsigned interface;
    unsigned hook_count; // up to its last: a CRIU may know fewer than these
    void* hooks[kHooks];
};

template <class Function> void* hook(Function* function) {
    return reinterpret_cast<void*>(function);
}

} // namespace flowgpu::criu

#endif
