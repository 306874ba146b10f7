// The threads of a communicator. The service thread makes the memory that peers map: it is asked
// over TCP, and ends when its connection closes. The other answers peers that ask for a
// descriptor of that memory, by the number of its handle.
#ifndef FLOWGPU_EMU_NCCL_PROXY_H
#define FLOWGPU_EMU_NCCL_PROXY_H

#include <string>
#include <thread>
#include <vector>

#include "bootstrap.h"
#include "driver.h"

namespace flowgpu::nccl {

class Proxy {
  public:
    Result start(CUcontext context, CUdevice device, uint64_t magic, int rank, const Stop& stop);
    void end();

    // Device memory that peers may map.
    Result make(size_t bytes, Memory* memory);
    // The memory of a peer, whose handle has that number there.
    Result import(int peer, uint64_t number, size_t bytes, Memory* memory);

  private:
    void serve(int connection);
    void answer_peers();

    CUcontext context_ = nullptr;
    CUdevice device_ = 0;
    uint64_t magic_ = 0;
    int rank_ = 0, listener_ = -1, connection_ = -1, unix_ = -1;
    const Stop* stop_ = nullptr;
    Stop ending_{false};
    std::thread service_, answerer_;
    std::vector<Memory> made_; // by the service thread
};

} // namespace flowgpu::nccl

#endif
