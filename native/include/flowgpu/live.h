// The live set: which bytes of a task's memory the allocators of its frameworks have given out.
//
// Written by native/memstub into a memfd of the task, mapped by the coordinator, which asks nobody.
// flowgpu/live.py is generated from this file by tools/gen_live.py; keep to the subset of wire.h.
//
// An event goes to the sums and to the log. A full log is applied: its events go into the table and
// the bitmaps, in order, and only then may the log be written over. It holds what happens in a step
// or two, in which the same addresses come again and again: so the lines of the table that the
// program has meanwhile driven out of the caches are waited for once a step, not once an event.
//
// A reader takes no lock, and events go on under it. It reads
//   1. the log, then `applied`: the events from `applied` on were not written over meanwhile,
//   2. the bitmaps and the slots,
//   3. `overflow`,
// and where the log of step 1 has an event of a block, its last one there decides, not the slots.
// So every block that was live from the beginning to the end is reported, also when events are
// being applied or the writer stands in the middle of it: its allocation is in the log of step 1,
// or was applied before step 2, where an entry never moves and is whole before its address appears;
// and the log has no later free of it. A block that came or went meanwhile may be reported or not.
#ifndef FLOWGPU_LIVE_H
#define FLOWGPU_LIVE_H

#include <stdint.h>

enum flowgpu_live_constant {
    FLOWGPU_LIVE_MAGIC = 0x564c4746, // "FGLV"
    FLOWGPU_LIVE_VERSION = 4,
    // Sums a device; the last one is for blocks whose device the allocator does not tell.
    FLOWGPU_LIVE_DEVICES = 65,
    FLOWGPU_LIVE_NO_DEVICE = 64,
    FLOWGPU_LIVE_SLOT_BITS = 18,
    FLOWGPU_LIVE_SLOT_DEAD = 1, // address of a slot whose block has gone
    FLOWGPU_LIVE_DEVICE_BITS = 8,
    // The log has a place for so many events; what is with the device in the word of an event.
    FLOWGPU_LIVE_LOG_EVENTS = 4096,
    FLOWGPU_LIVE_EVENT_FREED = 0x100,
    FLOWGPU_LIVE_EVENT_CAPTURING = 0x200, // given out while a stream capture was under way
    FLOWGPU_LIVE_EVENT_BITS = 16,
    // A bit of `seen` and `whole` stands for 2 MiB of the 47-bit address space.
    FLOWGPU_LIVE_GRANULE_BITS = 21,
    FLOWGPU_LIVE_ADDRESS_BITS = 47,
    // Where the parts begin, and the size of the whole. An event needs the header's first two lines
    // and one of the log.
    FLOWGPU_LIVE_LOG_AT = 0x1000,
    FLOWGPU_LIVE_SLOTS_AT = 0x11000,
    FLOWGPU_LIVE_SEEN_AT = 0x411000,
    FLOWGPU_LIVE_WHOLE_AT = 0xc11000,
    FLOWGPU_LIVE_BYTES = 0x1411000,
};

struct flowgpu_live_header {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    // Not zero: a block found no slot. From then on nothing is recorded, and everything is active.
    uint32_t overflow;
    uint32_t writing; // the stub's own, as `capturing` and `pointers`: its lock
    uint64_t logged;  // events so far
    uint64_t applied; // of them, those that the table and the bitmaps have; all but the last few
    uint32_t capturing;
    uint32_t reserved1;
    uint64_t pointers[2];
    // The bytes of the live blocks of each device (FLOWGPU_LIVE_DEVICES sums), changed with each
    // event of the log. Some blocks end without an event, and some are taken back without having
    // been given out. Applying the log corrects the sums for those. Until then the sum over all
    // devices may be below zero, and means nothing.
    int64_t device_bytes[65];
};

// Event number n is in the place n % FLOWGPU_LIVE_LOG_EVENTS.
struct flowgpu_live_event {
    uint64_t address;
    uint64_t word; // bytes << FLOWGPU_LIVE_EVENT_BITS | what | device
};

// Open addressing, linear probing. A slot never used since its cluster ended here has address 0.
struct flowgpu_live_slot {
    uint64_t address;
    uint64_t size; // bytes << FLOWGPU_LIVE_DEVICE_BITS | device
};

// Behind the slots, two bitmaps of uint64_t, least significant bit first:
//   seen   an allocator gave out a block there since the program was given this memory. Memory
//          without a bit belongs to nobody the stub knows, so all of it is active.
//   whole  as seen, and a stream capture was under way: a graph goes on using such memory after the
//          allocator has taken it back, so all of it is active.

#ifdef __cplusplus
static_assert(sizeof(flowgpu_live_header) == 576, "live");
static_assert(sizeof(flowgpu_live_slot) == 16, "live");
static_assert(sizeof(flowgpu_live_event) == 16, "live");
static_assert(sizeof(flowgpu_live_header) <= FLOWGPU_LIVE_LOG_AT, "live");
static_assert(FLOWGPU_LIVE_LOG_AT + 16 * FLOWGPU_LIVE_LOG_EVENTS == FLOWGPU_LIVE_SLOTS_AT, "live");
static_assert(FLOWGPU_LIVE_SLOTS_AT + (16 << FLOWGPU_LIVE_SLOT_BITS) == FLOWGPU_LIVE_SEEN_AT,
              "live");
static_assert(FLOWGPU_LIVE_SEEN_AT +
                      (1 << (FLOWGPU_LIVE_ADDRESS_BITS - FLOWGPU_LIVE_GRANULE_BITS - 3)) ==
                  FLOWGPU_LIVE_WHOLE_AT,
              "live");
static_assert(2 * FLOWGPU_LIVE_WHOLE_AT - FLOWGPU_LIVE_SEEN_AT == FLOWGPU_LIVE_BYTES, "live");

extern "C" {
#endif

// What the stub exports for the intercept library, which finds it by name and does without it when
// it is not there.
//
// The memfd with the live set, which stays the stub's; -1 when the system refuses one. Makes the
// set if no event has.
int flowgpu_memstub_fd(void);
// Clears `seen` and `whole` where [address, address + bytes) has a part of a granule: the memory is
// new to the program.
void flowgpu_memstub_forget(uint64_t address, uint64_t bytes);
// To be called whenever the number of stream captures under way, which is read there, has changed.
void flowgpu_memstub_captures(const uint32_t* under_way);
// Says whether CUPTI records activity for a profiler of the program's, as far as that asked it for
// by functions that it is linked with or has looked up in a library.
uint32_t flowgpu_memstub_is_profiled(void);

#ifdef __cplusplus
}
#endif

#endif
