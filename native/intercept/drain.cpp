#include "drain.h"

#include <condition_variable>
#include <mutex>

#include <pthread.h>

#include "contexts.h"
#include "gate.h"

namespace flowgpu {

namespace {

// The driver has no wait that gives up, and a kernel may run for ever: contexts are drained by a
// thread of their own. One that was given up runs on, and holds the next one back.
class Drain {
  public:
    CUresult run_until(std::chrono::steady_clock::time_point deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!ended_.wait_until(lock, deadline, [this] { return !running_; }))
            return CUDA_ERROR_NOT_READY;
        join();
        if (pthread_create(&thread_, nullptr, run, this) != 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
        started_ = running_ = true;
        if (!ended_.wait_until(lock, deadline, [this] { return !running_; }))
            return CUDA_ERROR_NOT_READY;
        join();
        return result_;
    }

  private:
    static void* run(void* self) {
        gate::exempt();
        CUresult result = contexts::drain();
        auto* drain = static_cast<Drain*>(self);
        std::lock_guard<std::mutex> lock(drain->mutex_);
        drain->result_ = result;
        drain->running_ = false;
        drain->ended_.notify_all();
        return nullptr;
    }
    void join() {
        if (started_)
            pthread_join(thread_, nullptr);
        started_ = false;
    }

    std::mutex mutex_;
    std::condition_variable ended_;
    pthread_t thread_ = {};
    bool started_ = false; // and not joined
    bool running_ = false;
    CUresult result_ = CUDA_SUCCESS;
};

} // namespace

CUresult drain_until(std::chrono::steady_clock::time_point deadline) {
    static Drain* drain = new Drain(); // never destroyed, as its thread may outlive main()
    return drain->run_until(deadline);
}

} // namespace flowgpu
