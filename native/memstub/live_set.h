// The live set of this process (native/include/flowgpu/live.h): one writer at a time, under a lock
// that no reader takes.
#ifndef FLOWGPU_MEMSTUB_LIVE_SET_H
#define FLOWGPU_MEMSTUB_LIVE_SET_H

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flowgpu/live.h"

namespace flowgpu::memstub {

// The header and the log of the shared memory, as their writer sees them. Between two events the
// program has the caches and the TLB to itself, and what an event costs is the lines and the pages
// that it waits for: the header's first lines, and one of the log, which the event before it in the
// line before has asked for.
class LiveSet {
  public:
    constexpr LiveSet() = default;

    // `memory`: FLOWGPU_LIVE_BYTES of zeros, of which this is the first part or a copy that is to
    // become it; the rest is used there, and is the caller's to unmap.
    void open(void* memory);
    bool is_open() const { return __atomic_load_n(&header_.magic, __ATOMIC_ACQUIRE) != 0; }

    // What the stub calls behind its hook, or null: here, so that an event finds it in its line.
    void set_next(const void* function) { store(&header_.pointers[kNext], as_word(function)); }
    const void* next() const {
        return reinterpret_cast<const void*>(
            __atomic_load_n(&header_.pointers[kNext], __ATOMIC_RELAXED));
    }
    // Says if a stream capture is under way when the next blocks are given out.
    void set_capturing(bool under_way) { store(&header_.capturing, uint32_t{under_way}); }

    // A block was given out (bytes > 0), or taken back (< 0). At the one, a block that lives at
    // this address already has ended without a word; at the other, nothing happens if there is
    // none.
    void change(uint64_t address, int64_t bytes, unsigned device) {
        device = std::min<unsigned>(device, FLOWGPU_LIVE_NO_DEVICE);
        uint64_t size = static_cast<uint64_t>(bytes < 0 ? -bytes : bytes);
        bool capturing = __atomic_load_n(&header_.capturing, __ATOMIC_RELAXED) != 0;
        unsigned what = bytes < 0   ? unsigned{FLOWGPU_LIVE_EVENT_FREED}
                        : capturing ? unsigned{FLOWGPU_LIVE_EVENT_CAPTURING}
                                    : 0;
        Lock lock(&header_.writing);
        log(address, size << FLOWGPU_LIVE_EVENT_BITS | what | device, device, bytes);
    }
    void add(uint64_t address, uint64_t bytes, unsigned device) {
        change(address, static_cast<int64_t>(bytes), device);
    }
    void remove(uint64_t address, uint64_t bytes, unsigned device) {
        change(address, -static_cast<int64_t>(bytes), device);
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
        explicit Lock(uint32_t* word) : word_(word) {
            if (__builtin_expect(__atomic_exchange_n(word_, 1u, __ATOMIC_ACQUIRE), 0))
                wait(word_);
        }
        ~Lock() { __atomic_store_n(word_, 0u, __ATOMIC_RELEASE); }
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;

      private:
        static void wait(uint32_t* word);
        uint32_t* word_;
    };

    struct Slot {
        std::atomic<uint64_t> address;
        std::atomic<uint64_t> size;
    };
    static_assert(sizeof(Slot) == sizeof(flowgpu_live_slot), "live.h");
    using Words = std::atomic<uint64_t>*;

    enum Pointer { kNext, kMemory };
    static constexpr uint64_t kLineEvents = 64 / sizeof(flowgpu_live_event);

    template <typename T> static void store(T* to, T value) {
        __atomic_store_n(to, value, __ATOMIC_RELAXED);
    }
    static uint64_t as_word(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
    template <typename T> T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(header_.pointers[kMemory] + offset);
    }
    flowgpu_live_event* event(uint64_t number) { return &log_[number % FLOWGPU_LIVE_LOG_EVENTS]; }
    Slot* slots() const { return at<Slot>(FLOWGPU_LIVE_SLOTS_AT); }

    // With the lock held, as all that follows.
    void log(uint64_t address, uint64_t word, unsigned device, int64_t bytes) {
        flowgpu_live_event* to = event(header_.logged);
        store(&to->address, address);
        store(&to->word, word);
        uint64_t logged = header_.logged + 1;
        __atomic_store_n(&header_.logged, logged, __ATOMIC_RELEASE);
        __builtin_prefetch(event(logged + kLineEvents), 1);
        count(device, bytes);
        if (__builtin_expect(logged % FLOWGPU_LIVE_LOG_EVENTS == 0, 0))
            apply();
    }
    void count(uint64_t device, int64_t bytes) {
        store(&header_.device_bytes[device], header_.device_bytes[device] + bytes);
    }
    void apply();
    void apply_add(uint64_t address, uint64_t word);
    void apply_remove(uint64_t address, uint64_t word);
    // Index of the address' slot; if it has none, kNone, and `*free` is where it may go (or kNone).
    uint64_t find(uint64_t address, uint64_t* free);

    flowgpu_live_header header_ = {};
    uint64_t longest_probe_ = 0;
    char unused_[FLOWGPU_LIVE_LOG_AT - sizeof(flowgpu_live_header) - sizeof(uint64_t)] = {};
    flowgpu_live_event log_[FLOWGPU_LIVE_LOG_EVENTS] = {};
};
static_assert(sizeof(LiveSet) == FLOWGPU_LIVE_SLOTS_AT, "live.h");

} // namespace flowgpu::memstub

#endif
