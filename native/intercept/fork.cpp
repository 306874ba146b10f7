// A child of fork() inherits the driver's device descriptors and mappings, which are dead weight to
// it (the driver answers CUDA_ERROR_NOT_INITIALIZED there) but make CRIU refuse the whole tree
// (P23). The child drops them, and forgets the parent's gate, sockets and control page.
#include "fork.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "gate.h"
#include "task.h"

namespace flowgpu::fork_guard {

namespace {

void (*close_sockets)();

// Device descriptors are /dev/nvidia*; the emulated driver's are sockets that listen at, or are
// connected to, a name with "flowgpu-emu".
bool is_device(int fd, const char* target) {
    if (strncmp(target, "/dev/nvidia", 11) == 0)
        return true;
    if (strncmp(target, "socket:", 7) != 0)
        return strstr(target, "flowgpu-emu-device") != nullptr;
    sockaddr_un name = {};
    auto* generic = reinterpret_cast<sockaddr*>(&name);
    socklen_t length = sizeof name;
    if (getpeername(fd, generic, &length) != 0) {
        length = sizeof name;
        if (getsockname(fd, generic, &length) != 0)
            return false;
    }
    constexpr size_t path = offsetof(sockaddr_un, sun_path);
    return name.sun_family == AF_UNIX && length > path &&
           memmem(name.sun_path, length - path, "flowgpu-emu", 11) != nullptr;
}

void close_devices() {
    DIR* directory = opendir("/proc/self/fd");
    if (!directory)
        return;
    while (dirent* entry = readdir(directory)) {
        int fd = atoi(entry->d_name);
        char target[128] = {};
        if (entry->d_name[0] == '.' || fd == dirfd(directory) ||
            readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1) <= 0)
            continue;
        if (is_device(fd, target))
            close(fd);
    }
    closedir(directory);
}

// Plain pages take the place of device mappings: whatever still looks there at exit reads zeros.
void drop_mappings() {
    FILE* maps = fopen("/proc/self/maps", "re");
    if (!maps)
        return;
    char line[512];
    while (fgets(line, sizeof line, maps)) {
        if (!strstr(line, "/dev/nvidia") && !strstr(line, "flowgpu-emu-device"))
            continue;
        unsigned long start, end;
        char mode[5];
        if (sscanf(line, "%lx-%lx %4s", &start, &end, mode) != 3)
            continue;
        int protection = mode[0] == 'r' ? PROT_READ | PROT_WRITE : PROT_NONE;
        mmap(reinterpret_cast<void*>(start), end - start, protection,
             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    fclose(maps);
}

void before() {
    task().memory.mutex().lock();
    task().mutex.lock();
}

void in_parent() {
    task().mutex.unlock();
    task().memory.mutex().unlock();
}

void in_child() {
    int error = errno;
    Task& t = task();
    t.mutex.unlock();
    t.memory.mutex().unlock();
    gate::reset_after_fork();
    static flowgpu_control_page childs_page;
    t.page.store(&childs_page);
    if (t.page_fd >= 0)
        close(t.page_fd);
    t.page_fd = -1;
    close_sockets();
    t.memory.forget_parents();
    close_devices();
    drop_mappings();
    errno = error;
}

} // namespace

void install(void (*close_in_child)()) {
    close_sockets = close_in_child;
    pthread_atfork(before, in_parent, in_child);
}

} // namespace flowgpu::fork_guard
