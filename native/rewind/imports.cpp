#include "imports.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptors.h"
#include "heap.h"
#include "passage.h"
#include "proc.h"
#include "table.h"

extern "C" {
int __cxa_atexit(void (*function)(void*), void* argument, void* library) noexcept;
int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* library) noexcept;
}

namespace flowgpu::rewind {

Passage passage;
std::atomic<unsigned> life{1};
__thread bool drivers_own __attribute__((tls_model("initial-exec")));

namespace imports {

namespace {

struct ExitHandler {
    void (*function)(void*);
    void* argument;
    unsigned life;
};

struct ForkHandlers {
    void (*prepare)();
    void (*parent)();
    void (*child)();
    unsigned life;
};

// Handlers that libc has, in its order. A life takes them over one after the other, so that it has
// the order in which it asked; libc forgets none.
template <class T, size_t N> struct Handlers : Table<T, N> {
    size_t used; // by this life

    // Null: the table is full. `*fresh`: libc is still to be told of it.
    T* next(bool* fresh) {
        *fresh = used == this->count;
        T* row = *fresh ? this->add() : &this->rows[used];
        used += row != nullptr;
        return row;
    }
};

// Where the system put a range that the driver reserved anywhere.
struct Placement {
    uintptr_t start;
    size_t bytes;
    unsigned life; // the last one that had it
    bool held;     // by us, between two lives
};

// A key with a destructor.
struct Key {
    std::atomic<bool> used;
    pthread_key_t key;
    void (*destroy)(void*);
};

constexpr size_t kMaxForks = 16;
constexpr size_t kMaxKeys = 128;

std::mutex mutex;
DriverThread all_threads[kMaxThreads];
Key keys[kMaxKeys];
Handlers<ExitHandler, 1024> exits;
Handlers<ForkHandlers, kMaxForks> forks;
Table<Reserved, 65536> ranges;     // apart from each other
Table<Placement, 4096> placements; // in the order in which they were first made
// Of a placement the driver may give parts back, what it had for alignment. Nobody else gets them
// while it has the rest, or a new life could not have the whole again.
Table<Reserved, 16384> given_back; // apart from each other
Table<Reserved, 4096> kept;        // what the caller has held since the last life ended
bool ranges_overflow = false;

using Lock = std::lock_guard<std::mutex>;

// Gives the slot back however the thread ends: by return, by pthread_exit, or sent home.
struct Leave {
    DriverThread& thread;
    ~Leave() {
        Lock lock(mutex);
        thread.tid = thread.joinable ? DriverThread::kEnded : DriverThread::kFree;
    }
};

void* run_thread(void* given) {
    auto& thread = *static_cast<DriverThread*>(given);
    drivers_own = true;
    Leave leave = {thread};
    thread.handle = pthread_self();
    // A thread that is sent home ends as one that has done its work.
    if (__builtin_setjmp(thread.home))
        return nullptr;
    thread.tid = static_cast<pid_t>(syscall(SYS_gettid));
    return thread.function(thread.argument);
}

// Without a slot a thread could not be ended later, so it is not started.
int create_thread(pthread_t* handle, const pthread_attr_t* attributes, void* (*function)(void*),
                  void* argument) {
    int kind = PTHREAD_CREATE_JOINABLE;
    if (attributes)
        pthread_attr_getdetachstate(attributes, &kind);
    for (DriverThread& thread : all_threads) {
        pid_t none = DriverThread::kFree;
        if (!thread.tid.compare_exchange_strong(none, DriverThread::kStarting))
            continue;
        thread.function = function;
        thread.argument = argument;
        thread.handle = {};
        thread.joinable = kind == PTHREAD_CREATE_JOINABLE;
        int result = pthread_create(handle, attributes, run_thread, &thread);
        if (result != 0)
            thread.tid = DriverThread::kFree;
        // Until it is known by its handle: the caller may detach it next.
        while (thread.tid == DriverThread::kStarting)
            usleep(20);
        return result;
    }
    return EAGAIN;
}

// The driver has no more to do with the thread of this handle.
void let_go(pthread_t handle) {
    Lock lock(mutex);
    for (DriverThread& thread : all_threads) {
        if (thread.tid == DriverThread::kFree || !pthread_equal(thread.handle, handle))
            continue;
        thread.joinable = false;
        if (thread.tid == DriverThread::kEnded)
            thread.tid = DriverThread::kFree;
    }
}

int join_thread(pthread_t handle, void** value) {
    int result = pthread_join(handle, value);
    if (result == 0)
        let_go(handle);
    return result;
}

template <size_t row> void run_destroy(void* value) {
    const Passing passing;
    if (passing.same_life())
        keys[row].destroy(value);
}

using Destroy = void (*)(void*);

template <size_t... rows> Destroy destructor_of(size_t row, std::index_sequence<rows...>) {
    static constexpr Destroy all[] = {run_destroy<rows>...};
    return all[row];
}

int create_key(pthread_key_t* key, Destroy destroy) {
    Lock lock(mutex);
    auto* row = std::find_if(std::begin(keys), std::end(keys), [](Key& one) { return !one.used; });
    if (row == std::end(keys))
        return pthread_key_create(key, destroy);
    const auto place = static_cast<size_t>(row - keys);
    Destroy ours = destructor_of(place, std::make_index_sequence<kMaxKeys>());
    row->destroy = destroy;
    const int result = pthread_key_create(&row->key, destroy ? ours : nullptr);
    row->used = result == 0;
    *key = row->key;
    return result;
}

int delete_key(pthread_key_t key) {
    int result = pthread_key_delete(key);
    Lock lock(mutex);
    for (Key& row : keys)
        if (row.used && row.key == key)
            row.used = false;
    return result;
}

// Without the lock, which a forked child may have inherited.
void run_at_exit(void* given) {
    const Passing passing;
    auto* handler = static_cast<ExitHandler*>(given);
    if (handler->life == life)
        handler->function(handler->argument);
}

// libc is asked without the lock: it has one of its own, and handlers call the driver.
int at_exit(void (*function)(void*), void* argument, void* library) noexcept {
    ExitHandler* row;
    bool fresh;
    {
        Lock lock(mutex);
        row = exits.next(&fresh);
        if (!row)
            return -1;
        *row = {function, argument, life};
    }
    return fresh ? __cxa_atexit(run_at_exit, row, library) : 0;
}

// A fork is a passage from its first handler to its last: they take and give back the driver's
// locks.
__thread size_t fork_depth __attribute__((tls_model("initial-exec")));
__thread uint32_t before_fork __attribute__((tls_model("initial-exec")));

template <size_t row, void (*ForkHandlers::*handler)()> void run_at_fork() {
    const bool begins = handler == &ForkHandlers::prepare;
    if (begins && fork_depth++ == 0)
        before_fork = passage.enter();
    if (forks.rows[row].life == life && forks.rows[row].*handler)
        (forks.rows[row].*handler)();
    // libc may have been told of this one since the first.
    if (!begins && fork_depth && --fork_depth == 0)
        passage.leave(before_fork);
}

struct ForkTrampolines {
    void (*prepare)();
    void (*parent)();
    void (*child)();
};

template <size_t... rows> ForkTrampolines trampolines(size_t row, std::index_sequence<rows...>) {
    static constexpr ForkTrampolines all[] = {{run_at_fork<rows, &ForkHandlers::prepare>,
                                               run_at_fork<rows, &ForkHandlers::parent>,
                                               run_at_fork<rows, &ForkHandlers::child>}...};
    return all[row];
}

int at_fork(void (*prepare)(), void (*parent)(), void (*child)(), void* library) noexcept {
    ForkHandlers* row;
    bool fresh;
    {
        Lock lock(mutex);
        row = forks.next(&fresh);
        if (!row)
            return ENOMEM;
        *row = {prepare, parent, child, life};
    }
    if (!fresh)
        return 0;
    const ForkTrampolines ours =
        trampolines(static_cast<size_t>(row - forks.rows), std::make_index_sequence<kMaxForks>());
    return __register_atfork(ours.prepare, ours.parent, ours.child, library);
}

// False: the table is full.
template <size_t N> bool subtract(Table<Reserved, N>& from, uintptr_t start, uintptr_t end) {
    bool whole = true;
    for (size_t i = 0; i < from.count;) {
        Reserved old = from.rows[i];
        if (old.end <= start || old.start >= end) {
            i++;
            continue;
        }
        from.remove(&from.rows[i]);
        for (Reserved rest : {Reserved{old.start, start}, Reserved{end, old.end}})
            if (rest.start < rest.end) {
                Reserved* row = from.add();
                whole = whole && row;
                if (row)
                    *row = rest;
            }
    }
    return whole;
}

void forget_range(uintptr_t start, uintptr_t end) {
    if (!subtract(ranges, start, end))
        ranges_overflow = true;
}

constexpr int kHold = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

bool hold(uintptr_t start, size_t bytes) {
    return mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE, kHold, -1, 0) != MAP_FAILED;
}

// A new life asks for what the last one asked for, in the same order, and is given the same
// addresses: what the driver places in its ranges by itself (the variables of modules) then lies
// where the program knows it. A range that was made for a reservation of the program's is as large
// as others; it comes last.
void* place_again(size_t bytes, int flags) {
    Placement* found = nullptr;
    for (Placement& row : placements) {
        if (row.bytes != bytes || !row.held)
            continue;
        const bool has_kept = std::any_of(kept.begin(), kept.end(), [&](const Reserved& range) {
            return range.start < row.start + row.bytes && row.start < range.end;
        });
        if (!found || !has_kept)
            found = &row;
        if (!has_kept)
            break;
    }
    if (!found)
        return MAP_FAILED;
    void* at = reinterpret_cast<void*>(found->start);
    void* result = mmap(at, bytes, PROT_NONE, flags | MAP_FIXED, -1, 0);
    found->held = result == MAP_FAILED;
    found->life = life;
    return result;
}

void remove_placement(Placement* row) {
    for (; row + 1 < placements.end(); row++) // keeps the order
        row[0] = row[1];
    placements.count--;
}

// True if it was a part of a placement, and has been dealt with.
bool give_back(uintptr_t start, size_t bytes) {
    for (Placement& row : placements) {
        const uintptr_t end = row.start + row.bytes;
        if (row.life != life || row.held || start < row.start || start + bytes > end)
            continue;
        subtract(given_back, start, start + bytes);
        Reserved* part = given_back.add();
        if (part)
            *part = {start, start + bytes};
        if (!part || !hold(start, bytes)) {
            subtract(given_back, row.start, end);
            remove_placement(&row);
            return false;
        }
        size_t all = 0;
        for (const Reserved& one : given_back)
            all += one.start >= row.start && one.end <= end ? one.end - one.start : 0;
        if (all == row.bytes) {
            subtract(given_back, row.start, end);
            munmap(reinterpret_cast<void*>(row.start), row.bytes);
            remove_placement(&row);
        }
        return true;
    }
    return false;
}

void* map(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    const bool reserves = protection == PROT_NONE && (flags & MAP_ANONYMOUS);
    const bool shares = (flags & MAP_SHARED) && (flags & MAP_ANONYMOUS); // its memory of the host
    const bool anywhere = !at && !(flags & (MAP_FIXED | MAP_FIXED_NOREPLACE | MAP_32BIT));
    void* result = MAP_FAILED;
    if (reserves && anywhere) {
        Lock lock(mutex);
        result = place_again(bytes, flags);
    }
    const bool again = result != MAP_FAILED;
    if (!again)
        result = mmap(at, bytes, protection, flags, fd, offset);
    if (result == MAP_FAILED)
        return result;
    auto start = reinterpret_cast<uintptr_t>(result);
    Lock lock(mutex);
    if (reserves && anywhere && !again)
        if (Placement* row = placements.add())
            *row = {start, bytes, life, false};
    forget_range(start, start + bytes);
    subtract(given_back, start, start + bytes);
    if (reserves || shares) {
        if (Reserved* row = ranges.add())
            *row = {start, start + bytes};
        else
            ranges_overflow = true;
    }
    return result;
}

int unmap(void* at, size_t bytes) {
    auto start = reinterpret_cast<uintptr_t>(at);
    {
        Lock lock(mutex); // before: once it is free, it may be somebody else's
        forget_range(start, start + bytes);
        if (give_back(start, bytes))
            return 0;
    }
    return munmap(at, bytes);
}

// The first part of start to end that is held for the new life; empty where there is none.
Reserved held_in(uintptr_t start, uintptr_t end) {
    Reserved first = {end, end};
    auto look = [&](uintptr_t from, uintptr_t to) {
        from = from > start ? from : start;
        to = to < end ? to : end;
        if (from < to && from < first.start)
            first = {from, to};
    };
    for (const Reserved& range : kept)
        look(range.start, range.end);
    for (const Placement& row : placements)
        if (row.held)
            look(row.start, row.start + row.bytes);
    return first;
}

// Of this process's mappings, those that the last life did not find when it began.
FILE* open_maps(const char* mode) {
    const int fd = memfd_create("maps", MFD_CLOEXEC);
    if (fd < 0)
        return nullptr;
    bool whole = proc::each_line("/proc/self/maps", [&](const char* line) {
        uintptr_t start = 0, end = 0;
        int range = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR "%n", &start, &end, &range) != 2)
            return;
        while (start < end) {
            const Reserved hidden = held_in(start, end);
            if (start < hidden.start)
                dprintf(fd, "%" PRIxPTR "-%" PRIxPTR "%s\n", start, hidden.start, line + range);
            start = hidden.end;
        }
    });
    FILE* file = whole && lseek(fd, 0, SEEK_SET) == 0 ? fdopen(fd, mode) : nullptr;
    if (!file)
        close(fd);
    return file;
}

// When it begins, the driver reads which addresses are taken, and those it never reserves: what is
// held for it must not seem so.
FILE* open_file(const char* path, const char* mode) {
    if (life > 1 && path && strcmp(path, "/proc/self/maps") == 0) {
        Lock lock(mutex);
        if (FILE* file = open_maps(mode))
            return file;
    }
    return fopen(path, mode);
}

char visible_devices[4096]; // empty: as the environment has them

// What the driver's first life has found in the environment, until its cuInit has succeeded or when
// it first asked, for the next ones: the program may have changed it since, or written over it, as
// a process title does.
struct Variable {
    const char* name;
    char* value; // null: there was none
};
Table<Variable, 256> variables;
char variables_text[1 << 15];
size_t variables_used;
bool variables_kept;

Variable* known_variable(const char* name) {
    for (Variable& row : variables)
        if (strcmp(row.name, name) == 0)
            return &row;
    return nullptr;
}

// The text that is there already, a copy, or null where there is no room.
char* kept_text(const char* text, char* there) {
    if (there && strcmp(text, there) == 0)
        return there;
    const size_t bytes = strlen(text) + 1;
    if (bytes > sizeof variables_text - variables_used)
        return nullptr;
    char* place = variables_text + variables_used;
    variables_used += bytes;
    return static_cast<char*>(memcpy(place, text, bytes));
}

char* get_variable(const char* name) {
    if (*visible_devices && strcmp(name, "CUDA_VISIBLE_DEVICES") == 0)
        return visible_devices;
    Lock lock(mutex);
    Variable* known = known_variable(name);
    if (known && life > 1)
        return known->value;
    char* found = getenv(name);
    if (known && variables_kept)
        return found;
    char* value = found ? kept_text(found, known ? known->value : nullptr) : nullptr;
    if (found && !value)
        return found; // the next life asks the environment
    if (known)
        known->value = value;
    else if (const char* copy = kept_text(name, nullptr))
        if (Variable* row = variables.add())
            *row = {copy, value};
    return found;
}

template <class F> void* address(F function) {
    return reinterpret_cast<void*>(function);
}

struct Imports {
    Import* first;
    size_t count;
    Import* begin() const { return first; }
    Import* end() const { return first + count; }
};

void* find_symbol(void* handle, const char* name, const char* version);

// Made on first use: nothing of this library may run when it is loaded.
Imports redirected() {
    static Import rows[] = {
        {"pthread_create", address(create_thread), false},
        {"mmap", address(map), false},
        {"mmap64", address(map), false},
        {"munmap", address(unmap), false},
        {"fopen", address(open_file), false},
        {"fopen64", address(open_file), false},
        {"getenv", address(get_variable), false},
        {"pthread_join", address(join_thread), false},
        {"pthread_detach", address(+[](pthread_t handle) {
             let_go(handle);
             return pthread_detach(handle);
         }),
         false},
        {"pthread_key_create", address(create_key), false},
        {"pthread_key_delete", address(delete_key), false},
        {"pipe", address(+[](int* ends) { return descriptors::make_pipe(ends, 0); }), false},
        {"pipe2", address(descriptors::make_pipe), false},
        {"eventfd", address(descriptors::make_event), false},
        {"epoll_create1", address(descriptors::make_epoll), false},
        {"close", address(descriptors::shut), false},
        {"malloc", address(heap::allocate), false},
        {"calloc", address(heap::allocate_zeroed), false},
        {"realloc", address(heap::reallocate), false},
        {"memalign", address(heap::allocate_aligned), false},
        {"aligned_alloc", address(heap::allocate_aligned), false},
        {"posix_memalign", address(heap::allocate_aligned_at), false},
        {"free", address(heap::release), false},
        {"dlvsym", address(find_symbol), false},
        {"__cxa_atexit", address(at_exit), false},
        {"__register_atfork", address(at_fork), false},
    };
    return {rows, sizeof rows / sizeof *rows};
}

// What is newer than the libc that the driver is built for, it finds by this.
void* find_symbol(void* handle, const char* name, const char* version) {
    void* found = dlvsym(handle, name, version);
    if (found && strncmp(version, "GLIBC_", 6) == 0)
        for (const Import& one : redirected())
            if (strcmp(one.name, name) == 0)
                return one.ours;
    return found;
}

bool imported(const char* name) {
    for (const Import& one : redirected())
        if (strcmp(one.name, name) == 0)
            return one.found;
    return false;
}

} // namespace

const char* watch(Library& library, Passage given) {
    passage = given;
    const Imports imports = redirected();
    return library.redirect(imports.first, imports.count)
               ? nullptr
               : "the driver's calls of libc cannot be seen";
}

bool sees_threads() {
    return imported("pthread_create");
}

bool sees_ranges() {
    return (imported("mmap") || imported("mmap64")) && imported("munmap") && !ranges_overflow;
}

bool sees_closes() {
    return imported("close");
}

bool see_devices(const char* visible) {
    const size_t length = strnlen(visible, sizeof visible_devices);
    if (length == sizeof visible_devices || !imported("getenv"))
        return false;
    memcpy(visible_devices, visible, length + 1);
    return true;
}

void keep_environment() {
    Lock lock(mutex);
    variables_kept = true;
}

bool sees_blocks() {
    return imported("malloc") && imported("free");
}

DriverThread* threads() {
    return all_threads;
}

const Reserved* reserved(size_t* count) {
    *count = ranges.count;
    return ranges.rows;
}

void delete_keys() {
    for (Key& row : keys)
        if (row.used.exchange(false))
            pthread_key_delete(row.key);
}

void join_threads() {
    for (DriverThread& thread : all_threads)
        if (thread.tid == DriverThread::kEnded) {
            pthread_join(thread.handle, nullptr);
            thread.tid = DriverThread::kFree;
        }
}

void hold_placements(const Range* keep, size_t count) {
    kept.count = 0;
    for (size_t i = 0; i < count; i++)
        if (Reserved* row = kept.add())
            *row = {keep[i].start, keep[i].start + keep[i].bytes};
    for (size_t i = 0; i < placements.count;) {
        Placement& row = placements.rows[i];
        const uintptr_t end = row.start + row.bytes;
        bool whole = true; // what is kept lies in it, or beside it
        for (const Reserved& range : kept)
            whole = whole && (range.end <= row.start || end <= range.start ||
                              (row.start <= range.start && range.end <= end));
        if (row.life != life || row.held || (whole && hold(row.start, row.bytes))) {
            if (row.life == life && !row.held) {
                forget_range(row.start, end);
                row.held = true;
            }
            i++;
            continue;
        }
        // Its parts go with the rest of the driver's ranges.
        for (const Reserved& part : given_back)
            if (part.start >= row.start && part.end <= end)
                if (Reserved* range = ranges.add())
                    *range = part;
        remove_placement(&row);
    }
    given_back.count = 0;
}

bool is_placed(const Range& range) {
    Lock lock(mutex);
    for (const Placement& row : placements)
        if (row.start <= range.start && range.start + range.bytes <= row.start + row.bytes)
            return true;
    return false;
}

bool make_way(const Range& range, bool at_last) {
    const uintptr_t start = range.start, end = start + range.bytes;
    Lock lock(mutex);
    for (Placement& row : placements) {
        const Placement around = row;
        const uintptr_t around_end = around.start + around.bytes;
        if (start < around.start || end > around_end)
            continue;
        if (around.held && !at_last)
            return false;
        subtract(kept, start, end);
        if (!around.held)
            return true; // it is the driver's, which has it from us with the rest
        remove_placement(&row);
        for (uintptr_t at = around.start; at < around_end;) {
            const Reserved still_kept = held_in(at, around_end);
            if (at < still_kept.start)
                munmap(reinterpret_cast<void*>(at), still_kept.start - at);
            at = still_kept.end;
        }
        return true;
    }
    subtract(kept, start, end);
    munmap(reinterpret_cast<void*>(start), range.bytes);
    return true;
}

void end_life() {
    life++;
    exits.used = forks.used = 0;
    ranges.count = 0;
    ranges_overflow = false;
}

} // namespace imports

} // namespace flowgpu::rewind
