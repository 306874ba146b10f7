// The coordinator's requests (wire.h), one function each, by subject: requests_gate.cpp,
// requests_memory.cpp, requests_engine.cpp. The service thread calls them, one at a time.
#ifndef FLOWGPU_INTERCEPT_REQUESTS_H
#define FLOWGPU_INTERCEPT_REQUESTS_H

#include <sys/resource.h>

#include <cuda.h>

#include "channel.h"

namespace flowgpu::service {

// `packet` has the request; what it carries and nobody takes is closed after the answer.
using Request = void(Packet& packet, flowgpu_reply& reply);
Request on_gate, on_open, on_watch, on_detach, on_renew;
Request on_export, on_handover, on_lend, on_mapback, on_room, on_drop, on_written;
Request on_ask, on_strip, on_keep, on_rebuild, on_managed;

void open_gate();
// Ends the channel of EXPORT or MAPBACK.
void close_handover();
// True if others have all device memory of the task: it may lose its own hold of it.
bool memory_is_safe();
// After REBUILD, with the program's memory, or without where it has none and nobody gave any back.
bool finish_rebuild(flowgpu_reply& reply);

void fail(flowgpu_reply& reply, flowgpu_status status, const char* detail,
          CUresult result = CUDA_SUCCESS);
void fail_driver(flowgpu_reply& reply, const char* what, CUresult result);
// The engine cannot save the process: the answer names why.
bool refused(flowgpu_reply& reply, uint32_t engine, bool still);

// What comes from a coordinator are descriptors, and every block that comes back stays one. There
// may be more than the program may open: its limit is lifted meanwhile, above its highest where the
// process has the right to. What is open then stays open.
class ManyDescriptors {
  public:
    ManyDescriptors();
    ~ManyDescriptors();
    ManyDescriptors(const ManyDescriptors&) = delete;
    ManyDescriptors& operator=(const ManyDescriptors&) = delete;

  private:
    rlimit programs_ = {};
    rlimit lifted_ = {};
};

} // namespace flowgpu::service

#endif
