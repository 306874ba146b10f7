// Bytes that leave a task: the protocol between the intercept library, the coordinator and the
// ghost.
//
// Transport: AF_UNIX SOCK_SEQPACKET, one message a packet, native byte order (both ends are on one
// host), file descriptors as SCM_RIGHTS. flowgpu/wire.py is generated from this file by
// tools/gen_wire.py; keep to the subset it reads: enums with explicit values and structs of
// fixed-width integers and char arrays.
//
// Bump FLOWGPU_WIRE_VERSION when a struct changes or a message changes its meaning. Reserved fields
// are zero and are checked by the receiver.
#ifndef FLOWGPU_WIRE_H
#define FLOWGPU_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum flowgpu_wire_constant {
    FLOWGPU_WIRE_MAGIC = 0x55504746, // "FGPU"
    FLOWGPU_WIRE_VERSION = 4,
    // Blocks, and so file descriptors, in one message; the kernel takes 253.
    FLOWGPU_ROWS_PER_MESSAGE = 64,
    FLOWGPU_IDS_PER_MESSAGE = 4096,
    FLOWGPU_ALLOCATIONS_PER_MESSAGE = 2048,
    FLOWGPU_WRITES_PER_MESSAGE = 1024,
    FLOWGPU_ASKERS_PER_MESSAGE = 2048,
    FLOWGPU_HOST_ROWS_PER_MESSAGE = 2048,
    FLOWGPU_DETAIL_BYTES = 256,
};

enum flowgpu_message {
    // --- task -> coordinator ---
    // flowgpu_hello; fds: the control page (memfd) and, where what makes them is preloaded, the
    // live
    // set (memfd, see live.h) and the counts of NCCL's communicators (memfd, see nccl.h).
    FLOWGPU_HELLO = 1,
    // flowgpu_reply: the answer to each request below.
    FLOWGPU_REPLY = 2,
    // By the task's line (native/intercept/line.h), a header alone. From the task: its card, which
    // stays unread. From a coordinator that is not connected; fd: the task's end of a connection,
    // on which it says HELLO.
    FLOWGPU_CALL = 3,

    // --- coordinator -> task ---
    // fd: the task's end of a handover channel. Sends every block, and who has asked for some; the
    // gate stays open. The count is a flowgpu_export_notes.
    FLOWGPU_EXPORT = 16,
    // flowgpu_gate: close the gate, wait until no thread is in the driver, drain all contexts.
    FLOWGPU_GATE = 17,
    // Sends the blocks made since EXPORT, who has asked for some, the live allocations, the host
    // memory, the live list and FLOWGPU_END; once the ghost has answered with FLOWGPU_END on the
    // channel (it holds every block), unmaps and releases all.
    FLOWGPU_HANDOVER = 18,
    // Answers, closes every socket but its line's, then waits for a call. A task that was never
    // called connects again until the coordinator accepts.
    FLOWGPU_DETACH = 19,
    // fd: a handover channel. Receives every block and FLOWGPU_END, maps each at its address. The
    // count is a flowgpu_mapback_bytes.
    FLOWGPU_MAPBACK = 20,
    // Open the gate.
    FLOWGPU_OPEN = 21,
    // Forget the handover channel of EXPORT: the checkpoint is off.
    FLOWGPU_DROP = 22,
    // Answers how much device memory is free; the gate stays as it is.
    FLOWGPU_ROOM = 23,
    // flowgpu_ask: can that engine save this process? OK, or REFUSED with the names of what it
    // cannot save; the gate stays as it is.
    FLOWGPU_ASK = 24,
    // Engine replay, behind a closed gate, between HANDOVER or LEND and DETACH: ends CUDA in the
    // task itself, and so what it holds of its memory. After a failure the task is as before, but
    // for LOST: it cannot go on. Until REBUILD the gate stays closed, also when the connection
    // ends, and HELLO says `resumed`.
    // fd, where wanted: a stream socket, on which the task lists what REBUILD will make, for
    // people. It is read while the task works.
    FLOWGPU_STRIP = 25,
    // Engine replay, after STRIP and before MAPBACK, in the same process or a restored one: makes
    // CUDA anew, with the objects that the program had. May be asked again after a failure, and
    // is OK in a task that has CUDA: the answer to STRIP or to another REBUILD may have been lost.
    // Carries flowgpu_rebuild where the task is to have other GPUs than before, else nothing.
    FLOWGPU_REBUILD = 26,
    // As HANDOVER, but that the task keeps its memory.
    FLOWGPU_LEND = 27,
    // Engine replay, behind a closed gate, between LEND and DETACH, in the place of STRIP: the task
    // reads from the driver what REBUILD needs of it. For a dump that leaves the driver's devices
    // out: a copy restored from it is as after STRIP, and the task itself goes on with OPEN alone.
    // fd: as with STRIP.
    FLOWGPU_KEEP = 28,
    // As OPEN, but the gate is in the mode WATCH from then on, and what calls do to memory is
    // noted,
    // anew. An open gate is closed for a moment: BUSY as for GATE. WATCH ends when the gate closes
    // or opens, and with the connection.
    FLOWGPU_WATCH = 29,
    // fd: a channel. Sends what was noted since WATCH, and goes on noting: FLOWGPU_WRITES and
    // FLOWGPU_WATCHED.
    FLOWGPU_WRITTEN = 30,

    // Engine replay, behind a closed gate, in a task whose control page has managed bytes. The
    // count
    // is a flowgpu_managed_step. FLOWGPU_LOST: bytes of managed memory are gone.
    FLOWGPU_MANAGED = 31,

    // A step by which NCCL's communicators are ended and made anew. The count is a
    // flowgpu_renewal.
    FLOWGPU_RENEW = 40,

    // --- handover channel, task -> ghost and ghost -> task ---
    // 1 to FLOWGPU_ROWS_PER_MESSAGE flowgpu_block, as many fds in the same order.
    FLOWGPU_BLOCKS = 32,
    // Up to FLOWGPU_IDS_PER_MESSAGE uint64_t ids of blocks that still exist.
    FLOWGPU_LIVE = 33,
    FLOWGPU_END = 34,
    // Up to FLOWGPU_ALLOCATIONS_PER_MESSAGE flowgpu_allocation: what the program has.
    FLOWGPU_ALLOCATIONS = 35,
    // Up to FLOWGPU_WRITES_PER_MESSAGE flowgpu_write, in the order of the calls of each thread.
    FLOWGPU_WRITES = 36,
    // flowgpu_watched: the end of those.
    FLOWGPU_WATCHED = 37,
    // 1 to FLOWGPU_ASKERS_PER_MESSAGE flowgpu_asker.
    FLOWGPU_ASKERS = 38,
    // Up to FLOWGPU_HOST_ROWS_PER_MESSAGE flowgpu_host: memory of the task that a device may have
    // written since FLOWGPU_EXPORT_NOTES_BEGIN, by a copy, or because the driver held it
    // (cuMemHostRegister).
    FLOWGPU_HOST = 39,
};

enum flowgpu_status {
    FLOWGPU_OK = 0,
    // A stream capture is under way, or a thread did not leave the driver in time; gate open again.
    FLOWGPU_BUSY = 1,
    // A driver call failed: see driver_result and detail.
    FLOWGPU_DRIVER = 2,
    // A system call failed: see detail.
    FLOWGPU_SYSTEM = 3,
    // A message that does not fit the state.
    FLOWGPU_PROTOCOL = 4,
    // Memory or CUDA of the task is gone; it must not go on.
    FLOWGPU_LOST = 5,
    // The task holds something that cannot be saved: detail names it.
    FLOWGPU_REFUSED = 6,
};

// EXPORT says with it if the task notes what devices may write into its own memory, for HOST. While
// it does, its gate is in the mode WATCH until it closes.
enum flowgpu_export_notes {
    FLOWGPU_EXPORT_NOTES_NONE = 0,
    FLOWGPU_EXPORT_NOTES_BEGIN = 1,
    FLOWGPU_EXPORT_NOTES_GO_ON = 2, // once more for the same checkpoint
};

// MAPBACK says with it if the blocks have their bytes. What is made of these waits for another
// MAPBACK, of no blocks where none are missing.
enum flowgpu_mapback_bytes {
    FLOWGPU_MAPBACK_BYTES_THERE = 0,
    FLOWGPU_MAPBACK_BYTES_TO_COME = 1,
};

// Managed memory is exchanged for ordinary memory of the task at the same address, and back. With
// the steps that are HELD the coordinator holds all threads of the task whose names do not begin
// with "flowgpu" (native/intercept/managed.h). A step that has failed may be asked again from
// the one before on.
enum flowgpu_managed_step {
    // Between HANDOVER and STRIP. The answer says whether HELD is to follow.
    FLOWGPU_MANAGED_STEP_LEAVE = 0,
    FLOWGPU_MANAGED_STEP_LEAVE_HELD = 1,
    // After REBUILD. Likewise; HELD does a part, and then this one is to follow again.
    FLOWGPU_MANAGED_STEP_COME = 2,
    FLOWGPU_MANAGED_STEP_COME_HELD = 3,
    // It stays managed, but what of it is on devices goes to the host's memory. COME has the driver
    // bring back what the program had it bring there.
    FLOWGPU_MANAGED_STEP_TO_HOST = 4,
};

// The steps of RENEW, on all ranks of a communicator at once. From HOLD to OPEN, and from END to
// MAKE whatever comes between, who calls NCCL waits.
enum flowgpu_renewal {
    // Behind the cut: waits until nobody is in NCCL and what was issued is done. BUSY: it is not
    // yet; REFUSED names what cannot be made anew.
    FLOWGPU_RENEWAL_HOLD = 1,
    FLOWGPU_RENEWAL_END = 2,
    // Makes the unique ids of the communicators of which the process has the first rank (nccl.h).
    FLOWGPU_RENEWAL_IDS = 3,
    // All ids are in the page.
    FLOWGPU_RENEWAL_MAKE = 4,
};

// What saves the control state: contexts, streams, modules and so on.
enum flowgpu_engine {
    FLOWGPU_ENGINE_NATIVE = 0, // the driver's checkpoint API
    FLOWGPU_ENGINE_REPLAY = 1, // the task, from its record of calls
    FLOWGPU_ENGINE_NONE = 2,   // nobody: CUDA stays in the process; for GATE alone
};

enum flowgpu_gate_state {
    FLOWGPU_GATE_OPEN = 0,
    FLOWGPU_GATE_CLOSED = 1,
    FLOWGPU_GATE_WATCH = 2, // open, and what calls do to memory is noted
};

struct flowgpu_header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;  // flowgpu_message
    uint32_t bytes; // of the whole packet, header included
    uint32_t count; // rows or ids that follow, else 0
};

struct flowgpu_hello {
    struct flowgpu_header header;
    uint32_t pid;            // in the task's own PID namespace; the coordinator trusts SO_PEERCRED
    uint32_t driver_version; // cuDriverGetVersion
    // 1 where the task waits to be brought back (rolled back or restored); 2 where it waits as well
    // but has all that it had, and needs OPEN alone; else 0.
    uint32_t resumed;
    uint32_t device_count;
    // Not 0: the job was started for the engine replay; ASK says whether it can. 3: with LEND, KEEP
    // or STRIP after it, and FLOWGPU_MAPBACK_BYTES_TO_COME; less: a task of an older library, which
    // is only asked for HANDOVER, STRIP and a MAPBACK behind the copy.
    uint32_t replay;
    uint32_t reserved0;
    // By which others know this task as the owner of blocks: 128 random bits, the same for its
    // life.
    uint64_t token_low;
    uint64_t token_high;
};

struct flowgpu_gate {
    struct flowgpu_header header;
    uint32_t timeout_ms; // for the threads to leave the driver and for the contexts to drain
    // Before that, with the gate still open, wait at most so long until the live set has no more
    // than live_bytes, or 1/24 more in the last quarter of that time. The lowest point of a
    // training step lasts some 0.1 ms: only the task itself is quick enough to meet it.
    uint32_t wait_ms;
    uint64_t live_bytes;
    uint32_t engine; // flowgpu_engine; REFUSED names what it cannot save
    uint32_t reserved0;
};

struct flowgpu_ask {
    struct flowgpu_header header;
    uint32_t engine; // flowgpu_engine
    uint32_t reserved;
};

struct flowgpu_rebuild {
    struct flowgpu_header header;
    // From now on what the driver finds as CUDA_VISIBLE_DEVICES: the UUIDs of GPUs, in the order of
    // their ordinals in the task, by commas. NUL-terminated.
    char visible[2688];
};

struct flowgpu_reply {
    struct flowgpu_header header;
    uint32_t request;      // flowgpu_message this answers
    uint32_t status;       // flowgpu_status
    int32_t driver_result; // CUresult when status is FLOWGPU_DRIVER
    // GATE: with the gate still open. MANAGED: not 0 where the step's HELD one is to follow.
    uint32_t waited_us;
    uint64_t blocks; // EXPORT, HANDOVER, LEND: sent; MAPBACK: mapped
    // ROOM: free bytes of that GPU of the task which has least, what the task itself keeps free
    // included; all ones for a task without memory. Behind a closed gate: of all its contexts.
    uint64_t block_bytes;
    uint64_t allocations;      // live allocations of the program in those blocks
    uint64_t allocation_bytes; // as the program asked for them
    // NUL-terminated: what went wrong, or of FLOWGPU_OK how long its steps took; GATE: what the
    // program will have lost after a checkpoint.
    char detail[256];
};

struct flowgpu_block {
    uint64_t id; // unique in the task's life, never used again
    // Virtual address in the task. Memory that the program maps itself, anywhere, nowhere or twice,
    // has a number of the task's instead, from 2^60 on, which is its handle there. Either way it
    // does not change, and [address, address + bytes) of a task's blocks do not overlap.
    uint64_t address;
    uint64_t bytes;  // a multiple of the allocation granularity
    uint32_t device; // CUDA ordinal in the task
    uint32_t reserved;
    // An import has here the token of the task whose block it is, and the id there. Its bytes are
    // saved and made again with that one, also where the owner has let go of it meanwhile. Else
    // zeros.
    uint64_t owner_low;
    uint64_t owner_high;
    uint64_t owner_id;
};

// A process that lives and has asked for a block of the task, which it may have let go of again.
struct flowgpu_asker {
    uint64_t token_low;
    uint64_t token_high;
    uint32_t pid; // in the task's own PID namespace; 0: it is not in there
    uint32_t reserved;
};

// Memory that the program may use, as it asked for it.
struct flowgpu_allocation {
    uint64_t address; // where the program knows it
    uint64_t bytes;
    uint64_t place; // the same byte in the addresses of the blocks: `address` itself, except in
                    // memory that the program maps itself
};

struct flowgpu_host {
    uint64_t address;
    uint64_t bytes;
};

// What a copy, a memset or another write of a value has written, as its arguments say before the
// driver is called; a call that fails or is captured into a graph is among them. For each i <
// slices and j < rows: [address + i * slice + j * pitch, + bytes). An address of the program's, of
// a device or of the host.
struct flowgpu_write {
    uint64_t address;
    uint64_t bytes; // of a row
    uint64_t pitch;
    uint64_t rows;
    uint64_t slice;
    uint64_t slices;
};

// Calls since WATCH, by their effect.
struct flowgpu_watched {
    struct flowgpu_header header;
    uint64_t launches; // of kernels and graphs: what they write is not noted
    uint64_t writes;
    uint64_t frees;
    uint64_t arrays; // writes into CUDA arrays, which have no address
    uint64_t missed; // writes that nobody can name, or for which there was no room
};

// One page, written by the task alone but for `draining`; the coordinator and `flowgpu ps` read it
// without asking the task.
struct flowgpu_control_page {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint32_t gate;             // flowgpu_gate_state
    uint32_t threads;          // that have called the driver and live
    uint64_t allocations;      // live, of the program
    uint64_t allocation_bytes; // as the program asked for them
    uint64_t blocks;           // VMM handles behind them
    uint64_t block_bytes;      // device memory they take
    // Asked for by calls whose memory stays with the task (pools, managed memory, own virtual
    // memory that cannot be handed over).
    uint64_t foreign_bytes;
    // Driver functions without a row in the table that the program resolved.
    uint64_t unknown_symbols;
    uint64_t devices; // a bit for each CUDA ordinal in the task on which it ever had memory
    // Written by the coordinator. Not 0: the ghost of a checkpoint has device memory that is free
    // again soon, so an allocation that finds none waits.
    uint64_t draining;
    uint64_t managed_bytes; // of them, those that can be exchanged for ordinary memory
    uint64_t reserved[5];
};

#ifdef __cplusplus
static_assert(sizeof(flowgpu_header) == 16, "wire");
static_assert(sizeof(flowgpu_hello) == 56, "wire");
static_assert(sizeof(flowgpu_gate) == 40, "wire");
static_assert(sizeof(flowgpu_ask) == 24, "wire");
static_assert(sizeof(flowgpu_rebuild) == 2704, "wire");
static_assert(sizeof(flowgpu_reply) == 320, "wire");
static_assert(sizeof(flowgpu_block) == 56, "wire");
static_assert(sizeof(flowgpu_asker) == 24, "wire");
static_assert(sizeof(flowgpu_allocation) == 24, "wire");
static_assert(sizeof(flowgpu_host) == 16, "wire");
static_assert(sizeof(flowgpu_write) == 48, "wire");
static_assert(sizeof(flowgpu_watched) == 56, "wire");
static_assert(sizeof(flowgpu_control_page) == 128, "wire");
static_assert(offsetof(flowgpu_control_page, draining) == 72, "coordinator/tasks.py writes it");
#endif

#endif
