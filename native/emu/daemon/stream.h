// Streams: a thread each, tasks in order, and tickets by which anything waits for anything.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace flowgpu::emu {

using Clock = std::chrono::steady_clock;

// One piece of work that will be finished once, and stays so.
class Ticket {
  public:
    void finish();
    bool done() const;
    void wait() const;
    bool wait_until(Clock::time_point deadline) const;

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    bool done_ = false;
};

using TicketRef = std::shared_ptr<Ticket>;

// The queue and the thread behind a stream. It outlives the stream's handle until it is drained.
class Worker : public std::enable_shared_from_this<Worker> {
  public:
    struct Task {
        std::vector<TicketRef> after;
        std::function<void()> run;
        TicketRef ticket;
    };
    void submit(Task task);
    void close(); // no further task; the thread ends after the last

  private:
    void loop();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> queue_;
    bool started_ = false;
    bool closed_ = false;
};

} // namespace flowgpu::emu
