// How the program's operations are issued: each alone or with its group, as a unit that is counted,
// and after the waits of the page. What is captured is counted at each launch of its graph.
#ifndef FLOWGPU_NCCL_ISSUING_H
#define FLOWGPU_NCCL_ISSUING_H

#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "calls.h"
#include "graphs.h"
#include "renewal.h"
#include "uses.h"

namespace flowgpu::nccl {

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
extern __thread unsigned depth __attribute__((tls_model("initial-exec")));
extern __thread uint32_t group_depth __attribute__((tls_model("initial-exec")));
// What the calling thread has in its group.
Group& group_of_thread();

// How many streams are being captured, for whoever knows; null: nobody does.
void note_captures(const uint32_t* under_way);
// The graph that a stream is captured into; null: it is not.
const void* captured_into(void* stream);
// One that is made in the same group, and has no handle of the program's yet.
const Coming* coming_as(void* comm);
// Issues now what was kept back of a group.
Result issue_kept(Group& group);
void clear(Group& group);
// A communicator that is being made by the program.
Coming coming(uint64_t key, int ranks, int rank, void** handle);
// After the call that made it: the handle is known, or there is none.
void arrived(const Coming& one, Result result);

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

template <class F>
Result keep_back(const void* graph, uint32_t row, F issue, const Collective& what = {}) {
    static_assert(sizeof(F) <= sizeof(Kept::closure) && std::is_trivially_copyable_v<F>);
    Group& group = group_of_thread();
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
            group_of_thread().unit.add(row);
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
    Group& group = group_of_thread();
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
    Group& group = group_of_thread();
    if (group_depth && group.endings < kComing)
        group.ending[group.endings++] = known;
    const bool at_once = !group_depth;
    const Result result = operation(known->row, issue);
    if (at_once && good(result))
        forget(known);
    return result;
}

template <class F> Result end_group(F issue) {
    Group& group = group_of_thread();
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

} // namespace flowgpu::nccl

#endif
