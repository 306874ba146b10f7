#include "helpers.h"

#include <algorithm>
#include <utility>

#include "gate.h"

namespace flowgpu::replay {

namespace {

// With four threads the driver's calls take half the time of one thread (H100, driver 580).
constexpr size_t kThreads = 4;

} // namespace

Helpers::Helpers(size_t pieces, std::function<void(size_t)> work)
    : work_(std::move(work)), states_(pieces, State::waits) {
    // These threads inherit the signal mask of our thread that begins them: they take none of the
    // program's signals.
    threads_.resize(std::min(pieces, kThreads));
    size_t begun = 0;
    while (begun < threads_.size() && pthread_create(&threads_[begun], nullptr, run, this) == 0)
        begun++;
    threads_.resize(begun);
}

Helpers::~Helpers() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        next_ = states_.size();
    }
    for (pthread_t thread : threads_)
        pthread_join(thread, nullptr);
}

void Helpers::wait_for(size_t piece) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (states_[piece] == State::waits)
        work_on(piece, lock);
    done_.wait(lock, [&] { return states_[piece] == State::done; });
}

void Helpers::wait_for_all() {
    for (size_t piece = 0; piece < states_.size(); piece++)
        wait_for(piece);
}

void* Helpers::run(void* self) {
    gate::exempt();
    auto& helpers = *static_cast<Helpers*>(self);
    std::unique_lock<std::mutex> lock(helpers.mutex_);
    while (helpers.next_ < helpers.states_.size()) {
        const size_t piece = helpers.next_++;
        if (helpers.states_[piece] == State::waits)
            helpers.work_on(piece, lock);
    }
    return nullptr;
}

void Helpers::work_on(size_t piece, std::unique_lock<std::mutex>& lock) {
    states_[piece] = State::begun;
    lock.unlock();
    work_(piece);
    lock.lock();
    states_[piece] = State::done;
    done_.notify_all();
}

} // namespace flowgpu::replay
