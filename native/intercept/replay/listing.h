// The record as text, for `flowgpu inspect --record`.
#ifndef FLOWGPU_INTERCEPT_REPLAY_LISTING_H
#define FLOWGPU_INTERCEPT_REPLAY_LISTING_H

namespace flowgpu::replay {

// Writes what rebuild() and finish() make to a socket: a JSON object a line, in the order in which
// things are made. After strip() or keep(); calls no driver. False: the other end is gone.
bool list_record(int socket);

} // namespace flowgpu::replay

#endif
