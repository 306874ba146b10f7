// Work for several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace pages {

// Calls action(n) for each n < count, with all threads. Throws what one throws.
template <class Action> void in_parallel(unsigned threads, size_t count, Action action) {
    std::atomic<size_t> next{0};
    std::exception_ptr failure;
    std::mutex mutex;
    std::vector<std::thread> workers;
    for (size_t i = 0; i < std::min<size_t>(threads, count); i++)
        workers.emplace_back([&] {
            try {
                for (size_t n; (n = next.fetch_add(1)) < count;)
                    action(n);
            } catch (...) {
                next = count;
                std::lock_guard<std::mutex> lock(mutex);
                failure = std::current_exception();
            }
        });
    for (std::thread& worker : workers)
        worker.join();
    if (failure)
        std::rethrow_exception(failure);
}

} // namespace pages
