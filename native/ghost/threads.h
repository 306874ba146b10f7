// Runs work(index) on `count` threads and waits for all of them.
#pragma once

#include <thread>
#include <vector>

namespace fgg {

template <typename Work> void run_threads(unsigned count, Work work) {
    std::vector<std::thread> threads;
    try {
        for (unsigned i = 0; i < count; i++)
            threads.emplace_back(work, i);
    } catch (...) {
        for (std::thread& thread : threads)
            thread.join();
        throw;
    }
    for (std::thread& thread : threads)
        thread.join();
}

} // namespace fgg
