// A client of the Multi-Process Service. The control daemon gives it what ties it to the server: a
// socket and pipes, as an H100 showed (docs/design/hardware-notes.md).
#include "client.h"

#include <cstdlib>
#include <cstring>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

constexpr size_t kMostGiven = 16;

UniqueFd call_control() {
    const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
    const std::string path =
        std::string(folder != nullptr ? folder : "/tmp/nvidia-mps") + "/control";
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) {
        return {};
    }
    std::memcpy(address.sun_path, path.c_str(), path.size());
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        return {};
    }
    return fd;
}

} // namespace

bool join_service() {
    const UniqueFd control = call_control();
    if (!control) {
        return true;
    }
    alignas(cmsghdr) char given[CMSG_SPACE(kMostGiven * sizeof(int))];
    char word;
    iovec part{&word, sizeof word};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = given;
    message.msg_controllen = sizeof given;
    ssize_t got;
    do {
        got = ::recvmsg(control.get(), &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    const cmsghdr* rights = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (rights == nullptr || rights->cmsg_type != SCM_RIGHTS) {
        return false;
    }
    std::vector<int>& service = process().service;
    service.resize((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(service.data(), CMSG_DATA(rights), service.size() * sizeof(int));
    return true;
}

} // namespace flowgpu::emu
