// Descriptors that the driver has made, not a device's: what its threads wait for.
#ifndef FLOWGPU_REWIND_DESCRIPTORS_H
#define FLOWGPU_REWIND_DESCRIPTORS_H

#include <sys/socket.h>

namespace flowgpu::rewind::descriptors {

// libc's functions, for the driver.
int make_pipe(int ends[2], int flags);
int make_event(unsigned count, int flags);
int make_epoll(int flags);
int make_socket(int domain, int type, int protocol);
ssize_t receive(int socket, msghdr* message, int flags); // recvmsg
int shut(int fd);                                        // close

// Closes those that are left, if `sees_closes`: else one may be somebody else's by now.
void end_life(bool sees_closes);
// In a child of fork(), which cannot use the driver: closes sockets, and what came by them. Those
// of a service outside (MPS) would be in the child's dump.
void leave_parents();
// A copy of the process has others in their place: before it is made, and first in it.
void forget_lost();
void renew();

} // namespace flowgpu::rewind::descriptors

#endif
