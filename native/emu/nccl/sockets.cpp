#include "sockets.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace flowgpu::nccl {

namespace {

constexpr int kLookMs = 50;

bool is_wanted(const char* name, const std::string& wanted) {
    const bool left_out = wanted[0] == '^';
    size_t at = left_out ? 1 : 0;
    const bool whole = wanted[at] == '=';
    at += whole ? 1 : 0;
    while (at <= wanted.size()) {
        const size_t end = std::min(wanted.find(',', at), wanted.size());
        const std::string one = wanted.substr(at, end - at);
        if (whole ? one == name : strncmp(name, one.c_str(), one.size()) == 0)
            return !left_out;
        at = end + 1;
    }
    return left_out;
}

bool find_address(const char* wanted, sockaddr_in* address) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0)
        return false;
    bool found = false;
    for (ifaddrs* one = all; one && !found; one = one->ifa_next) {
        found = one->ifa_addr && one->ifa_addr->sa_family == AF_INET &&
                is_wanted(one->ifa_name, wanted);
        if (found)
            memcpy(address, one->ifa_addr, sizeof *address);
    }
    freeifaddrs(all);
    return found;
}

// As NCCL has it: what the process has found first counts for as long as it lives.
bool address_of(const char* wanted, sockaddr_in* address) {
    static std::mutex mutex;
    static sockaddr_in known;
    static bool is_known = false;
    const std::lock_guard lock(mutex);
    is_known = is_known || find_address(wanted, &known);
    *address = known;
    return is_known;
}

sockaddr_un abstract(const std::string& name, socklen_t* size) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
    *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

void without_delay(int connection) {
    const int one = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

Result stopped() {
    return failed(kInternalError, "the communicator was aborted");
}

} // namespace

bool readable(int descriptor, int milliseconds) {
    pollfd one{descriptor, POLLIN, 0};
    return poll(&one, 1, milliseconds) > 0;
}

Result listen_tcp(int* listener, sockaddr_in* address) {
    const char* wanted = getenv("NCCL_SOCKET_IFNAME");
    *address = {};
    address->sin_family = AF_INET;
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (wanted && *wanted && !address_of(wanted, address))
        return failed(kInvalidUsage, "NCCL_SOCKET_IFNAME=%s: no such interface", wanted);
    address->sin_port = 0;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = sizeof *address;
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(address), size) != 0 ||
        listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, reinterpret_cast<sockaddr*>(address), &size) != 0) {
        const int error = errno;
        if (fd >= 0)
            close(fd);
        return failed(kSystemError, "a socket cannot listen: %s", strerror(error));
    }
    *listener = fd;
    return kSuccess;
}

Result connect_tcp(const sockaddr_in& address, int* connection, const Stop& stop) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return failed(kSystemError, "socket: %s", strerror(errno));
    int tries = 0;
    while (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
        const int error = errno;
        if (stop || (error != EINTR && (error != ECONNREFUSED || ++tries > 100))) {
            close(fd);
            return stop ? stopped() : failed(kSystemError, "connect: %s", strerror(error));
        }
        usleep(10000);
    }
    without_delay(fd);
    *connection = fd;
    return kSuccess;
}

Result accept_tcp(int listener, int* connection, const Stop& stop) {
    for (;;) {
        if (stop)
            return stopped();
        if (!readable(listener, kLookMs))
            continue;
        *connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (*connection >= 0) {
            without_delay(*connection);
            return kSuccess;
        }
        if (errno != EINTR && errno != ECONNABORTED)
            return failed(kSystemError, "accept: %s", strerror(errno));
    }
}

Result send_all(int connection, const void* data, size_t bytes, const Stop& stop) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
        if (stop)
            return stopped();
        const ssize_t sent = send(connection, from, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            return failed(kRemoteError, "send to a peer: %s", strerror(errno));
        from += sent > 0 ? sent : 0;
        bytes -= sent > 0 ? static_cast<size_t>(sent) : 0;
    }
    return kSuccess;
}

Result receive_all(int connection, void* data, size_t bytes, const Stop& stop) {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
        if (stop)
            return stopped();
        if (!readable(connection, kLookMs))
            continue;
        const ssize_t got = recv(connection, to, bytes, 0);
        if (got == 0 || (got < 0 && errno != EINTR))
            return failed(kRemoteError, "receive from a peer: %s",
                          got == 0 ? "it has closed its connection" : strerror(errno));
        to += got > 0 ? got : 0;
        bytes -= got > 0 ? static_cast<size_t>(got) : 0;
    }
    return kSuccess;
}

int bind_abstract(const std::string& name) {
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    socklen_t size = 0;
    const sockaddr_un address = abstract(name, &size);
    if (fd >= 0 && bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

bool send_datagram(int from, const std::string& to, const void* data, size_t bytes,
                   int descriptor) {
    socklen_t size = 0;
    sockaddr_un address = abstract(to, &size);
    iovec part{const_cast<void*>(data), bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_name = &address;
    message.msg_namelen = size;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    }
    return sendmsg(from, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

ssize_t receive_datagram(int from, void* data, size_t bytes, int* descriptor) {
    iovec part{data, bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* header = got >= 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(descriptor, CMSG_DATA(header), sizeof(int));
    return got;
}

} // namespace flowgpu::nccl
