// TCP between ranks, and descriptors over Unix sockets. Every wait looks at `stop`.
#ifndef FLOWGPU_EMU_NCCL_SOCKETS_H
#define FLOWGPU_EMU_NCCL_SOCKETS_H

#include <atomic>
#include <cstdint>
#include <string>

#include <netinet/in.h>

#include "api.h"

namespace flowgpu::nccl {

using Stop = std::atomic<bool>;

// The first interface that NCCL_SOCKET_IFNAME allows, else the loopback; its port is filled in.
// As in NCCL, the variable is a list of beginnings of names by commas; with = before it of whole
// names, with ^ of those that are left out.
Result listen_tcp(int* listener, sockaddr_in* address);
Result connect_tcp(const sockaddr_in& address, int* connection, const Stop& stop);
Result accept_tcp(int listener, int* connection, const Stop& stop);
Result send_all(int connection, const void* data, size_t bytes, const Stop& stop);
Result receive_all(int connection, void* data, size_t bytes, const Stop& stop);
// True once the descriptor can be read; false after `milliseconds`.
bool readable(int descriptor, int milliseconds);

// A datagram socket with an abstract name. Returns its descriptor, -1 without one.
int bind_abstract(const std::string& name);
bool send_datagram(int from, const std::string& to, const void* data, size_t bytes,
                   int descriptor = -1);
// The bytes received, -1 for none; a descriptor that came with them replaces *descriptor.
ssize_t receive_datagram(int from, void* data, size_t bytes, int* descriptor);

} // namespace flowgpu::nccl

#endif
