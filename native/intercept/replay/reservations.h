// Device addresses that the program has reserved, and that the driver reserves again.
//
// Without a wish, the driver packs small reservations together, as NCCL makes hundreds. A wish for
// less than 32 MiB it fulfils only within a range of its own (docs/design/hardware-notes.md). So
// what lies elsewhere in the same 32 MiB is reserved again as one, a *cover*, which ends with the
// last reservation in it.
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
