// The page of counts (flowgpu/nccl.h) from the side of the program's threads.
//
// Rules: those of native/intercept/driver.h for code in someone else's process.
#ifndef FLOWGPU_NCCL_PAGE_H
#define FLOWGPU_NCCL_PAGE_H

#include <cstddef>
#include <cstdint>

#include "flowgpu/nccl.h"

#define FGN_EXPORT extern "C" __attribute__((visibility("default")))

namespace flowgpu::nccl {

constexpr uint32_t kNoRow = ~0u;

struct Want {
    uint32_t row;
    uint32_t count;
};

// What a thread issues at once.
struct Unit {
    Want wants[FLOWGPU_NCCL_WANTS];
    uint32_t used = 0;

    void add(uint32_t row);
};

flowgpu_nccl_header& header();
flowgpu_nccl_row& row(uint32_t number);
// Where the unique id of the communicator is which has the row.
char* id_of(uint32_t number);

// A row of zeros but for what is given; kNoRow, and `overflow`, when there is none.
uint32_t make_row(uint64_t communicator, uint32_t ranks, uint32_t rank, uint32_t from, uint32_t to);
void free_row(uint32_t number);

// Waits until the unit may begin; its numbers count from then on.
void enter(const Unit& unit);
// `failed`: nothing was issued, so nothing counts. `goes_on`: in the background.
void leave(const Unit& unit, bool failed, bool goes_on);

// A thread is in NCCL, or about to be.
bool anybody_inside();

// Makes the memfd, unless the system refuses it or it is there. Gives its descriptor, or -1.
int share();

} // namespace flowgpu::nccl

#endif
