#include "communicators.h"
#include "graphs.h"

#include <atomic>

#include <pthread.h>

namespace flowgpu::nccl {

namespace {

constexpr uint32_t kHandles = 1024, kPairs = 8192;

// Looked up without a lock: an entry is whole before its key can be seen. A free one has the key 0,
// and an entry stays where it was put.
struct Entry {
    std::atomic<uint64_t> key;
    std::atomic<uint32_t> row;
};
constexpr uint64_t kGone = ~0ull;
Entry handles[kHandles];
Entry pairs[kPairs];
pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

template <uint32_t size> uint32_t home(uint64_t key) {
    return static_cast<uint32_t>(key * 0x9e3779b97f4a7c15ull >> 40) % size;
}

template <uint32_t size> Entry* find(Entry (&table)[size], uint64_t key) {
    for (uint32_t i = 0, at = home<size>(key); i < size; i++, at = (at + 1) % size) {
        const uint64_t there = table[at].key.load(std::memory_order_acquire);
        if (there == key)
            return &table[at];
        if (there == 0)
            return nullptr;
    }
    return nullptr;
}

template <uint32_t size> void put(Entry (&table)[size], uint64_t key, uint32_t row) {
    pthread_mutex_lock(&changing);
    uint32_t i = 0, at = home<size>(key);
    while (i < size && table[at].key != 0 && table[at].key != kGone && table[at].key != key) {
        i++;
        at = (at + 1) % size;
    }
    if (i < size) {
        table[at].row = row;
        table[at].key.store(key, std::memory_order_release);
    } else {
        header().overflow = 1;
    }
    pthread_mutex_unlock(&changing);
}

uint64_t key_of(void* handle) {
    return reinterpret_cast<uint64_t>(handle);
}

} // namespace

uint64_t mix(uint64_t seed, const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; i++)
        seed = (seed ^ at[i]) * 0x100000001b3ull;
    return seed ? seed : 1;
}

void bind(void* handle, uint32_t row) {
    put(handles, key_of(handle), row);
}

uint32_t collectives_of(void* handle) {
    const Entry* entry = handle ? find(handles, key_of(handle)) : nullptr;
    return entry ? entry->row.load() : kNoRow;
}

uint32_t messages_of(uint32_t collectives, bool sends, int peer) {
    const flowgpu_nccl_row& one = row(collectives);
    const uint64_t key =
        uint64_t{collectives + 1} << 32 | static_cast<uint32_t>(peer) << 1 | (sends ? 1 : 0);
    if (const Entry* entry = find(pairs, key))
        return entry->row;
    const auto other = static_cast<uint32_t>(peer);
    const uint32_t made = make_row(one.communicator, one.ranks, one.rank, sends ? one.rank : other,
                                   sends ? other : one.rank);
    if (made != kNoRow) {
        row(made).made = 1;
        put(pairs, key, made);
    }
    return made;
}

void forget(void* handle) {
    Entry* entry = find(handles, key_of(handle));
    if (!entry)
        return;
    pthread_mutex_lock(&changing);
    const uint32_t collectives = entry->row;
    entry->key = kGone;
    for (Entry& pair : pairs) {
        const uint64_t key = pair.key;
        if (key != kGone && key >> 32 == uint64_t{collectives} + 1) {
            forget_captured(pair.row);
            free_row(pair.row);
            pair.key = kGone;
        }
    }
    forget_captured(collectives);
    free_row(collectives);
    __atomic_fetch_sub(&header().living, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&changing);
}

void settle(void* handle, bool well) {
    const uint32_t collectives = collectives_of(handle);
    if (collectives == kNoRow)
        return;
    flowgpu_nccl_row& one = row(collectives);
    if (well)
        __atomic_store_n(&one.made, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&one.pending, __ATOMIC_SEQ_CST))
        return;
    for (const Entry& pair : pairs) {
        const uint64_t key = pair.key;
        if (key != kGone && key >> 32 == uint64_t{collectives} + 1)
            __atomic_store_n(&row(pair.row).pending, 0, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&one.pending, 0, __ATOMIC_SEQ_CST);
}

} // namespace flowgpu::nccl
