// What the generated sources need.
#pragma once

#include "client.h"

#define FLOWGPU_WEAK __attribute__((weak))
#define FLOWGPU_EXPORT __attribute__((visibility("default")))

namespace flowgpu::emu {

// While it lives, stream 0 of the calling thread means its per-thread default stream.
class PerThreadDefaultStream {
  public:
    PerThreadDefaultStream() { ++thread_state().per_thread_stream; }
    ~PerThreadDefaultStream() { --thread_state().per_thread_stream; }
};

} // namespace flowgpu::emu
