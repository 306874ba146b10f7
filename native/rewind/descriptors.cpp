#include "descriptors.h"

#include <cstring>
#include <mutex>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "table.h"

namespace flowgpu::rewind::descriptors {

namespace {

struct Descriptor {
    int fd;
    dev_t device;
    ino_t inode;
    mode_t mode;
    bool shared; // with a process outside: a socket, or what came by one
};

using Lock = std::lock_guard<std::mutex>;

std::mutex mutex;
Table<Descriptor, 1024> all;

bool same(const Descriptor& one) {
    struct stat now;
    return fstat(one.fd, &now) == 0 && now.st_dev == one.device && now.st_ino == one.inode;
}

int note(int fd, bool shared = false) {
    struct stat now;
    if (fd >= 0 && fstat(fd, &now) == 0) {
        Lock lock(mutex);
        if (Descriptor* row = all.add())
            *row = {fd, now.st_dev, now.st_ino, now.st_mode, shared};
    }
    return fd;
}

} // namespace

int make_pipe(int ends[2], int flags) {
    int result = pipe2(ends, flags);
    for (int i = 0; result == 0 && i < 2; i++)
        note(ends[i]);
    return result;
}

int make_event(unsigned count, int flags) {
    return note(eventfd(count, flags));
}

int make_epoll(int flags) {
    return note(epoll_create1(flags));
}

int make_socket(int domain, int type, int protocol) {
    return note(socket(domain, type, protocol), true);
}

ssize_t receive(int socket, msghdr* message, int flags) {
    const ssize_t got = recvmsg(socket, message, flags);
    for (cmsghdr* one = got >= 0 ? CMSG_FIRSTHDR(message) : nullptr; one;
         one = CMSG_NXTHDR(message, one)) {
        if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = CMSG_LEN(0); at + sizeof(int) <= one->cmsg_len; at += sizeof(int)) {
            int fd;
            memcpy(&fd, reinterpret_cast<char*>(one) + at, sizeof fd);
            note(fd, true);
        }
    }
    return got;
}

int shut(int fd) {
    {
        Lock lock(mutex);
        for (Descriptor& row : all)
            if (row.fd == fd) {
                all.remove(&row);
                break;
            }
    }
    return close(fd);
}

void end_life(bool sees_closes) {
    for (const Descriptor& one : all)
        if (sees_closes && same(one))
            close(one.fd);
    all.count = 0;
}

void leave_parents() {
    if (!mutex.try_lock())
        return; // another thread of the parent's was changing the table
    for (size_t i = all.count; i-- > 0;) {
        Descriptor& one = all.rows[i];
        if (one.shared && same(one))
            close(one.fd);
    }
    mutex.unlock();
}

void forget_lost() {
    Lock lock(mutex);
    for (size_t i = all.count; i-- > 0;)
        if (!same(all.rows[i]))
            all.remove(&all.rows[i]);
}

void renew() {
    Lock lock(mutex);
    for (Descriptor& one : all) {
        struct stat now;
        if (fstat(one.fd, &now) == 0 && now.st_mode == one.mode)
            one = {one.fd, now.st_dev, now.st_ino, now.st_mode, one.shared};
    }
}

} // namespace flowgpu::rewind::descriptors
