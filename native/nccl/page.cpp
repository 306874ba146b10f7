#include "page.h"

#include <cerrno>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "communicators.h"
#include "descriptor.h"

namespace flowgpu::nccl {

namespace {

// Until the memfd is mapped over it, the page is the process's own. Without NCCL nobody touches it.
struct alignas(4096) Page {
    flowgpu_nccl_header header;
    char unused[FLOWGPU_NCCL_ROWS_AT - sizeof(flowgpu_nccl_header)];
    flowgpu_nccl_row rows[FLOWGPU_NCCL_ROWS];
    flowgpu_nccl_thread threads[FLOWGPU_NCCL_THREADS];
    char ids[FLOWGPU_NCCL_ROWS][FLOWGPU_NCCL_ID_BYTES];
};
static_assert(sizeof(Page) == FLOWGPU_NCCL_BYTES);
Page page;

int shared_fd = -1;
bool refused = false;
pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
pthread_once_t prepared = PTHREAD_ONCE_INIT;
pthread_key_t at_exit;
__thread flowgpu_nccl_thread* own __attribute__((tls_model("initial-exec")));

template <class T> T load(const T& from) {
    return __atomic_load_n(&from, __ATOMIC_SEQ_CST);
}
template <class T, class V> void store(T& to, V value) {
    __atomic_store_n(&to, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
// Without a fence: who reads the old value waits a little longer.
void say(flowgpu_nccl_thread* thread, flowgpu_nccl_constant state) {
    __atomic_store_n(&thread->state, static_cast<uint32_t>(state), __ATOMIC_RELEASE);
}

void release(void* pointer) {
    auto* thread = static_cast<flowgpu_nccl_thread*>(pointer);
    own = nullptr;
    store(thread->state, FLOWGPU_NCCL_OUTSIDE);
    store(thread->used, 0);
}

bool map_page(int fd) {
    const int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    return mmap(&page, sizeof page, PROT_READ | PROT_WRITE, MAP_FIXED | kind, fd, 0) != MAP_FAILED;
}

// The child has none of its parent's communicators, and must not write into its counts.
void in_child() {
    pthread_mutex_init(&making, nullptr);
    own = nullptr;
    if (shared_fd < 0)
        return;
    const bool used = page.header.rows != 0;
    map_page(-1);
    close(shared_fd);
    shared_fd = -1;
    if (used)
        forget_all();
}

void prepare() {
    pthread_key_create(&at_exit, release);
    pthread_atfork(nullptr, nullptr, in_child);
}

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// Null, and `overflow`, where all are taken.
flowgpu_nccl_thread* own_thread() {
    if (own)
        return own;
    pthread_once(&prepared, prepare);
    for (uint32_t i = 0; i < FLOWGPU_NCCL_THREADS; i++) {
        flowgpu_nccl_thread& one = page.threads[i];
        uint32_t unused = 0;
        if (!__atomic_compare_exchange_n(&one.used, &unused, 1, false, __ATOMIC_SEQ_CST,
                                         __ATOMIC_SEQ_CST))
            continue;
        one.thread = static_cast<uint32_t>(syscall(SYS_gettid));
        uint32_t known = load(page.header.threads);
        while (known < i + 1 &&
               !__atomic_compare_exchange_n(&page.header.threads, &known, i + 1, false,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
        pthread_setspecific(at_exit, &one);
        return own = &one;
    }
    store(page.header.overflow, 1);
    return nullptr;
}

bool may_enter(const flowgpu_nccl_thread& thread) {
    if (load(page.header.held) != FLOWGPU_NCCL_FREE)
        return false;
    if (load(page.header.gate) == FLOWGPU_NCCL_OPEN)
        return true;
    for (uint32_t i = 0; i < thread.wants; i++)
        if (thread.want_number[i] > load(page.rows[thread.want_row[i]].limit))
            return false;
    return true;
}

} // namespace

flowgpu_nccl_header& header() {
    return page.header;
}

flowgpu_nccl_row& row(uint32_t number) {
    return page.rows[number];
}

char* id_of(uint32_t number) {
    return page.ids[number];
}

bool anybody_inside() {
    for (uint32_t i = 0; i < load(page.header.threads); i++) {
        const uint32_t state = load(page.threads[i].state);
        if (state == FLOWGPU_NCCL_DECIDING || state == FLOWGPU_NCCL_INSIDE)
            return true;
    }
    return false;
}

void Unit::add(uint32_t number) {
    if (number == kNoRow)
        return;
    for (uint32_t i = 0; i < used; i++) {
        if (wants[i].row == number) {
            wants[i].count++;
            return;
        }
    }
    if (used == FLOWGPU_NCCL_WANTS)
        store(page.header.overflow, 1);
    else
        wants[used++] = {number, 1};
}

uint32_t make_row(uint64_t communicator, uint32_t ranks, uint32_t rank, uint32_t from,
                  uint32_t to) {
    pthread_mutex_lock(&making);
    uint32_t number = 0;
    while (number < FLOWGPU_NCCL_ROWS && page.rows[number].communicator)
        number++;
    if (number == FLOWGPU_NCCL_ROWS) {
        store(page.header.overflow, 1);
        number = kNoRow;
    } else {
        flowgpu_nccl_row& made = page.rows[number];
        made = {};
        made.ranks = ranks;
        made.rank = rank;
        made.source = from;
        made.target = to;
        store(made.communicator, communicator); // whole before it can be seen
        if (page.header.rows < number + 1)
            store(page.header.rows, number + 1);
    }
    pthread_mutex_unlock(&making);
    return number;
}

void free_row(uint32_t number) {
    if (number != kNoRow)
        store(page.rows[number].communicator, 0);
}

void enter(const Unit& unit) {
    const int error = errno;
    flowgpu_nccl_thread* thread = own_thread();
    if (!thread) {
        for (uint32_t i = 0; i < unit.used; i++)
            __atomic_fetch_add(&page.rows[unit.wants[i].row].entered, unit.wants[i].count,
                               __ATOMIC_SEQ_CST);
        return;
    }
    for (;;) {
        const uint32_t wake = load(page.header.wake);
        for (uint32_t i = 0; i < unit.used; i++) {
            const Want& want = unit.wants[i];
            thread->want_row[i] = want.row;
            thread->want_number[i] = load(page.rows[want.row].entered) + want.count;
        }
        thread->wants = unit.used;
        store(thread->state, FLOWGPU_NCCL_DECIDING); // and a fence
        if (may_enter(*thread))
            break;
        thread->since_ns = now_ns();
        store(thread->state, FLOWGPU_NCCL_PARKED);
        syscall(SYS_futex, &page.header.wake, FUTEX_WAIT, wake, nullptr, nullptr, 0);
    }
    for (uint32_t i = 0; i < unit.used; i++)
        __atomic_fetch_add(&page.rows[unit.wants[i].row].entered, unit.wants[i].count,
                           __ATOMIC_SEQ_CST);
    say(thread, FLOWGPU_NCCL_INSIDE);
    errno = error;
}

void leave(const Unit& unit, bool failed, bool goes_on) {
    for (uint32_t i = 0; i < unit.used; i++) {
        flowgpu_nccl_row& one = page.rows[unit.wants[i].row];
        if (failed)
            __atomic_fetch_sub(&one.entered, unit.wants[i].count, __ATOMIC_SEQ_CST);
        else if (goes_on)
            store(one.pending, 1);
    }
    if (own)
        say(own, FLOWGPU_NCCL_OUTSIDE);
}

int share() {
    const int error = errno;
    pthread_once(&prepared, prepare);
    pthread_mutex_lock(&making);
    if (shared_fd < 0 && !refused) {
        const int fd = memfd_create("flowgpu-nccl", MFD_CLOEXEC);
        // Nobody has called NCCL before the first cuInit, but what has been counted is kept.
        refused = fd < 0 || ftruncate(fd, sizeof page) != 0;
        page.header.magic = FLOWGPU_NCCL_MAGIC;
        page.header.version = FLOWGPU_NCCL_VERSION;
        const size_t counted = page.header.living ? sizeof page : sizeof page.header;
        refused = refused || write(fd, &page, counted) != static_cast<ssize_t>(counted);
        const int high = refused || fd < 0 ? fd : move_high(fd);
        refused = refused || !map_page(high);
        if (!refused)
            shared_fd = high;
        else if (high >= 0)
            close(high);
    }
    pthread_mutex_unlock(&making);
    errno = error;
    return shared_fd;
}

} // namespace flowgpu::nccl

FGN_EXPORT void flowgpu_nccl_open() {
    using namespace flowgpu::nccl;
    uint32_t held = FLOWGPU_NCCL_HELD;
    const bool freed = __atomic_compare_exchange_n(&page.header.held, &held,
                                                   static_cast<uint32_t>(FLOWGPU_NCCL_FREE), false,
                                                   __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (!freed && load(page.header.gate) == FLOWGPU_NCCL_OPEN)
        return;
    store(page.header.gate, FLOWGPU_NCCL_OPEN);
    __atomic_fetch_add(&page.header.wake, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &page.header.wake, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
