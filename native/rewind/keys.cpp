#include "keys.h"

#include <cstring>
#include <utility>

#include <malloc.h>
#include <pthread.h>

#include "library.h"
#include "passage.h"
#include "proc.h"

namespace flowgpu::rewind::keys {

namespace {

// A row of glibc's table of keys, __pthread_keys, as its <internaltypes.h> has it. A thread's value
// counts while it was set under the present number; an odd number is a key in use.
struct Row {
    uintptr_t number;
    void (*destroy)(void*);
};

constexpr size_t kRows = 1024; // PTHREAD_KEYS_MAX
constexpr size_t kMaxKeys = 16;
constexpr size_t kMaxBytes = 4096;

struct Found {
    Row* row;
    void (*destroy)(void*); // the driver's
    void* value;            // of the thread that has loaded the driver
    size_t bytes;           // of it; 0 if it is no memory of malloc's
    alignas(16) uint8_t copy[kMaxBytes];
};

Found found[kMaxKeys];
size_t found_count;

// Addresses that no key has for a destructor. Nothing is ever set for these two, so none is called.
char marks[2];
using Destroy = void (*)(void*);
const Destroy first_mark = reinterpret_cast<Destroy>(&marks[0]);
const Destroy second_mark = reinterpret_cast<Destroy>(&marks[1]);

// The table in the writable memory of libc that has the marks as the destructors of two keys.
Row* find_table(pthread_key_t first, pthread_key_t second) {
    dl_phdr_info libc;
    if (!find_library(reinterpret_cast<uintptr_t>(pthread_key_create), &libc))
        return nullptr;
    const size_t before = first * sizeof(Row), behind = (kRows - first) * sizeof(Row);
    for (int i = 0; i < libc.dlpi_phnum; i++) {
        const ElfW(Phdr) & header = libc.dlpi_phdr[i];
        if (header.p_type != PT_LOAD || !(header.p_flags & PF_W))
            continue;
        const uintptr_t start = (libc.dlpi_addr + header.p_vaddr + 15) & ~uintptr_t{15};
        const uintptr_t end = libc.dlpi_addr + header.p_vaddr + header.p_memsz;
        for (uintptr_t at = start + before; at + behind <= end; at += alignof(Row)) {
            auto* table = reinterpret_cast<Row*>(at - before);
            if (table[first].destroy == first_mark && table[second].destroy == second_mark &&
                table[first].number % 2 == 1 && table[second].number % 2 == 1)
                return table;
        }
    }
    return nullptr;
}

Row* table_of_keys() {
    pthread_key_t first, second;
    Row* table = nullptr;
    if (pthread_key_create(&first, first_mark) != 0)
        return nullptr;
    if (pthread_key_create(&second, second_mark) == 0) {
        table = find_table(first, second);
        pthread_key_delete(second);
    }
    pthread_key_delete(first);
    return table;
}

// Bytes of a block of malloc's; 0 for what cannot be one.
size_t block_bytes(void* value) {
    const auto at = reinterpret_cast<uintptr_t>(value);
    size_t room = 0;
    proc::each_mapping([&](const proc::Mapping& one) {
        if (memcmp(one.mode, "rw-p", 4) == 0 && one.start + 2 * sizeof(size_t) <= at &&
            at < one.end)
            room = one.end - at;
    });
    const size_t bytes = room && at % alignof(max_align_t) == 0 ? malloc_usable_size(value) : 0;
    return bytes <= room && bytes <= kMaxBytes ? bytes : 0;
}

template <size_t place> void run_destroy(void* value) {
    const Passing passing;
    if (passing.same_life())
        found[place].destroy(value);
}

template <size_t... places> Destroy destructor_of(size_t place, std::index_sequence<places...>) {
    static constexpr Destroy all[] = {run_destroy<places>...};
    return all[place];
}

} // namespace

void remember(uintptr_t start, uintptr_t end) {
    Row* table = table_of_keys();
    for (size_t i = 0; table && i < kRows && found_count < kMaxKeys; i++) {
        const auto destroy = reinterpret_cast<uintptr_t>(table[i].destroy);
        if (table[i].number % 2 == 0 || destroy < start || destroy >= end)
            continue;
        Destroy ours = destructor_of(found_count, std::make_index_sequence<kMaxKeys>());
        Found& one = found[found_count++];
        one.row = &table[i];
        one.destroy = table[i].destroy;
        __atomic_store_n(&table[i].destroy, ours, __ATOMIC_RELEASE);
        one.value = pthread_getspecific(static_cast<pthread_key_t>(i));
        one.bytes = one.value ? block_bytes(one.value) : 0;
        if (one.bytes)
            memcpy(one.copy, one.value, one.bytes);
    }
}

// As pthread_key_delete() and pthread_key_create() do it one after the other; in between, another
// thread could take the key, whose number is in the driver's data.
void forget_values() {
    for (size_t i = 0; i < found_count; i++)
        __atomic_fetch_add(&found[i].row->number, 2, __ATOMIC_SEQ_CST);
}

void put_back() {
    for (size_t i = 0; i < found_count; i++)
        if (found[i].bytes)
            memcpy(found[i].value, found[i].copy, found[i].bytes);
}

} // namespace flowgpu::rewind::keys
