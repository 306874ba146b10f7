// The line by which a coordinator calls a task: a pair of sockets of which the task has both ends.
// The coordinator copies the far one (pidfd_getfd(2)) and sends a connection through it. So a task
// that has detached needs no path, environment, root folder, user or system call to be reached that
// a program could have taken away from it, and CRIU dumps the line with the task.
//
// In the far end waits a card, FLOWGPU_CALL, by which it is found among the task's descriptors.
//
// The service thread's alone, once it runs.
#ifndef FLOWGPU_INTERCEPT_LINE_H
#define FLOWGPU_INTERCEPT_LINE_H

#include "channel.h"

namespace flowgpu::line {

// Makes the line, unless it works. The program may close descriptors that it does not know.
void mend();

// The line's end that the service thread polls for reading; -1: there is no line.
int end();

// Waits until a call may have come. False: none came, and as much time went by.
bool rings(int milliseconds);

// The connection that came, or -1. `packet` is for its use.
int take(Packet* packet);

// Lets go of calls that nobody has taken, as a dump cannot have what they bring.
void drain(Packet* packet);

// Says whether a coordinator has called by this line: then the next will, and need not be looked
// for.
bool used();

void close_in_child();

} // namespace flowgpu::line

#endif
