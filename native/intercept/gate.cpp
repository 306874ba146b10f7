#include "gate.h"

#include <cerrno>
#include <climits>
#include <ctime>
#include <new>

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace flowgpu::gate {

alignas(kApart) std::atomic<uint32_t> closed{0};
__thread ThreadRecord* own_record __attribute__((tls_model("initial-exec")));

namespace {

std::atomic<ThreadRecord*> records{nullptr};
// Stands in when no record can be allocated: it says "inside" for ever, so no checkpoint is taken
// behind such a thread.
ThreadRecord overflow;
pthread_key_t exit_key;
pthread_once_t exit_key_made = PTHREAD_ONCE_INIT;
std::atomic<bool> in_exit{false};

void release_record(void* pointer) {
    auto* record = static_cast<ThreadRecord*>(pointer);
    own_record = nullptr;
    record->inside.store(0, std::memory_order_release);
    record->used.store(0, std::memory_order_release);
}

int membarrier(int command) {
    return static_cast<int>(syscall(SYS_membarrier, command, 0, 0));
}

uint64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

bool any_inside() {
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        if (r->inside.load(std::memory_order_acquire))
            return true;
    return overflow.inside.load(std::memory_order_acquire) != 0;
}

} // namespace

ThreadRecord* make_record() {
    int error = errno;
    pthread_once(&exit_key_made, [] { pthread_key_create(&exit_key, release_record); });
    ThreadRecord* record = records.load(std::memory_order_acquire);
    for (; record; record = record->next) {
        uint32_t unused = 0;
        if (record->used.compare_exchange_strong(unused, 1))
            break;
    }
    if (!record) {
        record = new (std::nothrow) ThreadRecord();
        if (record) {
            record->used.store(1, std::memory_order_relaxed);
            record->next = records.load(std::memory_order_relaxed);
            while (!records.compare_exchange_weak(record->next, record)) {
            }
        }
    }
    if (!record) {
        overflow.inside.store(1); // its threads put back what they found: never 0
        record = &overflow;
    } else {
        pthread_setspecific(exit_key, record);
    }
    own_record = record;
    errno = error;
    return record;
}

void park(ThreadRecord* record) {
    int error = errno;
    while (closed.load(std::memory_order_seq_cst)) {
        record->inside.store(0, std::memory_order_release);
        syscall(SYS_futex, &closed, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
        record->inside.store(1, std::memory_order_seq_cst);
    }
    errno = error;
}

uint32_t enter() {
    return go_in(own_record ? own_record : make_record());
}

void leave(uint32_t before) {
    own_record->inside.store(before, std::memory_order_release);
}

void begin_exit() {
    enter();
    in_exit = true;
}

bool exiting() {
    return in_exit;
}

bool close(uint32_t timeout_ms) {
    // Registered each time: the registration need not survive a restore, and asking twice costs
    // nothing.
    if (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0)
        return false;
    closed.store(1, std::memory_order_seq_cst);
    membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    uint64_t deadline = now_ns() + uint64_t{timeout_ms} * 1000000u;
    while (any_inside()) {
        if (in_exit || now_ns() > deadline) {
            open();
            return false;
        }
        timespec pause = {0, 50000};
        nanosleep(&pause, nullptr);
    }
    return true;
}

void open() {
    closed.store(0, std::memory_order_seq_cst);
    syscall(SYS_futex, &closed, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void exempt() {
    static ThreadRecord ours; // not among the records; several threads may share it
    ours.inside.fetch_add(1);
    own_record = &ours;
}

uint32_t thread_count() {
    uint32_t count = 0;
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        count += r->used.load(std::memory_order_relaxed);
    return count;
}

void reset_after_fork() {
    closed.store(0);
    for (ThreadRecord* r = records.load(); r; r = r->next) {
        if (r == own_record)
            continue;
        r->inside.store(0);
        r->used.store(0);
    }
}

} // namespace flowgpu::gate
