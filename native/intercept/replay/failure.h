// The first thing that went wrong in a step of the engine, in words.
#ifndef FLOWGPU_INTERCEPT_REPLAY_FAILURE_H
#define FLOWGPU_INTERCEPT_REPLAY_FAILURE_H

#include <cstdio>
#include <mutex>
#include <string>
#include <utility>

#include "record.h"

namespace flowgpu::replay {

class FirstFailure {
  public:
    FirstFailure(char* detail, size_t bytes) : detail_(detail), bytes_(bytes) {}
    // False, always; by any thread.
    bool operator()(const std::string& what, CUresult result) {
        const char* name = nullptr;
        FG_DRIVER(cuGetErrorName)(result, &name);
        return (*this)(what + ": " + (name ? name : "unknown error"));
    }
    bool operator()(const std::string& what) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!std::exchange(failed_, true))
            snprintf(detail_, bytes_, "%s", what.c_str());
        return false;
    }

  private:
    char* const detail_;
    const size_t bytes_;
    std::mutex mutex_;
    bool failed_ = false;
};

} // namespace flowgpu::replay

#endif
