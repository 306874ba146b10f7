// The memory stub (native/memstub), when it is preloaded beside this library; without it nothing
// here does anything. Functions as in flowgpu/live.h.
#ifndef FLOWGPU_INTERCEPT_MEMSTUB_H
#define FLOWGPU_INTERCEPT_MEMSTUB_H

#include <atomic>
#include <cstdint>

namespace flowgpu::memstub {

// The memfd with the live set, which stays the stub's, or -1.
int live_fd();
// The live set's sum, for as long as it is looked at.
class LiveSum {
  public:
    LiveSum();
    ~LiveSum();
    LiveSum(const LiveSum&) = delete;
    LiveSum& operator=(const LiveSum&) = delete;

    // Bytes of all live blocks; all ones where the set says nothing of the program.
    uint64_t bytes() const;

  private:
    void* mapped_;
};

// [address, address + bytes) is new to the program: no allocator has used it yet. To be called
// before the program learns of it.
void forget(uint64_t address, uint64_t bytes);
// CUPTI records activity for a profiler of the program's.
bool is_profiled();
// The number of stream captures under way has changed.
void captures_changed(const std::atomic<uint32_t>& under_way);

} // namespace flowgpu::memstub

#endif
