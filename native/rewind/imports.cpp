#include "imports.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptors.h"
#include "environment.h"
#include "heap.h"
#include "passage.h"
#include "ranges.h"
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
        {"mmap", address(ranges::map), false},
        {"mmap64", address(ranges::map), false},
        {"munmap", address(ranges::unmap), false},
        {"fopen", address(ranges::open_file), false},
        {"fopen64", address(ranges::open_file), false},
        {"getenv", address(environment::get), false},
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
        {"socket", address(descriptors::make_socket), false},
        {"recvmsg", address(descriptors::receive), false},
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
    return (imported("mmap") || imported("mmap64")) && imported("munmap") && ranges::all_known();
}

bool sees_closes() {
    return imported("close");
}

bool sees_variables() {
    return imported("getenv");
}

bool sees_blocks() {
    return imported("malloc") && imported("free");
}

DriverThread* threads() {
    return all_threads;
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

void end_life() {
    life++;
    exits.used = forks.used = 0;
    ranges::end_life();
}

} // namespace imports

} // namespace flowgpu::rewind
