// How the ranks of a communicator find each other and talk, before and beside the GPU.
#ifndef FLOWGPU_EMU_NCCL_BOOTSTRAP_H
#define FLOWGPU_EMU_NCCL_BOOTSTRAP_H

#include <string>
#include <vector>

#include "sockets.h"

namespace flowgpu::nccl {

// The unique id: where the root listens. It is a thread of the process that made the id, and ends
// when all ranks have asked it who the others are.
struct Root {
    uint64_t magic;
    sockaddr_in address;
};
Result make_root(UniqueId* id);
Root root_of(const UniqueId& id);

// What all ranks know of one.
struct Info {
    sockaddr_in address; // its bootstrap socket
    uint64_t host, pid_namespace;
    int32_t pid, device;
};

class Bootstrap {
  public:
    ~Bootstrap() { close(); }

    // Own part of the table, with a socket that listens.
    Result open(Info* own);
    // Meets the other ranks by way of a unique id's root.
    Result meet(const Root& root, int rank, int ranks, const Info& own, const Stop& stop);
    // Meets them by a table that the ranks have exchanged in another way.
    Result meet(uint64_t magic, int rank, std::vector<Info> table, const Stop& stop);
    void close();

    // `data` has a part of `bytes` for each rank; the own one is filled in.
    Result all_gather(void* data, size_t bytes, const Stop& stop);
    Result barrier(const Stop& stop);
    // Matched by `tag`, in any order.
    Result send(int peer, int tag, const void* data, size_t bytes, const Stop& stop);
    Result receive(int peer, int tag, void* data, size_t bytes, const Stop& stop);

    uint64_t magic() const { return magic_; }
    const std::vector<Info>& table() const { return table_; }

  private:
    struct Hello {
        uint64_t magic;
        int32_t rank, tag;
    };
    struct Early {
        Hello hello;
        int connection;
    };
    Result ring(const Stop& stop);
    Result call(int peer, int tag, int* connection, const Stop& stop);
    Result called(int peer, int tag, int* connection, const Stop& stop);

    uint64_t magic_ = 0;
    int rank_ = 0, listener_ = -1, next_ = -1, previous_ = -1;
    std::vector<Info> table_;
    std::vector<Early> early_;
};

} // namespace flowgpu::nccl

#endif
