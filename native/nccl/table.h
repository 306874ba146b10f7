// What the tables of this library share: a lock, and entries that are found without it.
#pragma once

#include <atomic>
#include <cstdint>

#include <pthread.h>

namespace flowgpu::nccl {

class Locked {
  public:
    explicit Locked(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Locked() { pthread_mutex_unlock(&mutex_); }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

  private:
    pthread_mutex_t& mutex_;
};

// Keys of entries that were never used, and of those that are free again.
constexpr uint64_t kNever = 0, kGone = ~0ull;

template <uint32_t size> uint32_t home(uint64_t key) {
    return static_cast<uint32_t>(key * 0x9e3779b97f4a7c15ull >> 40) % size;
}

// An entry has an atomic `key`. It is whole before its key can be seen, and stays where it was put.
// Null where it is not there.
template <class Entry, uint32_t size> Entry* find(Entry (&table)[size], uint64_t key) {
    for (uint32_t i = 0, at = home<size>(key); i < size; i++, at = (at + 1) % size) {
        const uint64_t there = table[at].key.load(std::memory_order_acquire);
        if (there == key)
            return &table[at];
        if (there == kNever)
            return nullptr;
    }
    return nullptr;
}

// Under the lock: the entry with this key, else a free one, which the caller gives the key last.
// Null where all are taken.
template <class Entry, uint32_t size> Entry* find_or_free(Entry (&table)[size], uint64_t key) {
    if (Entry* known = find(table, key))
        return known;
    for (uint32_t i = 0, at = home<size>(key); i < size; i++, at = (at + 1) % size) {
        const uint64_t there = table[at].key;
        if (there == kNever || there == kGone)
            return &table[at];
    }
    return nullptr;
}

} // namespace flowgpu::nccl
