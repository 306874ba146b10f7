#include "entrance.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "descriptor.h"

namespace flowgpu::entrance {

namespace {

constexpr off_t kPassing = 0, kBeginning = 1; // the bytes of the file

std::atomic<int> file{-1};

void lock(int fd, short kind, off_t byte) {
    struct flock wanted = {};
    wanted.l_type = kind;
    wanted.l_whence = SEEK_SET;
    wanted.l_start = byte;
    wanted.l_len = 1;
    while (fcntl(fd, F_SETLKW, &wanted) < 0 && errno == EINTR)
        ; // by a signal of the program's
}

void pass_once() {
    const char* socket = getenv("FLOWGPU_SOCKET");
    if (!socket || !*socket)
        return;
    std::string path(socket);
    path.replace(path.rfind('/') + 1, std::string::npos, "entrance");
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    fd = move_high(fd); // before it is locked: a close of the file ends all locks of a process
    lock(fd, F_RDLCK, kPassing);
    lock(fd, F_RDLCK, kBeginning);
    lock(fd, F_UNLCK, kPassing);
    file.store(fd);
}

} // namespace

void pass() {
    static pthread_once_t passed = PTHREAD_ONCE_INIT;
    const int error = errno;
    pthread_once(&passed, pass_once);
    errno = error;
}

void leave() {
    const int fd = file.exchange(-1);
    if (fd >= 0)
        close(fd);
}

} // namespace flowgpu::entrance
