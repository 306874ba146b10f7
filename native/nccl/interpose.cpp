// The functions of NCCL that are counted, for those who are linked with libnccl and those who look
// them up. Signatures and results as in NCCL's documentation (2.28); the real ones are called.
//
// libnccl calls some of its own exports through its PLT, in the midst of a call of the program's,
// and on threads of its own: those calls go straight on.
//
// The program's handle of a communicator may be a name (communicators.h), so each function that
// takes one translates it, after it has waited for communicators that are ended.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <type_traits>

#include <dlfcn.h>
#include <unistd.h>

#include "communicators.h"
#include "graphs.h"
#include "next_definition.h"
#include "renewal.h"
#include "uses.h"

#define FGN_EXPORT extern "C" __attribute__((visibility("default")))

namespace flowgpu::nccl {

namespace {

using Real = std::atomic<void*>;

constexpr uint32_t kComing = 64;

// An operation in a group is kept back until the group's end. NCCL enters it into the communicator
// at once, and a thread that waits at the end would have one in use that is to be ended.
struct Kept {
    Result (*issue)(const void* closure);
    const void* graph; // that it is captured into
    uint32_t row;
    Collective what; // of no elements: something else
    alignas(8) unsigned char closure[96];
};

struct Group {
    uint32_t depth;
    uint32_t comings;
    uint32_t endings;
    uint32_t kept;
    uint32_t room; // for those
    Coming coming[kComing];
    Communicator* ending[kComing];
    Kept* operations;
    Unit unit;
};

// A call of NCCL's may be made of others: the depth tells the outermost one.
__thread unsigned depth __attribute__((tls_model("initial-exec")));
__thread uint32_t group_depth __attribute__((tls_model("initial-exec")));
// What a thread has in its group: given by the system when a thread first needs it.
thread_local Group group_of_thread;

std::atomic<const uint32_t*> captures{nullptr};

template <class F> F real_of(Real& real, const char* name, F ours) {
    void* function = real.load(std::memory_order_relaxed);
    if (!function) {
        function = next_definition(name, reinterpret_cast<void*>(ours));
        real.store(function, std::memory_order_relaxed);
        seen(function);
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

// One that is made in the same group, and has no handle of the program's yet.
const Coming* coming_as(void* comm) {
    const Group& group = group_of_thread;
    for (uint32_t i = 0; comm && group_depth && i < group.comings; i++)
        if (*group.coming[i].handle == comm)
            return &group.coming[i];
    return nullptr;
}

// The row of a communicator's collectives. Without one nothing of it is counted, and the page says
// so.
uint32_t row_of(void* comm) {
    const Coming* coming = coming_as(comm);
    const Communicator* known = coming ? coming->place : find(comm);
    if (known)
        return known->row;
    header().overflow = 1;
    return kNoRow;
}

uint32_t messages(void* comm, bool sends, int peer) {
    const uint32_t collectives = row_of(comm);
    return collectives == kNoRow ? kNoRow : messages_of(collectives, sends, peer);
}

// NCCL's handle for the program's. In a call that NCCL makes itself (`depth` counts this one too)
// it is that already.
void* current(void* comm) {
    if (!any_names() || depth > 1 || coming_as(comm))
        return comm;
    const Communicator* known = find(comm);
    return known ? known->real.load() : comm;
}

int current(int operation, void* comm) {
    if (operation <= kLastOperation || !any_names() || depth > 1)
        return operation;
    const Attached* known = find_attached(find(comm), true, static_cast<uint64_t>(operation));
    return known ? static_cast<int>(known->real) : operation;
}

void* current_registration(void* handle, void* comm) {
    if (!any_names() || depth > 1)
        return handle;
    const Attached* known = find_attached(find(comm), false, reinterpret_cast<uint64_t>(handle));
    return known ? reinterpret_cast<void*>(known->real) : handle;
}

// Calls `issue` as a unit.
template <class F> Result issued(const Unit& unit, F issue) {
    enter(unit);
    const Result result = issue();
    leave(unit, !good(result), result == kInProgress);
    return result;
}

// An operation that is captured is issued by each launch of the graph.
template <class F> Result captured(const void* graph, uint32_t row, F issue) {
    const Result result = issue();
    if (good(result) && row != kNoRow)
        capture(graph, row);
    return result;
}

// NCCL puts like collectives of a group together, and chooses a way by the size of all.
void note_together(Group& group) {
    for (uint32_t i = 0; i < group.kept; i++) {
        Collective all = group.operations[i].what;
        for (uint32_t k = i + 1; all.count && k < group.kept; k++) {
            Kept& other = group.operations[k];
            if (other.row != group.operations[i].row || !other.what.is_like(all))
                continue;
            all.count += other.what.count;
            other.what.count = 0;
        }
        note(group.operations[i].row, all);
    }
}

// Issues now what was kept back of a group.
Result issue_kept(Group& group) {
    Result first = kSuccess;
    for (uint32_t i = 0; i < group.kept; i++) {
        const Kept& one = group.operations[i];
        const auto issue = [&one] { return one.issue(one.closure); };
        const Result result = one.graph ? captured(one.graph, one.row, issue) : issue();
        if (!good(result) && good(first))
            first = result;
    }
    if (good(first))
        note_together(group);
    return first;
}

void clear(Group& group) {
    free(group.operations);
    group.operations = nullptr;
    group.comings = group.endings = group.kept = group.room = group.unit.used = 0;
}

template <class F>
Result keep_back(const void* graph, uint32_t row, F issue, const Collective& what = {}) {
    static_assert(sizeof(F) <= sizeof(Kept::closure) && std::is_trivially_copyable_v<F>);
    Group& group = group_of_thread;
    if (group.kept == group.room) {
        const uint32_t room = group.room ? 2 * group.room : 16;
        void* more = realloc(group.operations, room * sizeof(Kept));
        if (!more)
            return kSystemError;
        group.operations = static_cast<Kept*>(more);
        group.room = room;
    }
    Kept& one = group.operations[group.kept++];
    one.issue = [](const void* closure) { return (*static_cast<const F*>(closure))(); };
    one.graph = graph;
    one.row = row;
    one.what = what;
    memcpy(one.closure, &issue, sizeof issue);
    return kSuccess;
}

// An operation that takes one number of a channel: alone, or with its group.
template <class F>
Result operation(uint32_t row, F issue, const void* graph = nullptr, const Collective& what = {}) {
    if (depth)
        return issue();
    if (group_depth) {
        if (!graph)
            group_of_thread.unit.add(row);
        return keep_back(graph, row, issue, what);
    }
    Unit unit;
    if (!graph)
        unit.add(row);
    return issued(unit, [&] { return graph ? captured(graph, row, issue) : issue(); });
}

// A collective, which is noted once NCCL has it.
template <class F>
Result collective(uint32_t row, const Collective& what, F issue, const void* graph) {
    const auto noted = [=] {
        const Result result = issue();
        if (good(result))
            note(row, what);
        return result;
    };
    return operation(row, noted, graph, what);
}

// After the call that made it: the handle is known, or there is none.
void arrived(const Coming& one, Result result) {
    if (!one.place)
        return;
    if (!good(result) || !*one.handle)
        return forget(one.place);
    if (result == kSuccess && !one.place->how.context)
        note_device(*one.place, *one.handle);
    *one.handle = bind(one.place, *one.handle);
    settle(one.place, result == kSuccess);
}

Coming coming(uint64_t key, int ranks, int rank, void** handle) {
    Coming one;
    one.place = reserve(make_row(key, static_cast<uint32_t>(ranks), static_cast<uint32_t>(rank),
                                 FLOWGPU_NCCL_NO_RANK, FLOWGPU_NCCL_NO_RANK));
    one.handle = handle;
    return one;
}

// The first operation of a communicator is to make it.
template <class F>
Result making(uint64_t key, int ranks, int rank, void** handle, const void* config, F issue) {
    if (depth || !handle)
        return issue();
    const Coming one = coming(key, ranks, rank, handle);
    if (one.place) {
        one.place->how.context = current_context();
        if (config)
            one.place->how.configure(config);
        if (getenv("NCCL_COMM_ID"))
            ids_are_fixed();
    }
    if (!group_depth) {
        Unit unit;
        unit.add(one.place ? one.place->row : kNoRow);
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
    if (one.place) {
        group.coming[group.comings++] = one;
        group.unit.add(one.place->row);
    }
    return issue();
}

template <class F> Result ending(void* comm, F issue) {
    Communicator* known = depth ? nullptr : find(comm);
    if (!known)
        return issue();
    Group& group = group_of_thread;
    if (group_depth && group.endings < kComing)
        group.ending[group.endings++] = known;
    const bool at_once = !group_depth;
    const Result result = operation(known->row, issue);
    if (at_once && good(result))
        forget(known);
    return result;
}

template <class F> Result end_group(F issue) {
    Group& group = group_of_thread;
    if (!depth && group_depth && --group_depth == 0) {
        const bool empty = group.unit.used == 0 && group.comings == 0 && group.kept == 0;
        const auto whole = [&] {
            group_depth = 1; // for what was made in it (coming_as)
            const Result first = issue_kept(group);
            group_depth = 0;
            const Result result = issue();
            return good(first) ? result : first;
        };
        const Result result = empty ? issue() : issued(group.unit, whole);
        for (uint32_t i = 0; i < group.comings; i++)
            arrived(group.coming[i], result);
        for (uint32_t i = 0; i < group.endings; i++)
            if (good(result))
                forget(group.ending[i]);
        clear(group);
        return result;
    }
    return issue();
}

// A call of NCCL's own: what it is given are no names.
template <class F> Result issue_as_is(F issue) {
    depth++;
    const Result result = issue();
    depth--;
    return result;
}

// A call that is no operation: it waits only while communicators are held or ended.
template <class F> Result asked(F issue) {
    if (depth)
        return issue();
    begin_call();
    const Result result = issue();
    end_call();
    return result;
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
        const auto issue = [=] {                                                                   \
            const auto real = real_of(real_##name, #name, &::name);                                \
            depth++;                                                                               \
            const Result result = real ? real arguments : kSystemError;                            \
            depth--;                                                                               \
            return result;                                                                         \
        };                                                                                         \
        body                                                                                       \
    }
#define FGN_COLLECTIVE(name, with, parameters, arguments)                                          \
    FGN_FUNCTION(name, parameters, arguments, {                                                    \
        return depth ? issue()                                                                     \
                     : collective(row_of(comm), {k##name, type, with, count}, issue,               \
                                  captured_into(stream));                                          \
    })
#define FGN_MESSAGE(name, parameters, arguments, sends)                                            \
    FGN_FUNCTION(name, parameters, arguments, {                                                    \
        return depth ? issue()                                                                     \
                     : operation(messages(comm, sends, peer), issue, captured_into(stream));       \
    })

FGN_COLLECTIVE(AllReduce, op,
               (const void* from, void* to, size_t count, int type, int op, void* comm,
                void* stream),
               (from, to, count, type, current(op, comm), current(comm), stream))
FGN_COLLECTIVE(Reduce, op,
               (const void* from, void* to, size_t count, int type, int op, int root, void* comm,
                void* stream),
               (from, to, count, type, current(op, comm), root, current(comm), stream))
FGN_COLLECTIVE(ReduceScatter, op,
               (const void* from, void* to, size_t count, int type, int op, void* comm,
                void* stream),
               (from, to, count, type, current(op, comm), current(comm), stream))
FGN_COLLECTIVE(Broadcast, 0,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, current(comm), stream))
FGN_COLLECTIVE(Bcast, 0, (void* buffer, size_t count, int type, int root, void* comm, void* stream),
               (buffer, count, type, root, current(comm), stream))
FGN_COLLECTIVE(AllGather, 0,
               (const void* from, void* to, size_t count, int type, void* comm, void* stream),
               (from, to, count, type, current(comm), stream))
FGN_COLLECTIVE(AlltoAll, 0,
               (const void* from, void* to, size_t count, int type, void* comm, void* stream),
               (from, to, count, type, current(comm), stream))
FGN_COLLECTIVE(Gather, root,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, current(comm), stream))
FGN_COLLECTIVE(Scatter, root,
               (const void* from, void* to, size_t count, int type, int root, void* comm,
                void* stream),
               (from, to, count, type, root, current(comm), stream))
FGN_MESSAGE(Send, (const void* from, size_t count, int type, int peer, void* comm, void* stream),
            (from, count, type, peer, current(comm), stream), true)
FGN_MESSAGE(Recv, (void* to, size_t count, int type, int peer, void* comm, void* stream),
            (to, count, type, peer, current(comm), stream), false)

FGN_FUNCTION(CommInitRank, (void** made, int ranks, UniqueId id, int rank), (made, ranks, id, rank),
             { return making(key_of(&id, 1), ranks, rank, made, nullptr, issue); })
FGN_FUNCTION(CommInitRankConfig, (void** made, int ranks, UniqueId id, int rank, void* config),
             (made, ranks, id, rank, config),
             { return making(key_of(&id, 1), ranks, rank, made, config, issue); })
FGN_FUNCTION(CommInitRankScalable,
             (void** made, int ranks, int rank, int count, UniqueId* ids, void* config),
             (made, ranks, rank, count, ids, config), {
                 const bool known = ids && count > 0;
                 return known ? making(key_of(ids, count), ranks, rank, made, config, issue)
                              : issue();
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
Result make_child(void* parent, uint64_t what, void** made, const void* config, bool counted,
                  F issue) {
    Communicator* from = depth ? nullptr : find(parent);
    if (!depth && !from)
        header().overflow = 1;
    if (!made || !from)
        return issue();
    if (group_depth) { // its ranks are not known before the group's end
        header().overflow = 1;
        return issue();
    }
    Unit unit;
    if (counted)
        unit.add(from->row);
    const uint64_t words[] = {row(from->row).communicator, counted ? row(from->row).entered : 0,
                              what};
    const How how = from->how;
    *made = nullptr;
    const Result result = issued(unit, issue);
    if (!good(result) || !*made)
        return result;
    int ranks = 0, own = 0;
    depth++;
    const bool known = ask_ranks(*made, &ranks, &own);
    depth--;
    if (!known) {
        header().overflow = 1;
        return result;
    }
    const Coming one = coming(mix(0xcbf29ce484222325ull, words, sizeof words), ranks, own, made);
    if (one.place) {
        one.place->how = how;
        if (config)
            one.place->how.configure(config);
    }
    arrived(one, result);
    return result;
}

// A call of NCCL's, perhaps by a thread of its own, for which `depth` does not speak.
bool by_nccl(const void* caller) {
    return depth || is_of_nccl(caller);
}

template <class F>
Result create_reduction(int* operation, void* scalar, int type, int residence, void* comm,
                        F issue) {
    const Result result = asked(issue);
    Communicator* known = depth ? nullptr : find(comm);
    if (result != kSuccess || !known)
        return result;
    Attached made{};
    made.of = known;
    made.reduces = true;
    made.real = static_cast<uint64_t>(*operation);
    made.data = scalar;
    made.type = type;
    made.residence = residence;
    constexpr int kOnHost = 1;
    constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (residence == kOnHost && type >= 0 && static_cast<size_t>(type) < std::size(kBytes))
        memcpy(&made.bytes, scalar, kBytes[type]);
    *operation = static_cast<int>(attach(made));
    return result;
}

// One of the group's operations may use it.
template <class F> Result destroy_reduction(int operation, void* comm, F issue) {
    if (depth)
        return issue();
    Attached* known = find_attached(find(comm), true, static_cast<uint64_t>(operation));
    const auto whole = [=] {
        const Result result = issue();
        if (result == kSuccess && known)
            detach(known);
        return result;
    };
    return group_depth ? keep_back(nullptr, kNoRow, whole) : asked(whole);
}

template <class F>
Result register_buffer(void* comm, void* buffer, size_t bytes, void** handle, const void* caller,
                       F issue) {
    if (by_nccl(caller))
        return issue_as_is(issue);
    const Result result = asked(issue);
    Communicator* known = find(comm);
    if (result != kSuccess || !known || !handle)
        return result;
    Attached made{};
    made.of = known;
    made.real = reinterpret_cast<uint64_t>(*handle);
    made.data = buffer;
    made.bytes = bytes;
    *handle = reinterpret_cast<void*>(attach(made));
    return result;
}

template <class F> Result deregister_buffer(void* comm, void* handle, const void* caller, F issue) {
    if (by_nccl(caller))
        return issue_as_is(issue);
    Attached* known = find_attached(find(comm), false, reinterpret_cast<uint64_t>(handle));
    const Result result = asked(issue);
    if (result == kSuccess && known)
        detach(known);
    return result;
}

// Windows and device communicators.
template <class F> Result count_window(void* comm, int by, F issue) {
    if (depth)
        return issue();
    const Result result = asked(issue);
    Communicator* known = find(comm);
    if (result != kSuccess || !known)
        return result;
    known->windows += static_cast<uint32_t>(by);
    __atomic_fetch_add(&header().windows, by, __ATOMIC_SEQ_CST);
    return result;
}

} // namespace

} // namespace flowgpu::nccl

FGN_FUNCTION(CommInitAll, (void** made, int devices, const int* list), (made, devices, list),
             { return make_all(made, devices, issue); })
FGN_FUNCTION(CommSplit, (void* comm, int color, int key, void** made, void* config),
             (current(comm), color, key, made, config),
             { return make_child(comm, static_cast<uint64_t>(color), made, config, true, issue); })
// Those that are left out do not call it.
FGN_FUNCTION(CommShrink,
             (void* comm, int* left_out, int count, void** made, void* config, int flags),
             (current(comm), left_out, count, made, config, flags), {
                 const uint64_t which =
                     left_out && count > 0
                         ? mix(7, left_out, sizeof *left_out * static_cast<size_t>(count))
                         : 7;
                 return make_child(comm, which, made, config, false, issue);
             })
FGN_FUNCTION(CommFinalize, (void* comm), (current(comm)),
             { return operation(depth ? kNoRow : row_of(comm), issue); })
FGN_FUNCTION(CommDestroy, (void* comm), (current(comm)), { return ending(comm, issue); })
FGN_FUNCTION(CommAbort, (void* comm), (current(comm)), {
    Communicator* known = depth ? nullptr : find(comm);
    if (!known)
        return issue();
    const Result result = issued(Unit(), issue);
    if (good(result))
        forget(known);
    return result;
})
FGN_FUNCTION(CommRevoke, (void* comm, int flags), (current(comm), flags), { return asked(issue); })
FGN_FUNCTION(CommCount, (void* comm, int* count), (current(comm), count), { return asked(issue); })
FGN_FUNCTION(CommUserRank, (void* comm, int* rank), (current(comm), rank), { return asked(issue); })
FGN_FUNCTION(CommCuDevice, (void* comm, int* device), (current(comm), device),
             { return asked(issue); })
FGN_FUNCTION(CommGetAsyncError, (void* comm, Result* state), (current(comm), state), {
    if (by_nccl(__builtin_return_address(0)))
        return issue_as_is(issue);
    if (state && is_held()) { // there is none, or it would not have been held
        *state = kSuccess;
        return kSuccess;
    }
    Communicator* known = find(comm);
    if (known && state && !known->real) {
        *state = kRemoteError;
        return kSuccess;
    }
    const Result result = asked(issue);
    if (known && result == kSuccess && state && *state != kInProgress)
        settle(known, *state == kSuccess);
    return result;
})
FGN_FUNCTION(RedOpCreatePreMulSum, (int* made, void* scalar, int type, int residence, void* comm),
             (made, scalar, type, residence, current(comm)),
             { return create_reduction(made, scalar, type, residence, comm, issue); })
FGN_FUNCTION(RedOpDestroy, (int op, void* comm), (current(op, comm), current(comm)),
             { return destroy_reduction(op, comm, issue); })
FGN_FUNCTION(CommRegister, (void* comm, void* buffer, size_t bytes, void** handle),
             (current(comm), buffer, bytes, handle), {
                 const void* caller = __builtin_return_address(0);
                 return register_buffer(comm, buffer, bytes, handle, caller, issue);
             })
FGN_FUNCTION(CommDeregister, (void* comm, void* handle),
             (current(comm), current_registration(handle, comm)), {
                 const void* caller = __builtin_return_address(0);
                 return deregister_buffer(comm, handle, caller, issue);
             })
FGN_FUNCTION(CommWindowRegister, (void* comm, void* buffer, size_t bytes, void** window, int flags),
             (current(comm), buffer, bytes, window, flags), {
                 if (by_nccl(__builtin_return_address(0)))
                     return issue_as_is(issue);
                 const Result result = count_window(comm, 1, issue);
                 if (result == kSuccess && window && !*window)
                     count_window(comm, -1, [] { return kSuccess; });
                 return result;
             })
FGN_FUNCTION(CommWindowDeregister, (void* comm, void* window), (current(comm), window), {
    if (by_nccl(__builtin_return_address(0)))
        return issue_as_is(issue);
    return window ? count_window(comm, -1, issue) : asked(issue);
})
FGN_FUNCTION(DevCommCreate, (void* comm, const void* needs, void* made),
             (current(comm), needs, made), { return count_window(comm, 1, issue); })
FGN_FUNCTION(DevCommDestroy, (void* comm, const void* device), (current(comm), device), {
    if (by_nccl(__builtin_return_address(0)))
        return issue_as_is(issue);
    return count_window(comm, -1, issue);
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
        issue_kept(group_of_thread);
        group_depth = 0;
        clear(group_of_thread);
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
        FGN_ENTRY(ncclCommRevoke),
        FGN_ENTRY(ncclCommCount),
        FGN_ENTRY(ncclCommUserRank),
        FGN_ENTRY(ncclCommCuDevice),
        FGN_ENTRY(ncclCommGetAsyncError),
        FGN_ENTRY(ncclRedOpCreatePreMulSum),
        FGN_ENTRY(ncclRedOpDestroy),
        FGN_ENTRY(ncclCommRegister),
        FGN_ENTRY(ncclCommDeregister),
        FGN_ENTRY(ncclCommWindowRegister),
        FGN_ENTRY(ncclCommWindowDeregister),
        FGN_ENTRY(ncclDevCommCreate),
        FGN_ENTRY(ncclDevCommDestroy),
        FGN_ENTRY(ncclGroupStart),
        FGN_ENTRY(ncclGroupEnd),
        FGN_ENTRY(ncclGroupSimulateEnd),
    };
    for (const auto& one : kOurs) {
        if (strcmp(name, one.name) != 0 || found == one.ours)
            continue;
        void* before = nullptr;
        if (one.real->compare_exchange_strong(before, found) || before == found) {
            flowgpu::nccl::seen(found);
            return one.ours;
        }
    }
    return found;
}

namespace flowgpu::nccl {

constexpr int kRelaxed = 2; // CU_STREAM_CAPTURE_MODE_RELAXED

AsNccl::AsNccl() : mode_(kRelaxed) {
    depth++;
    drive("cuThreadExchangeStreamCaptureMode", &mode_);
}

AsNccl::~AsNccl() {
    drive("cuThreadExchangeStreamCaptureMode", &mode_);
    depth--;
}

} // namespace flowgpu::nccl

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
