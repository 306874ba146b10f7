// The live set of this process (native/include/flowgpu/live.h): one writer at a time, under a lock
// that no reader takes.
#ifndef FLOWGPU_MEMSTUB_LIVE_SET_H
#define FLOWGPU_MEMSTUB_LIVE_SET_H

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flowgpu/live.h"

namespace flowgpu::memstub {

// Between two events the program has the caches and the TLB to itself, and what an event costs is
// the lines that it waits for. So all that it reads is at the beginning of this object, and to the
// shared memory it only writes, which waits for nothing.
class LiveSet {
  public:
    constexpr LiveSet() = default;

    // Takes zeroed memory of FLOWGPU_LIVE_BYTES over, which stays the caller's to unmap.
    void open(void* memory);
    bool is_open() const { return memory_.load(std::memory_order_acquire) != nullptr; }

    // A block was given out (bytes > 0), or taken back (< 0). At the one, a block that lives at
    // this address already has ended without a word; at the other, nothing happens if there is
    // none.
    void change(uint64_t address, int64_t bytes, unsigned device, bool capturing) {
        device = std::min<unsigned>(device, FLOWGPU_LIVE_NO_DEVICE);
        uint64_t size = static_cast<uint64_t>(bytes < 0 ? -bytes : bytes);
        unsigned what = bytes < 0   ? unsigned{FLOWGPU_LIVE_EVENT_FREED}
                        : capturing ? unsigned{FLOWGPU_LIVE_EVENT_CAPTURING}
                                    : 0;
        Lock lock(lock_);
        log(address, size << FLOWGPU_LIVE_EVENT_BITS | what | device, device, bytes);
    }
    void add(uint64_t address, uint64_t bytes, unsigned device, bool capturing) {
        change(address, static_cast<int64_t>(bytes), device, capturing);
    }
    void remove(uint64_t address, uint64_t bytes, unsigned device) {
        change(address, -static_cast<int64_t>(bytes), device, false);
    }
    // The same where the allocator does not tell the bytes: costs a look into the table.
    void remove(uint64_t address);
    // See flowgpu_memstub_forget.
    void forget(uint64_t address, uint64_t bytes);

    uint64_t longest_probe() const { return longest_probe_; }

  private:
    // Not a mutex: an event comes some hundred nanoseconds after the last one and holds the lock
    // for ten. Contended only where several threads allocate, on several devices, at once.
    class Lock {
      public:
        explicit Lock(std::atomic<bool>& word) : word_(word) {
            if (__builtin_expect(word_.exchange(true, std::memory_order_acquire), 0))
                wait(word_);
        }
        ~Lock() { word_.store(false, std::memory_order_release); }
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;

      private:
        static void wait(std::atomic<bool>& word);
        std::atomic<bool>& word_;
    };

    struct Slot {
        std::atomic<uint64_t> address;
        std::atomic<uint64_t> size;
    };
    static_assert(sizeof(Slot) == sizeof(flowgpu_live_slot), "live.h");
    using Words = std::atomic<uint64_t>*;

    template <typename T> static void store(T* to, T value) {
        __atomic_store_n(to, value, __ATOMIC_RELAXED);
    }
    template <typename T> T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(memory_.load(std::memory_order_relaxed) + offset);
    }
    flowgpu_live_header* header() const { return at<flowgpu_live_header>(0); }
    flowgpu_live_event* event(uint64_t number) const {
        return at<flowgpu_live_event>(FLOWGPU_LIVE_LOG_AT) + number % FLOWGPU_LIVE_LOG_EVENTS;
    }
    Slot* slots() const { return at<Slot>(FLOWGPU_LIVE_SLOTS_AT); }

    // With the lock held, as all that follows.
    void log(uint64_t address, uint64_t word, unsigned device, int64_t bytes) {
        flowgpu_live_header* shared = header();
        flowgpu_live_event* to = event(logged_);
        store(&to->address, address);
        store(&to->word, word);
        uint64_t logged = ++logged_;
        __atomic_store_n(&shared->logged, logged, __ATOMIC_RELEASE);
        store(&shared->device_bytes[device], device_bytes_[device] += bytes);
        if (__builtin_expect(logged % FLOWGPU_LIVE_LOG_EVENTS == 0, 0))
            apply();
    }
    void count(uint64_t device, int64_t bytes) {
        store(&header()->device_bytes[device], device_bytes_[device] += bytes);
    }
    void apply();
    void apply_add(uint64_t address, uint64_t word);
    void apply_remove(uint64_t address, uint64_t word);
    // Index of the address' slot; if it has none, kNone, and `*free` is where it may go (or kNone).
    uint64_t find(uint64_t address, uint64_t* free);

    std::atomic<char*> memory_{nullptr};
    std::atomic<bool> lock_{false};
    uint64_t logged_ = 0;
    int64_t device_bytes_[FLOWGPU_LIVE_DEVICES] = {};
    uint64_t longest_probe_ = 0;
};

} // namespace flowgpu::memstub

#endif
