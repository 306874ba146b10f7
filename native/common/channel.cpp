#include "channel.h"

#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "descriptor.h"

namespace flowgpu {

flowgpu_header make_header(uint16_t type, uint32_t bytes, uint32_t count) {
    return flowgpu_header{FLOWGPU_WIRE_MAGIC, FLOWGPU_WIRE_VERSION, type, bytes, count};
}

bool send_packet(int socket, const void* packet, size_t bytes, const int* fds, size_t fd_count) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * FLOWGPU_ROWS_PER_MESSAGE)] = {};
    iovec io = {const_cast<void*>(packet), bytes};
    msghdr message = {};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    if (fd_count) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == static_cast<ssize_t>(bytes);
}

int Packet::take_fd(size_t index) {
    int fd = fds[index];
    fds[index] = -1;
    return fd;
}

void Packet::close_fds() {
    for (size_t i = 0; i < fd_count; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    fd_count = 0;
}

Received receive_packet(int socket, Packet* packet, int timeout_ms) {
    packet->fd_count = 0;
    if (timeout_ms >= 0) {
        pollfd wait = {socket, POLLIN, 0};
        int ready;
        do {
            ready = poll(&wait, 1, timeout_ms);
        } while (ready < 0 && errno == EINTR);
        if (ready <= 0)
            return Received::closed;
    }
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * FLOWGPU_ROWS_PER_MESSAGE)];
    iovec io = {packet->bytes, sizeof packet->bytes};
    msghdr message = {};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    ssize_t got;
    do {
        got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got <= 0)
        return Received::closed;
    packet->size = static_cast<size_t>(got);
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header;
         header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        packet->fd_count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(packet->fds, CMSG_DATA(header), packet->fd_count * sizeof(int));
    }
    const flowgpu_header& header = packet->header();
    bool whole = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) &&
                 packet->size >= sizeof(flowgpu_header) && header.magic == FLOWGPU_WIRE_MAGIC &&
                 header.version == FLOWGPU_WIRE_VERSION && header.bytes == packet->size;
    if (!whole) {
        packet->close_fds();
        return Received::malformed;
    }
    return Received::ok;
}

int connect_seqpacket(const char* path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return move_high(fd);
}

} // namespace flowgpu
