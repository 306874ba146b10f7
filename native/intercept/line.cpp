#include "line.h"

#include <cerrno>
#include <ctime>

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "descriptor.h"

namespace flowgpu::line {

namespace {

int near_end = -1, far_end = -1;
ino_t near_inode; // of the end when it was last known to be ours
bool was_used;

ino_t inode(int fd) {
    struct stat found;
    return fd >= 0 && fstat(fd, &found) == 0 ? found.st_ino : 0;
}

bool works() {
    pollfd far = {far_end, POLLIN | POLLRDHUP, 0};
    if (poll(&far, 1, 0) != 1 || far.revents != POLLIN)
        return false; // the near end is gone, or what has the number is something else
    flowgpu_header card;
    const ssize_t got = recv(far_end, &card, sizeof card, MSG_PEEK | MSG_DONTWAIT);
    const bool found = got == sizeof card && card.magic == FLOWGPU_WIRE_MAGIC &&
                       card.type == FLOWGPU_CALL && inode(near_end);
    if (found)
        near_inode = inode(near_end); // a restored socket has another
    return found;
}

} // namespace

void mend() {
    const int error = errno;
    if (!works()) {
        if (inode(near_end) == near_inode && near_inode)
            close(near_end); // else the number is the program's by now, as the far one is
        near_end = far_end = -1;
        near_inode = 0;
        was_used = false;
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0) {
            near_end = move_high(ends[0]);
            far_end = move_high(ends[1]);
            near_inode = inode(near_end);
            const flowgpu_header card = make_header(FLOWGPU_CALL, sizeof card);
            send_packet(near_end, &card, sizeof card);
        }
    }
    errno = error;
}

int end() {
    return near_end;
}

bool rings(int milliseconds) {
    pollfd wait = {near_end, POLLIN, 0};
    if (poll(&wait, 1, milliseconds) <= 0)
        return false;
    if (wait.revents == POLLIN)
        return true;
    mend();
    timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
    nanosleep(&pause, nullptr);
    return false;
}

int take(Packet* packet) {
    if (receive_packet(near_end, packet, 0) != Received::ok)
        return -1;
    int connection = -1;
    if (packet->header().type == FLOWGPU_CALL && packet->fd_count == 1) {
        connection = move_high(packet->take_fd(0));
        was_used = true;
    }
    packet->close_fds();
    return connection;
}

void drain(Packet* packet) {
    while (near_end >= 0 && receive_packet(near_end, packet, 0) != Received::closed)
        packet->close_fds();
}

bool used() {
    return was_used;
}

void close_in_child() {
    close(near_end);
    close(far_end);
    near_end = far_end = -1;
    near_inode = 0;
    was_used = false;
}

} // namespace flowgpu::line
