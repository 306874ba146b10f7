// The live set of this process (native/include/flowgpu/live.h): one writer at a time, under a lock
// that no reader takes.
#ifndef FLOWGPU_MEMSTUB_LIVE_SET_H
#define FLOWGPU_MEMSTUB_LIVE_SET_H

#include <atomic>
#include <cstdint>

#include "flowgpu/live.h"

namespace flowgpu::memstub {

class LiveSet {
  public:
    // Takes zeroed memory of FLOWGPU_LIVE_BYTES over, which stays the caller's to unmap.
    explicit LiveSet(void* memory);

    // A block was given out. A block that lives at this address already has ended without a word,
    // and this one takes its slot.
    void add(uint64_t address, uint64_t bytes, unsigned device, bool capturing);
    // The block at this address was taken back; nothing happens if there is none.
    void remove(uint64_t address);
    // See flowgpu_memstub_forget.
    void forget(uint64_t address, uint64_t bytes);

    uint64_t longest_probe() const { return longest_probe_; }

  private:
    // Not a mutex: an event comes some hundred nanoseconds after the last one and holds the lock
    // for ten. Contended only where several threads allocate, on several devices, at once.
    class Lock {
      public:
        explicit Lock(std::atomic<bool>& word);
        ~Lock() { word_.store(false, std::memory_order_release); }
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;

      private:
        std::atomic<bool>& word_;
    };

    struct Slot {
        std::atomic<uint64_t> address;
        std::atomic<uint64_t> size;
    };
    static_assert(sizeof(Slot) == sizeof(flowgpu_live_slot), "live.h");

    // Index of the address' slot; if it has none, kNone, and `*free` is where it may go (or kNone).
    uint64_t find(uint64_t address, uint64_t* free);
    void count(uint64_t size, bool added);

    flowgpu_live_header* header_;
    Slot* slots_;
    std::atomic<uint64_t>* seen_;
    std::atomic<uint64_t>* whole_;
    uint64_t longest_probe_ = 0;
    std::atomic<bool> lock_{false};
};

} // namespace flowgpu::memstub

#endif
