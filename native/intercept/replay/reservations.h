// Device addresses that the program has reserved, and that the driver reserves again.
//
// The driver packs small reservations, of which NCCL makes hundreds, into gaps among its own
// memory. Made anew it may have that memory in those gaps, and it fulfils no wish for less than 32
// MiB elsewhere (docs/design/hardware-notes.md). So small ones lie in a *cover*, a large
// reservation at an address of FlowGPU's choice, which ends with the last of them. What the program
// has wished for itself, and what is left of an older image, is covered when the driver is made
// anew.
#ifndef FLOWGPU_INTERCEPT_REPLAY_RESERVATIONS_H
#define FLOWGPU_INTERCEPT_REPLAY_RESERVATIONS_H

#include <map>
#include <vector>

#include "failure.h"
#include "rewind.h"

namespace flowgpu::replay {

// Those of the address map, in a driver that has none of them yet.
class Reservations {
  public:
    Reservations();
    // All whose place is free; at last the others as well, and then their place is made free.
    bool make(bool at_last, FirstFailure& fail);

  private:
    struct Wish {
        size_t bytes;
        std::vector<rewind::Range> parts; // whose place is not free yet
    };
    std::map<CUdeviceptr, Wish> waiting_;
};

} // namespace flowgpu::replay

#endif
