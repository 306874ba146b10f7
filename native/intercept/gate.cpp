#include "gate.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <iterator>
#include <new>
#include <vector>

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace flowgpu::gate {

__thread ThreadRecord* own_record __attribute__((tls_model("initial-exec")));

namespace {

auto& gate_mode = flowgpu_page.gate;
std::atomic<Watcher*> watcher_now{nullptr};
std::atomic<ThreadRecord*> records{nullptr};
// A thread gets a record of this kind when no place in the page is left for it.
struct Record {
    ThreadRecord record;
    std::atomic<uint64_t> granules[kGranules] = {};
    ThreadRecord* whole() {
        record.granules = granules;
        return &record;
    }
};

// Stands in when no record can be allocated: it says "inside" for ever, so no checkpoint is taken
// behind such a thread.
Record overflow;
std::atomic<uint64_t> page_granules[1 << kRecordBits][kGranules] = {};
pthread_key_t exit_key;
pthread_once_t exit_key_made = PTHREAD_ONCE_INIT;
std::atomic<bool> in_exit{false};

void release_record(void* pointer) {
    auto* record = static_cast<ThreadRecord*>(pointer);
    own_record = nullptr;
    record->thread.store(0, std::memory_order_relaxed);
    record->on_device.store(0, std::memory_order_relaxed);
    record->in_context.store(0, std::memory_order_relaxed);
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

// Sets a mode in which calls pass, and wakes the threads that wait.
void set(flowgpu_gate_state mode) {
    gate_mode.store(mode, std::memory_order_seq_cst);
    syscall(SYS_futex, &gate_mode, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool any_inside() {
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        if (r->inside.load(std::memory_order_acquire))
            return true;
    return overflow.record.inside.load(std::memory_order_acquire) != 0;
}

bool in_page(const ThreadRecord* record) {
    return std::begin(flowgpu_page.records) <= record && record < std::end(flowgpu_page.records);
}

bool take(ThreadRecord* record) {
    uint32_t unused = 0;
    return record->used.compare_exchange_strong(unused, 1);
}

void link(ThreadRecord* record) {
    record->next = records.load(std::memory_order_relaxed);
    while (!records.compare_exchange_weak(record->next, record)) {
    }
}

// Where a thread's record may be in the page: at its hash, or beside it, as flowgpu_gate_find
// looks.
constexpr size_t kPlaces = 4;
static_assert((1 << kRecordBits) % kPlaces == 0);
ThreadRecord* place(size_t number) {
    const ptrdiff_t home = record_at(this_thread()) - flowgpu_page.records;
    return &flowgpu_page.records[static_cast<size_t>(home) ^ number];
}

// A record of the page for the calling thread, unless others have all that could be.
ThreadRecord* take_from_page() {
    size_t number = 0;
    while (number < kPlaces && !take(place(number)))
        number++;
    if (number == kPlaces)
        return nullptr;
    ThreadRecord* record = place(number);
    if (!record->granules) {
        record->granules = page_granules[record - flowgpu_page.records];
        link(record);
    }
    record->thread.store(this_thread(), std::memory_order_relaxed);
    return record;
}

ThreadRecord* take_another() {
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        if (!in_page(r) && take(r))
            return r;
    auto* made = new (std::nothrow) Record();
    if (!made)
        return nullptr;
    take(made->whole());
    link(&made->record);
    return &made->record;
}

} // namespace

FG_QUIET(flowgpu_gate_find_elsewhere, flowgpu_gate_find_record);
// Given the record at the thread's hash, the one beside it that is the thread's.
asm(R"(
    .pushsection .text
    .hidden flowgpu_gate_find
    .globl flowgpu_gate_find
    .type flowgpu_gate_find, @function
flowgpu_gate_find:
    .cfi_startproc
    pushq %rcx
    .cfi_def_cfa_offset 16
    movq %fs:0, %rcx
    xorq $128, %rax
    cmpq %rcx, 32(%rax)
    je 1f
    xorq $384, %rax
    cmpq %rcx, 32(%rax)
    je 1f
    xorq $128, %rax
    cmpq %rcx, 32(%rax)
    je 1f
    popq %rcx
    .cfi_def_cfa_offset 8
    jmp flowgpu_gate_find_elsewhere
1:
    .cfi_def_cfa_offset 16
    popq %rcx
    .cfi_def_cfa_offset 8
    ret
    .cfi_endproc
    .size flowgpu_gate_find, . - flowgpu_gate_find
    .popsection
)");
static_assert(sizeof(ThreadRecord) == 128 && offsetof(ThreadRecord, thread) == 32);
FG_QUIET(flowgpu_gate_park, flowgpu_gate_wait);

namespace {

ThreadRecord* make_record() {
    int error = errno;
    pthread_once(&exit_key_made, [] { pthread_key_create(&exit_key, release_record); });
    ThreadRecord* record = take_from_page();
    if (!record)
        record = take_another();
    if (!record) {
        record = overflow.whole();
        record->inside.store(1); // its threads put back what they found: never 0
    } else {
        pthread_setspecific(exit_key, record);
    }
    own_record = record;
    errno = error;
    return record;
}

} // namespace

// Finds the calling thread's record outside of the page, or makes one. It ignores its argument,
// which FG_QUIET passes (quiet.h).
extern "C" ThreadRecord* flowgpu_gate_find_record(ThreadRecord*) {
    return own_record ? own_record : make_record();
}

// Waits out of the driver until the gate opens. Says whether the gate is watched.
extern "C" uint64_t flowgpu_gate_wait(ThreadRecord* record) {
    int error = errno;
    uint32_t mode = 0;
    while ((mode = gate_mode.load(std::memory_order_seq_cst)) == FLOWGPU_GATE_CLOSED) {
        record->inside.store(0, std::memory_order_release);
        syscall(SYS_futex, &gate_mode, FUTEX_WAIT_PRIVATE, FLOWGPU_GATE_CLOSED, nullptr, nullptr,
                0);
        record->inside.store(1, std::memory_order_seq_cst);
    }
    errno = error;
    return mode == FLOWGPU_GATE_WATCH;
}

void submit(const Call& call) {
    int error = errno;
    watcher_now.load()(call);
    errno = error;
}

uint32_t enter() {
    return go_in(find_record()).before;
}

void leave(uint32_t before) {
    find_record()->inside.store(before, std::memory_order_release);
}

void begin_exit() {
    enter();
    in_exit = true;
    flowgpu_page.contexts.fetch_add(1);
}

bool exiting() {
    return in_exit;
}

bool close(uint32_t timeout_ms) {
    // Registered each time: the registration need not survive a restore, and asking twice costs
    // nothing.
    if (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0)
        return false;
    gate_mode.store(FLOWGPU_GATE_CLOSED, std::memory_order_seq_cst);
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
    set(FLOWGPU_GATE_OPEN);
}

void watch(Watcher* watcher) {
    watcher_now = watcher;
    set(FLOWGPU_GATE_WATCH);
}

bool watch_open(Watcher* watcher, uint32_t timeout_ms) {
    const bool ordered = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
    watch(watcher);
    if (!ordered || membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0)
        return false;
    std::vector<ThreadRecord*> before;
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        before.push_back(r);
    before.push_back(&overflow.record);
    const uint64_t deadline = now_ns() + uint64_t{timeout_ms} * 1000000u;
    for (;;) {
        before.erase(std::remove_if(before.begin(), before.end(),
                                    [](ThreadRecord* r) {
                                        return !r->inside.load(std::memory_order_acquire);
                                    }),
                     before.end());
        if (before.empty() || now_ns() > deadline)
            return before.empty();
        timespec pause = {0, 50000};
        nanosleep(&pause, nullptr);
    }
}

void exempt() {
    static Record ours; // not among the records; several threads may share it
    ours.record.inside.fetch_add(1);
    own_record = ours.whole();
    for (size_t number = 0; number < kPlaces; number++) {
        uint64_t mine = this_thread(); // as of an earlier thread that ended without a word
        place(number)->thread.compare_exchange_strong(mine, 0);
    }
}

uint32_t thread_count() {
    uint32_t count = 0;
    for (ThreadRecord* r = records.load(std::memory_order_acquire); r; r = r->next)
        count += r->used.load(std::memory_order_relaxed);
    return count;
}

void reset_after_fork() {
    gate_mode.store(FLOWGPU_GATE_OPEN);
    flowgpu_page.contexts.fetch_add(1);
    for (ThreadRecord* r = records.load(); r; r = r->next) {
        if (r == own_record)
            continue;
        r->thread.store(0);
        r->inside.store(0);
        r->used.store(0);
    }
}

} // namespace flowgpu::gate
