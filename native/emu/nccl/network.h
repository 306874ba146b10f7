// Ranks on other hosts: what lies between two of them, and the thread that moves it, as NCCL's
// NET/Socket does it. Each direction has a connection of its own, made at the first use.
//
//   kernel ---- chunk, `tail` ----> fifo        fifo <---- chunk, `tail` ---- thread
//   kernel <------ `credit` ------ thread == TCP ==> thread <--- `credit` ---- kernel
//          sender's host memory                        receiver's host memory
//
// The thread works on host memory alone and calls no driver, so that chunks move on whatever
// becomes of the threads that call it.
#ifndef FLOWGPU_EMU_NCCL_NETWORK_H
#define FLOWGPU_EMU_NCCL_NETWORK_H

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "driver.h"
#include "sockets.h"
#include "work.h"

namespace flowgpu::nccl {

// Where a receiver listens until its sender has come.
struct Listener {
    Listener() = default;
    Listener(Listener&& other) noexcept : descriptor(std::exchange(other.descriptor, -1)) {}
    Listener& operator=(Listener&& other) noexcept {
        std::swap(descriptor, other.descriptor);
        return *this;
    }
    ~Listener() {
        if (descriptor >= 0)
            ::close(descriptor);
    }
    Result open(sockaddr_in* address) { return listen_tcp(&descriptor, address); }
    int descriptor = -1;
};

class Network {
  public:
    // `state` gets what fails later.
    explicit Network(std::atomic<int>* state) : state_(state) {}
    ~Network() { end(); }

    // The receiver's part: it has said where it listens, and waits for the sender.
    Result accept(int listener, uint64_t magic, const Stop& stop, Lane* lane);
    // The sender's part.
    Result connect(const sockaddr_in& address, uint64_t magic, const Stop& stop, Lane* lane);
    // From now on a peer may close its connections.
    void expect_end() { expects_end_ = true; }
    void end();

  private:
    struct Link {
        int connection;
        bool sends, over;
        char* memory;   // a fifo, and the credit behind it
        uint64_t step;  // chunks that were moved
        uint64_t bytes; // of the one that is under way
        size_t done;    // of it, with the word before it that says how many it has
    };
    Result add(int connection, bool sends, Lane* lane);
    void work();
    bool move(Link* link);
    bool send(Link* link);
    bool receive(Link* link);
    void lost(Link* link);

    std::atomic<int>* const state_;
    std::atomic<bool> ending_{false}, expects_end_{false};
    std::mutex mutex_; // over links_
    std::vector<Link> links_;
    std::thread thread_;
};

} // namespace flowgpu::nccl

#endif
