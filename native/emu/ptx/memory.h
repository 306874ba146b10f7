// Addresses of one instruction, and the checks that every access passes.
#pragma once

#include "lanes.h"

namespace flowgpu::emu::ptx {

// Host address of `size` bytes at `addr` of the space for this lane, or null after raising a fault.
// `align` is what the hardware demands of the access.
uint8_t* locate(Cta& c, Space space, uint64_t addr, uint64_t size, uint32_t align, uint32_t lane,
                bool write);

inline uint64_t address_of(const Cta& c, const Ins& i, uint32_t slot, uint32_t lane) {
    uint64_t base = i.wide_address ? c.reg<uint64_t>(slot)[lane] : c.reg<uint32_t>(slot)[lane];
    return base + static_cast<uint64_t>(i.imm);
}

// True for device memory, whose writes are logged.
inline bool is_device(Space space, uint64_t addr) {
    return space == Space::global || (space == Space::generic && addr < shared_window);
}

} // namespace flowgpu::emu::ptx
