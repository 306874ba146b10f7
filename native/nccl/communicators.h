// The communicators of the process: by which handle the program knows each, which one of NCCL's it
// is now, which rows of the page it has, and how it was made.
//
// The program's handle is NCCL's own until communicators are made anew (renewal.cpp): from then on
// it is a name. Where NCCL gives a communicator an address that is the name of another one by then,
// the new one's name is a place of ours.
#ifndef FLOWGPU_NCCL_COMMUNICATORS_H
#define FLOWGPU_NCCL_COMMUNICATORS_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "page.h"

namespace flowgpu::nccl {

uint64_t mix(uint64_t seed, const void* data, size_t bytes);

constexpr size_t kConfigBytes = 256, kNameBytes = 96;

// What a communicator is made by, besides its rank.
struct How {
    void* context; // that of the thread which made it; null: it had none, so `device`'s primary one
    int device;
    uint32_t config_bytes; // 0: without one
    unsigned char config[kConfigBytes];
    char names[2][kNameBytes]; // of the network and of the communicator, which `config` points to

    // Copies a configuration of NCCL's; what does not fit makes the page say so.
    void configure(const void* config);
};

struct Communicator {
    void* handle;            // the program's; null while it is being made
    std::atomic<void*> real; // NCCL's; null: ended, or not made anew for want of a rank
    uint32_t row;            // of its collectives; kNoRow: the place is free
    uint32_t windows;        // and device communicators, that live
    How how;
};

// One that is being made: its place, and where NCCL puts the handle.
struct Coming {
    Communicator* place = nullptr;
    void** handle = nullptr;
};

// A place with that row. Null without room: then nothing of it is counted, and the page says so.
Communicator* reserve(uint32_t row);
// NCCL has made it. Gives the handle by which the program is to know it.
void* bind(Communicator* place, void* real);
// The one that the program knows by that handle; null for one that is not known.
Communicator* find(void* handle);
// Calls `visit` for each that is made.
void each(void (*visit)(Communicator&, void*), void* argument);
// That of messages between the rank of `collectives` and a peer, made where there is none.
uint32_t messages_of(uint32_t collectives, bool sends, int peer);
// Calls `visit` for each direction between the rank and a peer in which messages were issued.
void each_message(const Communicator* of, void (*visit)(bool sends, int peer, void*),
                  void* argument);
// Frees the place and all its rows.
void forget(Communicator* place);
// In the child of a fork, with a page of its own: it has none.
void forget_all();
// What went on in the background has ended.
void settle(Communicator* place, bool well);

// Some were made anew: handles of the program's may be names.
bool any_names();
void now_names();

// Registrations of buffers and reductions of a communicator, which are made anew with it. The
// program's handle is a name as a communicator's is.
struct Attached {
    Communicator* of; // null: the place is free
    bool reduces;
    uint64_t handle, real;
    void* data;     // the buffer; a scalar's address on the device
    uint64_t bytes; // of the buffer; a scalar's on the host
    int type, residence;
};
uint64_t attach(const Attached& made);
Attached* find_attached(Communicator* of, bool reduces, uint64_t handle);
void detach(Attached* place);
void each_attached(void (*visit)(Attached&, void*), void* argument);

} // namespace flowgpu::nccl

#endif
