// The gate: every call that submits work or changes objects passes it, whether the program has our
// wrapper of the function or the replay engine's bridge. It has three modes (flowgpu_gate_state):
//   OPEN    calls pass.
//   WATCH   calls pass; one with an effect (effects.h) is first given to the watcher, before the
//           driver is called.
//   CLOSED  calls wait until the gate is not closed any more.
//
// Fast path: one store to the thread's own record and one load of the gate word; any mode but OPEN
// is off it. The closer pays: it sets the word, runs a membarrier on all threads of the process,
// and then reads every record. A thread that finds the gate closed leaves the driver (its record
// says so) and sleeps on a futex until the gate opens.
#ifndef FLOWGPU_INTERCEPT_GATE_H
#define FLOWGPU_INTERCEPT_GATE_H

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "effects.h"
#include "flowgpu/wire.h"
#include "page.h"
#include "quiet.h"

namespace flowgpu::gate {

extern __thread ThreadRecord* own_record __attribute__((tls_model("initial-exec")));

// In line: the wrappers are so many that the compiler would call it instead.
#define FG_INLINE __attribute__((always_inline)) inline

// A call with an effect, as the program has made it.
struct Call {
    unsigned symbol;
    const uint64_t* arguments;
};

FG_INLINE uint32_t mode() {
    return flowgpu_page.gate.load(std::memory_order_relaxed);
}

FG_INLINE bool is_closed() {
    return mode() == FLOWGPU_GATE_CLOSED;
}

FG_INLINE uint64_t this_thread() {
    return reinterpret_cast<uint64_t>(__builtin_thread_pointer());
}

FG_INLINE ThreadRecord* record_at(uint64_t thread) {
    return &flowgpu_page.records[thread * 0x9e3779b97f4a7c15 >> (64 - kRecordBits)]; // Knuth's hash
}

FG_INLINE ThreadRecord* find_record() {
    ThreadRecord* record = record_at(this_thread());
    if (__builtin_expect(record->thread.load(std::memory_order_relaxed) != this_thread(), 0))
        FG_QUIETLY(flowgpu_gate_find, record);
    return record;
}

struct In {
    uint32_t before; // what `inside` was
    // A call that is made for another one, by a handler of ours or by the driver, is part of that:
    // it neither waits nor is it watched.
    bool watched;
};

FG_INLINE In go_in(ThreadRecord* record) {
    const uint32_t before = record->inside.load(std::memory_order_relaxed);
    record->inside.store(before + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    auto word = reinterpret_cast<uint64_t>(record);
    if (__builtin_expect(mode() == FLOWGPU_GATE_OPEN, 1) || before != 0)
        return {before, false};
    FG_QUIETLY(flowgpu_gate_park, word);
    return {before, word != 0};
}

class Guard {
  public:
    FG_INLINE Guard() : record_(find_record()), in_(go_in(record_)) {}
    FG_INLINE ~Guard() { record_->inside.store(in_.before, std::memory_order_release); }
    FG_INLINE ThreadRecord* record() const { return record_; }
    FG_INLINE bool watched() const { return __builtin_expect(in_.watched, 0); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

  private:
    ThreadRecord* record_;
    In in_;
};

template <class T> uint64_t word_of(T argument) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<uint64_t>(argument);
    else
        return static_cast<uint64_t>(argument);
}

void submit(const Call& call);

// Where a call comes in that is watched: inside a Guard, gives it to the watcher, and makes it
// again by `again`, the wrapper or bridge that it came by. It has the same parameters, so that they
// stay where they are in a function that passes them on.
template <unsigned symbol, auto again, class Result, class... Arguments>
__attribute__((noinline, cold)) Result watched(Arguments... arguments) {
    const uint64_t words[] = {word_of(arguments)...};
    submit({symbol, words});
    return again(arguments...);
}

template <unsigned symbol> FG_INLINE bool is_watched(const Guard& guard) {
    return does(symbol) != Does::nothing && guard.watched();
}

// What a wrapper calls in its Guard, instead of the function behind it, where it is watched.
template <unsigned symbol, auto wrapper, class Result, class... Arguments>
constexpr auto way_by_watcher(Result (*same)(Arguments...)) {
    if constexpr (does(symbol) != Does::nothing)
        return &watched<symbol, wrapper, Result, Arguments...>;
    else
        return same;
}

#undef FG_INLINE

// A Guard's two ends, where they are not in one scope.
uint32_t enter();
void leave(uint32_t before);
// The calling thread is in exit(), on its way to the driver's handlers: it waits for an open gate,
// which cannot be closed any more from then on.
void begin_exit();
bool exiting();
// Closes the gate and waits until no thread is in the driver. False: some thread did not leave
// within timeout_ms, the program is in exit(), or the kernel has no membarrier; the gate is open
// again.
bool close(uint32_t timeout_ms);
void open();
// As open(), but that the gate is in WATCH from then on. `watcher` gets each call whose effect is
// not `nothing`, in the thread that makes it, which may be any and several at once.
using Watcher = void(const Call&);
void watch(Watcher* watcher);
// The same with a gate that is open and stays so: false where a call that began before did not end
// in time.
bool watch_open(Watcher* watcher, uint32_t timeout_ms);
// The calling thread is one of ours, which works behind the closed gate: it never waits there.
void exempt();
// Threads that have called the driver and live.
uint32_t thread_count();
// In the child of a fork: the parent's other threads are gone, and nobody will open the gate.
void reset_after_fork();

} // namespace flowgpu::gate

#endif
