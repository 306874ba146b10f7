// What an address is, mostly without the lock of the address map: some programs ask for every
// argument of every kernel that they launch (Triton does).
//
// A thread remembers the granules that it has found to lie in one allocation, in its own record
// (gate.h), so that nothing is shared but the map's version, which changes when memory ends. An
// answer about memory that another thread is freeing meanwhile may be either, as the driver's would
// be.
#ifndef FLOWGPU_INTERCEPT_ADDRESSES_H
#define FLOWGPU_INTERCEPT_ADDRESSES_H

#include <cstdint>

namespace flowgpu::addresses {

enum class Place {
    outside,   // not in a window: memory of the driver's, of the program's own mappings, or none
    allocated, // in memory from cuMemAlloc
    unused,    // in a window, and not allocated
};

// To be called inside the gate.
Place place_of(uint64_t address);

} // namespace flowgpu::addresses

#endif
