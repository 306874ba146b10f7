// /proc/self without allocation and stdio: for a process whose threads may stand anywhere.
#ifndef FLOWGPU_COMMON_PROC_H
#define FLOWGPU_COMMON_PROC_H

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace flowgpu::proc {

// Closes what it holds.
class File {
  public:
    explicit File(const char* path, int flags = O_RDONLY) : fd_(open(path, flags | O_CLOEXEC)) {}
    ~File() {
        if (fd_ >= 0)
            close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }
    // Bytes read, 0 at the end and on an error.
    size_t read_some(void* to, size_t bytes) {
        ssize_t got;
        do
            got = read(fd_, to, bytes);
        while (got < 0 && errno == EINTR);
        return got > 0 ? static_cast<size_t>(got) : 0;
    }

  private:
    int fd_;
};

// Calls visit(name, descriptor of the folder) for each entry whose name is a number. False when the
// folder cannot be read.
template <class Visit> bool each_number(const char* folder, Visit visit) {
    File directory(folder, O_DIRECTORY);
    if (directory.fd() < 0)
        return false;
    alignas(8) char buffer[4096];
    for (;;) {
        long got = syscall(SYS_getdents64, directory.fd(), buffer, sizeof buffer);
        if (got <= 0)
            return got == 0;
        for (long at = 0; at < got;) {
            auto* entry = reinterpret_cast<dirent64*>(buffer + at);
            at += entry->d_reclen;
            if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9')
                visit(static_cast<const char*>(entry->d_name), directory.fd());
        }
    }
}

// Calls visit(line) for each line, cut to 511 characters. False when the file cannot be read.
template <class Visit> bool each_line(const char* path, Visit visit) {
    File file(path);
    if (file.fd() < 0)
        return false;
    char buffer[4096], line[512];
    size_t length = 0;
    while (size_t got = file.read_some(buffer, sizeof buffer))
        for (size_t i = 0; i < got; i++) {
            if (buffer[i] != '\n') {
                if (length < sizeof line - 1)
                    line[length++] = buffer[i];
                continue;
            }
            line[length] = 0;
            visit(static_cast<const char*>(line));
            length = 0;
        }
    return true;
}

struct Mapping {
    uintptr_t start, end;
    char mode[5];     // as in "rw-p"
    const char* name; // empty when it has none; valid during the visit
};

// Calls visit(const Mapping&) for each mapping of this process.
template <class Visit> bool each_mapping(Visit visit) {
    return each_line("/proc/self/maps", [&](const char* line) {
        Mapping mapping = {};
        char* at;
        mapping.start = strtoul(line, &at, 16);
        mapping.end = strtoul(at + 1, &at, 16);
        memcpy(mapping.mode, at + 1, 4);
        mapping.name = at + 5;
        for (int field = 0; field < 3; field++) { // offset, device, inode
            mapping.name += strspn(mapping.name, " ");
            mapping.name += strcspn(mapping.name, " ");
        }
        mapping.name += strspn(mapping.name, " ");
        visit(static_cast<const Mapping&>(mapping));
    });
}

// The signals that a thread of this process blocks: bit `signal` - 1. 0 when it is gone.
inline uint64_t blocked_signals(pid_t thread) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", thread);
    uint64_t blocked = 0;
    each_line(path, [&](const char* line) {
        if (strncmp(line, "SigBlk:", 7) == 0)
            blocked = strtoull(line + 7, nullptr, 16);
    });
    return blocked;
}

} // namespace flowgpu::proc

#endif
