// The counts of a task's NCCL communicators, in a memfd of the task, which the coordinator maps
// too. flowgpu/nccl.py is generated from this file by tools/gen_live.py; keep to the subset of
// wire.h.
//
// A *channel* is what several ranks use in one order: the collectives of a communicator (its making
// and its end among them), or the messages from one rank to another. Its members issue its k-th
// operations together. A *unit* is what a thread issues at once: a call, or the outermost group. It
// takes numbers of channels.
//
//   a thread, at a unit: want := entered + what it takes; state := deciding; fence; read the gate
//     open, or want <= limit for all its channels:
//                        entered := want; state := inside; NCCL is called; state := outside
//     else               state := parked; waits for the wake word to change, and begins again
//   the coordinator:     all limits := 0; gate := closed; fence; reads counts and states, raises
//                        limits and changes the wake word (coordinator/cut.py)
//
// So a thread that the coordinator does not see deciding has seen the gate closed, or its counts
// are there to be seen.
//
// Communicators may be ended behind the cut and made anew later, with the same ranks. The unique id
// of each is then made by its first rank, in the page behind the threads: the one at the place of
// the row of its collectives. The coordinator copies it to the pages of the others.
#ifndef FLOWGPU_NCCL_H
#define FLOWGPU_NCCL_H

#include <stddef.h>
#include <stdint.h>

enum flowgpu_nccl_constant {
    FLOWGPU_NCCL_MAGIC = 0x434e4746, // "FGNC"
    FLOWGPU_NCCL_VERSION = 2,
    FLOWGPU_NCCL_OPEN = 0, // the gate
    FLOWGPU_NCCL_CLOSED = 1,
    FLOWGPU_NCCL_OUTSIDE = 0, // the state of a thread
    FLOWGPU_NCCL_DECIDING = 1,
    FLOWGPU_NCCL_INSIDE = 2,
    FLOWGPU_NCCL_PARKED = 3,
    FLOWGPU_NCCL_FREE = 0,  // the communicators: the program uses them
    FLOWGPU_NCCL_HELD = 1,  // who calls NCCL waits
    FLOWGPU_NCCL_ENDED = 2, // the same, and they are to be made anew
    FLOWGPU_NCCL_NO_RANK = 0xffffffff,
    FLOWGPU_NCCL_ROWS = 4096,
    FLOWGPU_NCCL_THREADS = 128,
    FLOWGPU_NCCL_WANTS = 62,
    FLOWGPU_NCCL_ROWS_AT = 0x1000,
    FLOWGPU_NCCL_THREADS_AT = 0x41000,
    FLOWGPU_NCCL_IDS_AT = 0x61000,
    FLOWGPU_NCCL_ID_BYTES = 128,
    FLOWGPU_NCCL_BYTES = 0xe1000,
};

struct flowgpu_nccl_header {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint32_t gate; // written by the coordinator, and by a task that opens all its gates
    uint32_t wake;
    uint32_t overflow; // not 0: something was not counted, for want of room here
    uint32_t captured; // not 0: operations were captured into graphs, whose launches count as they
    uint32_t living;   // communicators, those that are being made included
    uint32_t rows;     // that were ever used, from the first on
    uint32_t threads;  // the same
    uint32_t held;     // FREE, HELD or ENDED; by the task, but that the coordinator may free
    // What keeps communicators from being made anew.
    uint32_t graphs;    // that live and have operations of NCCL
    uint32_t windows;   // with device communicators: device code knows where they are
    uint32_t forgotten; // not 0: something was not noted, for want of room
    uint32_t reserved1;
};

// One rank's end of a channel.
struct flowgpu_nccl_row {
    uint64_t communicator; // the same on all its ranks; 0: the row is free
    uint64_t entered;
    uint64_t limit;  // written by the coordinator
    uint32_t ranks;  // of the communicator
    uint32_t rank;   // whose row it is
    uint32_t source; // of messages; NO_RANK both: collectives
    uint32_t target;
    uint32_t made;    // not 0: the communicator is there, so all its ranks have come to it once
    uint32_t pending; // not 0: a call that does not block goes on in the background
    uint64_t reserved0;
    uint64_t reserved1;
};

struct flowgpu_nccl_thread {
    uint32_t used;
    uint32_t state;
    uint32_t thread; // its id
    uint32_t wants;
    uint64_t since_ns; // when it was parked, CLOCK_MONOTONIC
    uint64_t reserved0;
    uint64_t want_row[62];
    uint64_t want_number[62]; // up to which
};

#ifdef __cplusplus
static_assert(sizeof(flowgpu_nccl_header) == 56, "nccl");
static_assert(sizeof(flowgpu_nccl_row) == 64, "nccl");
static_assert(sizeof(flowgpu_nccl_thread) == 1024, "nccl");
static_assert(FLOWGPU_NCCL_ROWS_AT + FLOWGPU_NCCL_ROWS * sizeof(flowgpu_nccl_row) ==
                  FLOWGPU_NCCL_THREADS_AT,
              "nccl");
static_assert(FLOWGPU_NCCL_THREADS_AT + FLOWGPU_NCCL_THREADS * sizeof(flowgpu_nccl_thread) ==
                  FLOWGPU_NCCL_IDS_AT,
              "nccl");
static_assert(FLOWGPU_NCCL_IDS_AT + FLOWGPU_NCCL_ROWS * FLOWGPU_NCCL_ID_BYTES == FLOWGPU_NCCL_BYTES,
              "nccl");

extern "C" {
#endif

// What the interposer exports for the intercept library and the memory stub, which find it by name
// and do without it when it is not there.
//
// The memfd with the counts, which stays the interposer's; -1 when the system refuses one.
int flowgpu_nccl_fd(void);
// Communicators that live or are being made.
uint32_t flowgpu_nccl_communicators(void);
// Threads that wait go on, unless communicators are ended.
void flowgpu_nccl_open(void);
// A step of ending them and making them anew, a flowgpu_renewal (wire.h). Gives a flowgpu_status,
// and text for what went wrong.
int flowgpu_nccl_renew(int step, char* detail, size_t bytes);
// To be called whenever the number of stream captures under way, which is read there, has changed.
void flowgpu_nccl_captures(const uint32_t* under_way);
// Not 0 once an operation was captured: only then what follows has to be called.
const uint32_t* flowgpu_nccl_any_graph(void);
// A graph or an executable: 0, it becomes what `other` is; 1, it takes that into itself; 2, it
// ends.
void flowgpu_nccl_graph(int what, const void* graph, const void* other);
// Around a launch: says whether it counts, and so has an end.
int flowgpu_nccl_begin_launch(const void* executable, void* stream);
void flowgpu_nccl_end_launch(const void* executable, int well);
// What dlsym is to give for a function of NCCL's that it has found in some library.
void* flowgpu_nccl_instead(void* found, const char* name);

#ifdef __cplusplus
}
#endif

#endif
