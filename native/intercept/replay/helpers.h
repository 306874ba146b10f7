// Threads of ours that share work behind the closed gate.
#ifndef FLOWGPU_INTERCEPT_REPLAY_HELPERS_H
#define FLOWGPU_INTERCEPT_REPLAY_HELPERS_H

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

#include <pthread.h>

namespace flowgpu::replay {

// Pieces of work, which threads take from the first to the last. Who waits for a piece that nobody
// has begun does it, so all is done where the system has no thread for us too.
class Helpers {
  public:
    // `work` throws nothing.
    Helpers(size_t pieces, std::function<void(size_t)> work);
    ~Helpers(); // waits for what has begun; the rest is left undone
    Helpers(const Helpers&) = delete;
    Helpers& operator=(const Helpers&) = delete;

    void wait_for(size_t piece);
    void wait_for_all();

  private:
    enum class State { waits, begun, done };
    static void* run(void* self);
    void work_on(size_t piece, std::unique_lock<std::mutex>& lock);

    const std::function<void(size_t)> work_;
    std::mutex mutex_; // guards what follows
    std::condition_variable done_;
    std::vector<State> states_;
    size_t next_ = 0; // those before have begun
    std::vector<pthread_t> threads_;
};

} // namespace flowgpu::replay

#endif
