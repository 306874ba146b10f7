#include "descriptors.h"

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
};

using Lock = std::lock_guard<std::mutex>;

std::mutex mutex;
Table<Descriptor, 1024> all;

bool same(const Descriptor& one) {
    struct stat now;
    return fstat(one.fd, &now) == 0 && now.st_dev == one.device && now.st_ino == one.inode;
}

int note(int fd) {
    struct stat now;
    if (fd >= 0 && fstat(fd, &now) == 0) {
        Lock lock(mutex);
        if (Descriptor* row = all.add())
            *row = {fd, now.st_dev, now.st_ino, now.st_mode};
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
            one = {one.fd, now.st_dev, now.st_ino, now.st_mode};
    }
}

} // namespace flowgpu::rewind::descriptors
