// The functions of NCCL that are counted, for those who are linked with libnccl and those who look
// them up. Signatures and results as in NCCL's documentation (2.28); the real ones are called.
//
// libnccl calls some of its own exports through its PLT, in the midst of a call of the program's,
// and on threads of its own: those calls go straight on.
#include <atomic>
#include <cstring>

#include <dlfcn.h>
#include <unistd.h>

#include "communicators.h"
#include "graphs.h"
#include "next_definition.h"

#define FGN_EXPORT extern "C" __attribute__((visibility("default")))

namespace flowgpu::nccl {

namespace {

enum Result : int { kSuccess = 0, kSystemError = 2, kInProgress = 7 };
struct UniqueId {
    char bytes[128];
};
using Real = std::atomic<void*>;

constexpr uint32_t kComing = 64;
struct Group {
    uint32_t depth;
    uint32_t comings;
    uint32_t endings;
    Coming coming[kComing];
    void* ending[kComing];
    Unit unit;
};

// A call of NCCL's may be made of others: the depth tells the outermost one.
__thread unsigned depth __attribute__((tls_model("initial-exec")));
__thread uint32_t group_depth __attribute__((tls_model("initial-exec")));
// What a thread has in its group: given by the system when a thread first needs it.
thread_local Group group_of_thread;

std::atomic<const uint32_t*> captures{nullptr};

bool good(Result result) {
    return result == kSuccess || result == kInProgress;
}

template <class F> F real_of(Real& real, const char* name, F ours) {
    void* function = real.load(std::memory_order_relaxed);
    if (!function) {
        function = next_definition(name, reinterpret_cast<void*>(ours));
        real.store(function, std::memory_order_relaxed);
    }
    return reinterpret_cast<F>(function);
}

// The graph that a stream is captured into; null: it is not.
const void* captured_into(void* stream) {
    using Info = int (*)(void*, int*, uint64_t*, void**, const void**, size_t*);
    const uint32_t* under_way = captures.load(std::memory_order_relaxed);
    if (!under_way || !__atomic_load_n(under_way, __ATOMIC_RELAXED))
        return nullptr;
    static const auto info =
        reinterpret_cast<Info>(dlsym(RTLD_DEFAULT, "cuStreamGetCaptureInfo_v2"));
    int status = 0;
    uint64_t id = 0;
    void* graph = nullptr;
    constexpr int kActive = 1;
    if (!info || info(stream, &status, &id, &graph, nullptr, nullptr) != 0 || status != kActive)
        return nullptr;
    return graph;
}

// The row of a communicator's collectives. One that is made in the same group has one already; of
// another that is not known nothing is counted, and the page says so.
uint32_t row_of(void* comm) {
    const uint32_t known = collectives_of(comm);
    if (known != kNoRow)
        return known;
    const Group& group = group_of_thread;
    for (uint32_t i = 0; comm && group_depth && i < group.comings; i++)
        if (*group.coming[i].handle == comm)
            return group.coming[i].row;
    header().overflow = 1;
    return kNoRow;
}

uint32_t messages(void* comm, bool sends, int peer) {
    const uint32_t collectives = row_of(comm);
    return collectives == kNoRow ? kNoRow : messages_of(collectives, sends, peer);
}

// An operation that is captured is issued by each launch of the graph.
template <class F> Result captured(const void* graph, uint32_t row, F issue) {
    const Result result = issue();
    if (good(result) && row != kNoRow)
        capture(graph, row);
    return result;
}

// Calls `issue` as a unit.
template <class F> Result issued(const Unit& unit, F issue) {
    enter(unit);
    const Result result = issue();
    leave(unit, !good(result), result == kInProgress);
    return result;
}

// An operation that takes one number of a channel: alone, or with its group.
template <class F> Result operation(uint32_t row, F issue) {
    if (depth)
        return issue();
    if (group_depth) {
        group_of_thread.unit.add(row);
        return issue();
    }
    Unit unit;
    unit.add(row);
    return row == kNoRow ? issue() : issued(unit, issue);
}

// After the call that made it: the handle is known, or there is none.
void arrived(const Coming& one, Result result) {
    if (one.row == kNoRow)
        return;
    if (!good(result) || !*one.handle) {
        free_row(one.row);
        __atomic_fetch_sub(&header().living, 1, __ATOMIC_SEQ_CST);
        return;
    }
    bind(*one.handle, one.row);
    settle(*one.handle, result == kSuccess);
}

Coming coming(uint64_t key, int ranks, int rank, void** handle) {
    Coming one;
    one.row = make_row(key, static_cast<uint32_t>(ranks), static_cast<uint32_t>(rank),
                       FLOWGPU_NCCL_NO_RANK, FLOWGPU_NCCL_NO_RANK);
    one.handle = handle;
    if (one.row != kNoRow)
        __atomic_fetch_add(&header().living, 1, __ATOMIC_SEQ_CST);
    return one;
}

// The first operation of a communicator is to make it.
template <class F> Result making(uint64_t key, int ranks, int rank, void** handle, F issue) {
    if (depth || !handle)
        return issue();
    const Coming one = coming(key, ranks, rank, handle);
    if (!group_depth) {
        Unit unit;
        unit.add(one.row);
        const Result result = issued(unit, issue);
        arrived(one, result);
        return result;
    }
    Group& group = group_of_thread;
    if (group.comings == kComing) {
        header().overflow = 1;
        return issue();
    }
    *handle = nullptr;
    group.coming[group.comings++] = one;
    group.unit.add(one.row);
    return issue();
}

template <class F> Result ending(void* comm, F issue) {
    const uint32_t row = collectives_of(comm);
    if (depth || row == kNoRow)
        return issue();
    Group& group = group_of_thread;
    if (group_depth && group.endings < kComing)
        group.ending[group.endings++] = comm;
    const bool at_once = !group_depth;
    const Result result = operation(row, issue);
    if (at_once && good(result))
        forget(comm);
    return result;
}

template <class F> Result end_group(F issue) {
    Group& group = group_of_thread;
    if (!depth && group_depth && --group_depth == 0) {
        const Unit& unit = group.unit;
        const bool empty = unit.used == 0 && group.comings == 0;
        const Result result = empty ? issue() : issued(unit, issue);
        for (uint32_t i = 0; i < group.comings; i++)
            arrived(group.coming[i], result);
        for (uint32_t i = 0; i < group.endings; i++)
            if (good(result))
                forget(group.ending[i]);
        group.comings = group.endings = group.unit.used = 0;
        return result;
    }
    return issue();
}

uint64_t key_of(const UniqueId* ids, int count) {
    return mix(0xcbf29ce484222325ull, ids, sizeof *ids * static_cast<size_t>(count));
}

} // namespace

} // namespace flowgpu::nccl

using flowgpu::nccl::Result;
using flowgpu::nccl::UniqueId;

// Both names of a function of NCCL's. `body` uses `issue`, which calls the real one.
#define FGN_FUNCTION(name, parameters, arguments, body)                                            \
    FGN_ONE(nccl##name, parameters, arguments, body)                                               \
    FGN_ONE(pnccl##name, parameters, arguments, body)
#define FGN_ONE(name, parameters, arguments, body)                                                 \
    static flowgpu::nccl::Real real_##name{nullptr};                                               \
    FGN_EXPORT Result name parameters {                                                            \
        using namespace flowgpu::nccl;                                                             \
        const auto issue = [&] {                                                                   \
            const auto real = real_of(real_##name, #name, &::name);                                \
            depth++;                                                                               \
            const Result result = real ? real arguments : kSystemError;                            \
            depth--;                                                                               \
            return result;                                                                         \
        };                                                                                         \
        body                                                                                       \
    }
#define FGN_COLLECTIVE(name, parameters, arguments)                                                \
    FGN_FUNCTION(name, parameters, arguments, {                                                    \
        const void* graph = depth ? nullptr : captured_into(stream);                               \
        return depth   ? issue()                                                                   \
               : graph ? captured(graph, row_of(comm), issue)                                      \
                       : operation(row_of(comm), issue);                                           \
    })
#define FGN_MESSAGE(name, parameters, arguments, sends)                                            \
    FGN_FUNCTION(name, parameters, arguments, {                                                    \
        const void* graph = depth ? nullptr : captured_into(stream);                               \
        return depth   ? issue()                                                                   \
               : graph ? captured(graph, messages(comm, sends, peer), issue)                       \
                       : operation(messages(comm, sends, peer), issue);                            \
    })

FGN_COLLECTIVE(AllReduce,
               (const void* from, void* to, size_t count, int type, int op, void* comm,
                void* stream),
               (from, to, count, type, op, comm, stream))
FGN_COLLECTIVE(Reduce,
               (const void* from, void* to, size_t count, int type, int op, int root, void* comm,
                void* stream),
               (from, to, count, type, op, root, comm, stream))
FGN_COLLECTIVE(ReduceScatter,
               (const void* from, void* to, size_t count, int type, int op, void* comm,
                void* stream),
               (from, to, count, type, op, comm, stream))
FGN_COLLECTIVE(Broadcast,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, comm, stream))
FGN_COLLECTIVE(Bcast, (void* buffer, size_t count, int type, int root, void* comm, void* stream),
               (buffer, count, type, root, comm, stream))
FGN_COLLECTIVE(AllGather,
               (const void* from, void* to, size_t count, int type, void* comm, void* stream),
               (from, to, count, type, comm, stream))
FGN_COLLECTIVE(AlltoAll,
               (const void* from, void* to, size_t count, int type, void* comm, void* stream),
               (from, to, count, type, comm, stream))
FGN_COLLECTIVE(Gather,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, comm, stream))
FGN_COLLECTIVE(Scatter,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, comm, stream))
FGN_MESSAGE(Send, (const void* from, size_t count, int type, int peer, void* comm, void* stream),
            (from, count, type, peer, comm, stream), true)
FGN_MESSAGE(Recv, (void* to, size_t count, int type, int peer, void* comm, void* stream),
            (to, count, type, peer, comm, stream), false)

FGN_FUNCTION(CommInitRank, (void** made, int ranks, UniqueId id, int rank), (made, ranks, id, rank),
             { return making(key_of(&id, 1), ranks, rank, made, issue); })
FGN_FUNCTION(CommInitRankConfig, (void** made, int ranks, UniqueId id, int rank, void* config),
             (made, ranks, id, rank, config),
             { return making(key_of(&id, 1), ranks, rank, made, issue); })
FGN_FUNCTION(CommInitRankScalable,
             (void** made, int ranks, int rank, int count, UniqueId* ids, void* config),
             (made, ranks, rank, count, ids, config), {
                 const bool known = ids && count > 0;
                 return known ? making(key_of(ids, count), ranks, rank, made, issue) : issue();
             })

namespace flowgpu::nccl {

namespace {

// All ranks are here, so nobody else knows the key.
uint64_t own_key() {
    static std::atomic<uint64_t> serial{0};
    const uint64_t words[] = {static_cast<uint64_t>(getpid()), serial.fetch_add(1),
                              reinterpret_cast<uint64_t>(&serial)};
    return mix(0x9ae16a3b2f90404full, words, sizeof words);
}

template <class F> Result make_all(void** made, int devices, F issue) {
    if (depth || !made || devices < 1)
        return issue();
    const uint64_t key = own_key();
    const Result result = issued(Unit(), issue);
    for (int i = 0; good(result) && i < devices; i++)
        arrived(coming(key, devices, i, &made[i]), result);
    return result;
}

// A child's key comes from its parent's and from the number of the operation that made it, which
// is the same on all ranks.
template <class F>
Result make_child(void* parent, uint64_t what, void** made, bool counted, F issue) {
    const uint32_t from = depth ? kNoRow : row_of(parent);
    if (!made || from == kNoRow)
        return issue();
    if (group_depth) { // its ranks are not known before the group's end
        header().overflow = 1;
        return issue();
    }
    Unit unit;
    if (counted)
        unit.add(from);
    const uint64_t words[] = {row(from).communicator, counted ? row(from).entered : 0, what};
    *made = nullptr;
    const Result result = issued(unit, issue);
    if (!good(result) || !*made)
        return result;
    using Ask = Result (*)(void*, int*);
    const auto count = reinterpret_cast<Ask>(next_definition("ncclCommCount", nullptr));
    const auto rank = reinterpret_cast<Ask>(next_definition("ncclCommUserRank", nullptr));
    int ranks = 0, own = 0;
    depth++;
    const bool known =
        count && rank && count(*made, &ranks) == kSuccess && rank(*made, &own) == kSuccess;
    depth--;
    if (known)
        arrived(coming(mix(0xcbf29ce484222325ull, words, sizeof words), ranks, own, made), result);
    else
        header().overflow = 1;
    return result;
}

} // namespace

} // namespace flowgpu::nccl

FGN_FUNCTION(CommInitAll, (void** made, int devices, const int* list), (made, devices, list),
             { return make_all(made, devices, issue); })
FGN_FUNCTION(CommSplit, (void* comm, int color, int key, void** made, void* config),
             (comm, color, key, made, config),
             { return make_child(comm, static_cast<uint64_t>(color), made, true, issue); })
// Those that are left out do not call it.
FGN_FUNCTION(CommShrink,
             (void* comm, int* left_out, int count, void** made, void* config, int flags),
             (comm, left_out, count, made, config, flags), {
                 const uint64_t which =
                     left_out && count > 0
                         ? mix(7, left_out, sizeof *left_out * static_cast<size_t>(count))
                         : 7;
                 return make_child(comm, which, made, false, issue);
             })
FGN_FUNCTION(CommFinalize, (void* comm), (comm),
             { return operation(depth ? kNoRow : row_of(comm), issue); })
FGN_FUNCTION(CommDestroy, (void* comm), (comm), { return ending(comm, issue); })
FGN_FUNCTION(CommAbort, (void* comm), (comm), {
    if (depth || collectives_of(comm) == kNoRow)
        return issue();
    const Result result = issued(Unit(), issue);
    if (good(result))
        forget(comm);
    return result;
})
FGN_FUNCTION(CommGetAsyncError, (void* comm, Result* state), (comm, state), {
    const Result result = issue();
    if (!depth && result == kSuccess && state && *state != kInProgress)
        settle(comm, *state == kSuccess);
    return result;
})
FGN_FUNCTION(GroupStart, (), (), {
    const Result result = issue();
    if (!depth && result == kSuccess)
        group_depth++;
    return result;
})
FGN_FUNCTION(GroupEnd, (), (), { return end_group(issue); })
FGN_FUNCTION(GroupSimulateEnd, (void* info), (info), {
    if (!depth) {
        group_depth = 0;
        group_of_thread.comings = group_of_thread.endings = group_of_thread.unit.used = 0;
    }
    return issue();
})

// A process may have two copies of NCCL: only the one that was used first is seen.
FGN_EXPORT void* flowgpu_nccl_instead(void* found, const char* name) {
#define FGN_ENTRY(name)                                                                            \
    {                                                                                              \
        #name, reinterpret_cast<void*>(&::name), &real_##name                                      \
    }
    static const struct {
        const char* name;
        void* ours;
        flowgpu::nccl::Real* real;
    } kOurs[] = {
        FGN_ENTRY(ncclAllReduce),
        FGN_ENTRY(ncclReduce),
        FGN_ENTRY(ncclReduceScatter),
        FGN_ENTRY(ncclBroadcast),
        FGN_ENTRY(ncclBcast),
        FGN_ENTRY(ncclAllGather),
        FGN_ENTRY(ncclAlltoAll),
        FGN_ENTRY(ncclGather),
        FGN_ENTRY(ncclScatter),
        FGN_ENTRY(ncclSend),
        FGN_ENTRY(ncclRecv),
        FGN_ENTRY(ncclCommInitRank),
        FGN_ENTRY(ncclCommInitRankConfig),
        FGN_ENTRY(ncclCommInitRankScalable),
        FGN_ENTRY(ncclCommInitAll),
        FGN_ENTRY(ncclCommSplit),
        FGN_ENTRY(ncclCommShrink),
        FGN_ENTRY(ncclCommFinalize),
        FGN_ENTRY(ncclCommDestroy),
        FGN_ENTRY(ncclCommAbort),
        FGN_ENTRY(ncclCommGetAsyncError),
        FGN_ENTRY(ncclGroupStart),
        FGN_ENTRY(ncclGroupEnd),
        FGN_ENTRY(ncclGroupSimulateEnd),
    };
    for (const auto& one : kOurs) {
        if (strcmp(name, one.name) != 0 || found == one.ours)
            continue;
        void* before = nullptr;
        if (one.real->compare_exchange_strong(before, found) || before == found)
            return one.ours;
    }
    return found;
}

FGN_EXPORT int flowgpu_nccl_fd() {
    return flowgpu::nccl::share();
}

FGN_EXPORT uint32_t flowgpu_nccl_communicators() {
    return __atomic_load_n(&flowgpu::nccl::header().living, __ATOMIC_SEQ_CST);
}

FGN_EXPORT const uint32_t* flowgpu_nccl_any_graph() {
    return &flowgpu::nccl::header().captured;
}

FGN_EXPORT void flowgpu_nccl_graph(int what, const void* graph, const void* other) {
    using namespace flowgpu::nccl;
    if (what == 0)
        become(graph, other);
    else if (what == 1)
        take(graph, other);
    else
        end(graph);
}

FGN_EXPORT int flowgpu_nccl_begin_launch(const void* executable, void* stream) {
    using namespace flowgpu::nccl;
    Unit unit;
    if (!launch_of(executable, &unit))
        return 0;
    if (const void* graph = captured_into(stream)) { // it becomes a part of that
        take(graph, executable);
        return 0;
    }
    enter(unit);
    return 1;
}

FGN_EXPORT void flowgpu_nccl_end_launch(const void* executable, int well) {
    using namespace flowgpu::nccl;
    Unit unit;
    launch_of(executable, &unit);
    leave(unit, !well, false);
}

FGN_EXPORT void flowgpu_nccl_captures(const uint32_t* under_way) {
    flowgpu::nccl::captures = under_way;
}

namespace flowgpu {

// Ours is behind the memory stub's.
Dlsym next_dlsym() {
    static const auto next = [] {
        void* found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        return reinterpret_cast<Dlsym>(found ? found : dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
    }();
    return next;
}

} // namespace flowgpu
