// A communicator: one rank's end of it.
#ifndef FLOWGPU_EMU_NCCL_COMM_H
#define FLOWGPU_EMU_NCCL_COMM_H

#include <functional>
#include <memory>
#include <mutex>

#include "bootstrap.h"
#include "driver.h"
#include "network.h"
#include "proxy.h"
#include "work.h"

namespace flowgpu::nccl {

struct Task {
    Work work;
    CUstream stream;
};

// ncclRedOpCreatePreMulSum's.
struct Scalar {
    uint64_t bits; // or where they are
    Type type;
    bool on_device, used;
};

class Comm {
  public:
    // The calling thread's GPU. Null, with an error text, without one.
    static std::unique_ptr<Comm> on_current_device(bool blocking);
    static std::unique_ptr<Comm> on_device(int device);
    // Makes another communicator on this one's GPU.
    std::unique_ptr<Comm> sibling(bool blocking) const;

    Result init(const Root& root, int rank, int ranks);
    // `in_it`: a rank without a color is in no child.
    Result split(Comm* child, int color, int key, bool* in_it);
    Result shrink(Comm* child, const std::vector<int>& left_out);

    // What the works need of connections is made. The host waits for the peers.
    Result connect(const std::vector<Task>& tasks);
    // One kernel on the first task's stream, or more: the others wait for it.
    Result launch(std::vector<Task> tasks);
    Result close(bool wait_for_peers);
    void abort();

    int rank() const { return rank_; }
    int ranks() const { return ranks_; }
    CUdevice device() const { return device_; }
    uint64_t magic() const { return bootstrap_.magic(); }
    int ranks_in_this_process() const;

    const bool blocking;
    std::atomic<int> state{kSuccess}; // of what goes on in the background
    std::vector<Scalar> scalars;
    std::string error;

  private:
    Comm(CUcontext context, CUdevice device, bool blocking);
    Result describe(Info* own);
    Result establish();
    Result found(Comm* child, std::vector<Info> members, int rank);
    Result connect_collectives();
    Result connect_large();
    Result connect_pairs(const std::vector<Task>& tasks);
    Result own_memory(size_t bytes, Memory* memory);
    Result reach(int peer, uint64_t number, size_t bytes, CUdeviceptr* address);
    Result set_lane(bool sends, Route route, int peer, const Lane& lane);
    Result write(CUdeviceptr to, const void* from, size_t bytes);
    bool is_local(int peer) const; // of this process
    bool is_far(int peer) const;   // of another host
    Result before(CUstream stream, uint64_t capture);
    Result after(CUstream stream, uint64_t capture);

    const CUcontext context_;
    const CUdevice device_;
    int rank_ = 0, ranks_ = 1;
    Bootstrap bootstrap_;
    Proxy proxy_;
    Network network_{&state};
    Stop stop_{false};
    Memory state_memory_; // a Communicator
    std::vector<Memory> reached_;
    std::vector<bool> imported_; // beside `reached_`
    bool collectives_connected_ = false, large_connected_ = false;
    std::vector<bool> sends_connected_, receives_connected_;
    CUstream side_ = nullptr;
    CUevent serial_ = nullptr, captured_ = nullptr, joint_ = nullptr;
    bool launched_ = false;
    uint64_t last_capture_ = 0;
};

} // namespace flowgpu::nccl

#endif
