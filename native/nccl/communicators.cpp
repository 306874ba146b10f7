#include "communicators.h"
#include "graphs.h"
#include "table.h"
#include "uses.h"

#include <atomic>
#include <cstring>

namespace flowgpu::nccl {

namespace {

constexpr uint32_t kPlaces = 1024, kPairs = 8192, kAttached = 4096;

struct Entry {
    std::atomic<uint64_t> key;
    std::atomic<uint32_t> value;
};
Entry handles[kPlaces];
Entry pairs[kPairs];
// Memory of those that were ever used alone.
Communicator places[kPlaces];
bool taken[kPlaces];
Attached attached[kAttached];
uint32_t attached_used = 0;
std::atomic<bool> names{false};
pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

// Under the lock.
template <uint32_t size> void put(Entry (&table)[size], uint64_t key, uint32_t value) {
    if (Entry* entry = find_or_free(table, key)) {
        entry->value = value;
        entry->key.store(key, std::memory_order_release);
    } else {
        header().overflow = 1;
    }
}

uint64_t key_of(const void* handle) {
    return reinterpret_cast<uint64_t>(handle);
}

uint32_t number_of(const Communicator* place) {
    return static_cast<uint32_t>(place - places);
}

// Under the lock.
void free_place(Communicator* place) {
    if (Entry* entry = place->handle ? find(handles, key_of(place->handle)) : nullptr)
        entry->key = kGone;
    for (Entry& pair : pairs) {
        const uint64_t key = pair.key;
        if (key != kGone && key >> 32 == uint64_t{place->row} + 1) {
            forget_captured(pair.value);
            free_row(pair.value);
            pair.key = kGone;
        }
    }
    for (uint32_t i = 0; i < attached_used; i++)
        if (attached[i].of == place)
            attached[i].of = nullptr;
    __atomic_fetch_sub(&header().windows, place->windows, __ATOMIC_SEQ_CST);
    forget_captured(place->row);
    forget_uses(place->row);
    free_row(place->row);
    place->handle = nullptr;
    taken[number_of(place)] = false;
    __atomic_fetch_sub(&header().living, 1, __ATOMIC_SEQ_CST);
}

void copy_name(How* how, size_t at, char (&to)[kNameBytes]) {
    const char* name = nullptr;
    if (at + sizeof name > how->config_bytes)
        return;
    memcpy(&name, how->config + at, sizeof name);
    if (!name)
        return;
    if (strlen(name) >= sizeof to)
        header().forgotten = 1;
    else
        strcpy(to, name);
    name = to;
    memcpy(how->config + at, &name, sizeof name);
}

} // namespace

uint64_t mix(uint64_t seed, const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; i++)
        seed = (seed ^ at[i]) * 0x100000001b3ull;
    return seed ? seed : 1;
}

// ncclConfig_t begins with its size; pointers to names are the same in all versions.
void How::configure(const void* from) {
    constexpr size_t kNetName = 32, kCommName = 48;
    size_t size = 0;
    memcpy(&size, from, sizeof size);
    if (size < sizeof size || size > sizeof config) {
        header().forgotten = 1;
        return;
    }
    config_bytes = static_cast<uint32_t>(size);
    memcpy(config, from, size);
    copy_name(this, kNetName, names[0]);
    copy_name(this, kCommName, names[1]);
}

Communicator* reserve(uint32_t row) {
    if (row == kNoRow)
        return nullptr;
    Locked locked(changing);
    for (uint32_t i = 0; i < kPlaces; i++) {
        if (taken[i])
            continue;
        Communicator& place = places[i];
        place.handle = nullptr;
        place.real = nullptr;
        place.row = row;
        place.windows = 0;
        place.how = {};
        taken[i] = true;
        __atomic_fetch_add(&header().living, 1, __ATOMIC_SEQ_CST);
        return &place;
    }
    header().overflow = 1;
    free_row(row);
    return nullptr;
}

void* bind(Communicator* place, void* real) {
    Locked locked(changing);
    void* handle = real;
    if (const Entry* same = find(handles, key_of(real))) {
        Communicator& other = places[same->value];
        if (other.real == real)
            free_place(&other); // it has ended without a word
        else
            handle = place;
    }
    place->real = real;
    place->handle = handle;
    put(handles, key_of(handle), number_of(place));
    return handle;
}

Communicator* find(void* handle) {
    const Entry* entry = handle ? find(handles, key_of(handle)) : nullptr;
    return entry ? &places[entry->value] : nullptr;
}

void each(void (*visit)(Communicator&, void*), void* argument) {
    for (uint32_t i = 0; i < kPlaces; i++)
        if (taken[i] && places[i].handle)
            visit(places[i], argument);
}

uint32_t messages_of(uint32_t collectives, bool sends, int peer) {
    const flowgpu_nccl_row& one = row(collectives);
    const uint64_t key =
        uint64_t{collectives + 1} << 32 | static_cast<uint32_t>(peer) << 1 | (sends ? 1 : 0);
    if (const Entry* entry = find(pairs, key))
        return entry->value;
    const auto other = static_cast<uint32_t>(peer);
    const uint32_t made = make_row(one.communicator, one.ranks, one.rank, sends ? one.rank : other,
                                   sends ? other : one.rank);
    if (made != kNoRow) {
        row(made).made = 1;
        Locked locked(changing);
        put(pairs, key, made);
    }
    return made;
}

void each_message(const Communicator* of, void (*visit)(bool sends, int peer, void*),
                  void* argument) {
    for (const Entry& pair : pairs) {
        const uint64_t key = pair.key;
        if (key != kGone && key >> 32 == uint64_t{of->row} + 1 && row(pair.value).entered)
            visit(key & 1, static_cast<int>(static_cast<uint32_t>(key) >> 1), argument);
    }
}

void forget(Communicator* place) {
    Locked locked(changing);
    free_place(place);
}

void forget_all() {
    pthread_mutex_init(&changing, nullptr);
    for (Entry& one : handles)
        one.key = 0;
    for (Entry& one : pairs)
        one.key = 0;
    memset(taken, 0, sizeof taken);
    attached_used = 0;
    forget_all_uses();
}

void settle(Communicator* place, bool well) {
    flowgpu_nccl_row& one = row(place->row);
    if (well)
        __atomic_store_n(&one.made, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&one.pending, __ATOMIC_SEQ_CST))
        return;
    for (const Entry& pair : pairs) {
        const uint64_t key = pair.key;
        if (key != kGone && key >> 32 == uint64_t{place->row} + 1)
            __atomic_store_n(&row(pair.value).pending, 0, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&one.pending, 0, __ATOMIC_SEQ_CST);
}

bool any_names() {
    return names.load(std::memory_order_relaxed);
}

void now_names() {
    names = true;
}

uint64_t attach(const Attached& made) {
    Locked locked(changing);
    Attached* free = nullptr;
    bool is_name = false;
    for (uint32_t i = 0; i < attached_used; i++) {
        Attached& one = attached[i];
        const bool same = one.of == made.of && one.reduces == made.reduces;
        if (!one.of)
            free = &one;
        else if (same && one.handle == made.real)
            is_name |= one.real != made.real;
    }
    if (!free && attached_used < kAttached)
        free = &attached[attached_used++];
    if (!free) {
        header().forgotten = 1;
        return made.real;
    }
    *free = made;
    // A number of an operation is an int.
    const auto name = made.reduces ? (1u << 30) + static_cast<uint64_t>(free - attached)
                                   : reinterpret_cast<uint64_t>(free);
    return free->handle = is_name ? name : made.real;
}

Attached* find_attached(Communicator* of, bool reduces, uint64_t handle) {
    Locked locked(changing);
    for (uint32_t i = 0; of && i < attached_used; i++)
        if (attached[i].of == of && attached[i].reduces == reduces && attached[i].handle == handle)
            return &attached[i];
    return nullptr;
}

void detach(Attached* place) {
    Locked locked(changing);
    place->of = nullptr;
}

void each_attached(void (*visit)(Attached&, void*), void* argument) {
    for (uint32_t i = 0; i < attached_used; i++)
        if (attached[i].of)
            visit(attached[i], argument);
}

} // namespace flowgpu::nccl
