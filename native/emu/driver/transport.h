// One message each way over a unix stream socket, with at most one descriptor beside it.
#pragma once

#include "wire.h"

namespace flowgpu::emu {

// A descriptor that is closed unless it is given away with release().
class UniqueFd {
  public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        reset(other.release());
        return *this;
    }
    ~UniqueFd() { reset(-1); }
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    int release() {
        const int fd = fd_;
        fd_ = -1;
        return fd;
    }
    void reset(int fd);

  private:
    int fd_ = -1;
};

// Header and payload in one send; `fd` >= 0 travels as SCM_RIGHTS. The caller keeps its own copy.
bool send_message(int socket, const void* header, size_t header_size,
                  const std::vector<uint8_t>& payload, int fd);

// Fills `header` (whose first field is the payload's size) and `payload`; a descriptor that came
// along replaces *fd. False when the peer is gone or the message is malformed.
bool receive_message(int socket, void* header, size_t header_size, std::vector<uint8_t>& payload,
                     UniqueFd* fd);

// The socket that a library and a device started with the same setting use: `configured` (its
// name is given the device mark if it lacks it) or a per-user default. Empty when there is no
// folder that only this user can write.
std::string socket_path(const char* configured);

} // namespace flowgpu::emu
