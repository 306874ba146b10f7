// Pinned host memory, handed out in slots of one size to all jobs of the process.
#pragma once

#include "failure.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace fgg {

class Arena {
  public:
    Arena(uint64_t bytes, uint64_t piece_bytes, unsigned threads);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void pin(uint64_t context);
    uint64_t piece_bytes() const { return piece_bytes_; }

    // A free slot, or null: waits while wait is true and stop is false.
    char* acquire(bool wait, const std::atomic<bool>& stop);
    void release(char* slot);
    // Lets waiting threads look at their stop flag again.
    void wake();

  private:
    void touch(unsigned threads);

    uint64_t bytes_;
    uint64_t piece_bytes_;
    char* base_ = nullptr;
    std::mutex lock_;
    std::condition_variable freed_;
    std::vector<char*> free_;
    uint64_t context_ = 0;
    uint64_t pinned_ = 0;
};

} // namespace fgg
