// Packets of wire.h over an AF_UNIX SOCK_SEQPACKET socket, with file descriptors. No allocation, no
// stdio.
#ifndef FLOWGPU_COMMON_CHANNEL_H
#define FLOWGPU_COMMON_CHANNEL_H

#include <cstddef>
#include <cstdint>

#include "flowgpu/wire.h"

namespace flowgpu {

// Fills in magic, version, type, bytes and count.
flowgpu_header make_header(uint16_t type, uint32_t bytes, uint32_t count = 0);

// Sends one packet; fds stay the caller's. False with errno set on failure.
bool send_packet(int socket, const void* packet, size_t bytes, const int* fds = nullptr,
                 size_t fd_count = 0);

struct Packet {
    alignas(8) uint8_t bytes[65536] = {};
    size_t size = 0;
    int fds[FLOWGPU_ROWS_PER_MESSAGE] = {};
    size_t fd_count = 0;

    const flowgpu_header& header() const { return *reinterpret_cast<const flowgpu_header*>(bytes); }
    // Takes a descriptor out, so that close_fds() leaves it alone.
    int take_fd(size_t index);
    void close_fds();
};

enum class Received { ok, closed, malformed };

// Receives one packet and checks its header against its size; received fds belong to the packet
// (close-on-exec). timeout_ms < 0 waits for ever; a timeout counts as closed.
Received receive_packet(int socket, Packet* packet, int timeout_ms = -1);

// Connects to a path; the socket, with a high number, or -1 with errno set.
int connect_seqpacket(const char* path);

} // namespace flowgpu

#endif
