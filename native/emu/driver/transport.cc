#include "transport.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace flowgpu::emu {

void UniqueFd::reset(int fd) {
    if (fd_ >= 0) {
        ::close(fd_);
    }
    fd_ = fd;
}

namespace {

union ControlBuffer {
    cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
};

// The other side mostly answers at once, and to sleep until then takes ten times as long where a
// processor is virtual. To wait longer takes processors from those that work.
void wait_briefly(int socket) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(10);
    char next;
    while (::recv(socket, &next, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN &&
           std::chrono::steady_clock::now() < until) {
        ::sched_yield();
    }
}

ssize_t receive_some(int socket, iovec* parts, int count, UniqueFd* fd) {
    wait_briefly(socket);
    ControlBuffer control;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    ssize_t got;
    do {
        got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        return got;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int received;
            std::memcpy(&received, CMSG_DATA(c), sizeof received);
            UniqueFd owned(received);
            if (fd != nullptr) {
                *fd = std::move(owned);
            }
        }
    }
    return got;
}

bool receive_exactly(int socket, uint8_t* to, size_t size, UniqueFd* fd) {
    while (size > 0) {
        iovec part{to, size};
        const ssize_t got = receive_some(socket, &part, 1, fd);
        if (got <= 0) {
            return false;
        }
        to += got;
        size -= static_cast<size_t>(got);
    }
    return true;
}

} // namespace

bool send_message(int socket, const void* header, size_t header_size,
                  const std::vector<uint8_t>& payload, int fd) {
    iovec parts[2] = {{const_cast<void*>(header), header_size},
                      {const_cast<uint8_t*>(payload.data()), payload.size()}};
    ControlBuffer control;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    size_t left = header_size + payload.size();
    while (left > 0) {
        const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            return false;
        }
        left -= static_cast<size_t>(sent);
        message.msg_control = nullptr;
        message.msg_controllen = 0;
        size_t skip = static_cast<size_t>(sent);
        for (iovec& part : parts) {
            const size_t here = skip < part.iov_len ? skip : part.iov_len;
            part.iov_base = static_cast<uint8_t*>(part.iov_base) + here;
            part.iov_len -= here;
            skip -= here;
        }
    }
    return true;
}

bool receive_message(int socket, void* header, size_t header_size, std::vector<uint8_t>& payload,
                     UniqueFd* fd) {
    // One recv usually brings header and payload: the peer sends nothing before our next message.
    constexpr size_t kFirst = 4096;
    payload.resize(kFirst);
    iovec parts[2] = {{header, header_size}, {payload.data(), kFirst}};
    const ssize_t got = receive_some(socket, parts, 2, fd);
    if (got <= 0) {
        return false;
    }
    size_t have = static_cast<size_t>(got);
    if (have < header_size) {
        auto* rest = static_cast<uint8_t*>(header) + have;
        if (!receive_exactly(socket, rest, header_size - have, fd)) {
            return false;
        }
        have = header_size;
    }
    have -= header_size;
    uint32_t size;
    std::memcpy(&size, header, sizeof size);
    if (size > kMaxMessage || have > size) {
        return false;
    }
    payload.resize(size);
    return receive_exactly(socket, payload.data() + have, size - have, fd);
}

std::string socket_path(const char* configured) {
    if (configured != nullptr && *configured != '\0') {
        std::string path = configured;
        const size_t slash = path.rfind('/');
        const size_t name = slash == std::string::npos ? 0 : slash + 1;
        if (path.find(kDeviceMark, name) == std::string::npos) {
            path += std::string(".") + kDeviceMark;
        }
        return path;
    }
    std::string folder;
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    if (runtime != nullptr && *runtime == '/') {
        folder = std::string(runtime) + "/" + kDeviceMark;
    } else {
        folder = std::string("/tmp/") + kDeviceMark + "-" + std::to_string(::getuid());
    }
    ::mkdir(folder.c_str(), 0700);
    struct stat st;
    if (::lstat(folder.c_str(), &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != ::getuid() ||
        (st.st_mode & 022) != 0) {
        return {};
    }
    return folder + "/" + kDeviceMark + ".sock";
}

} // namespace flowgpu::emu
