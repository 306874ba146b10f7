// The kernels of kernels/chunks.cu in one context, and lists of chunks of any length run through
// them.
#pragma once

#include "driver.h"

#include <vector>

namespace fgg {

class Kernels {
  public:
    Kernels(uint64_t context, const char* ptx_path, uint64_t scratch_bytes);
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    uint64_t context() const { return context_; }

    // Each list has `count` rows.
    void scan(const uint64_t* addresses, uint64_t count, uint8_t* digests, uint8_t* zero);
    void compare(const uint64_t* left, const uint64_t* right, uint64_t count, uint8_t* differ);
    void copy(const uint64_t* sources, const uint64_t* destinations, uint64_t count);
    void fill(const uint64_t* destinations, uint64_t count, uint64_t pattern);

    // One launch, on lists in device memory; the context is current.
    void launch_copy(CUstream stream, CUdeviceptr sources, CUdeviceptr destinations,
                     uint32_t count) const;

  private:
    struct Output {
        uint8_t* rows;
        uint64_t width;
    };
    struct Work {
        CUfunction function;
        unsigned chunks_per_block;
        std::vector<const uint64_t*> inputs;
        std::vector<Output> outputs;
        const uint64_t* pattern; // last argument, or null
    };
    // Half of the scratch memory, with pinned memory of the same layout, and the batch that is in
    // it.
    struct Half {
        CUstream stream = nullptr;
        CUdeviceptr device = 0;
        char* host = nullptr;
        uint64_t first = 0;
        uint64_t count = 0; // 0: nothing in flight
    };

    void load(const char* ptx_path);
    void take_memory(uint64_t scratch_bytes);
    void release();
    void run(const Work& work, uint64_t count);
    void issue(const Work& work, Half& half, uint64_t first, uint64_t count);
    void finish(const Work& work, Half& half);

    const uint64_t context_;
    CUmodule module_ = nullptr;
    CUfunction digest_ = nullptr, compare_ = nullptr, copy_ = nullptr, fill_ = nullptr;
    CUdeviceptr scratch_ = 0;
    char* staging_ = nullptr;
    uint64_t batch_ = 0; // chunks that fit in a half
    Half halves_[2];
};

} // namespace fgg
