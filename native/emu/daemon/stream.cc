#include "stream.h"

#include <thread>

namespace flowgpu::emu {

void Ticket::finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    finished_.notify_all();
}

bool Ticket::done() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
}

void Ticket::wait() const {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_; });
}

bool Ticket::wait_until(Clock::time_point deadline) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_until(lock, deadline, [&] { return done_; });
}

void Worker::submit(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(task));
    if (!started_) {
        started_ = true;
        // The thread keeps the queue alive; nobody joins it.
        std::thread([self = shared_from_this()] { self->loop(); }).detach();
    }
    changed_.notify_one();
}

void Worker::close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_one();
}

void Worker::loop() {
    for (;;) {
        Task task;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
            task = std::move(queue_.front());
            queue_.pop_front();
        }
        for (const TicketRef& ticket : task.after) {
            ticket->wait();
        }
        task.run();
        task.run = nullptr; // what it holds goes before anyone learns that it is done
        task.ticket->finish();
    }
}

} // namespace flowgpu::emu
