// Addresses of constants.
//
// Constants lie in a bank of the driver's, elsewhere in each of its lives. A program that has asked
// where one is gives that address to copies, and seldom to kernels; where the driver has put the
// constant elsewhere since, it is exchanged for the present one in every call.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ALIASES_H
#define FLOWGPU_INTERCEPT_REPLAY_ALIASES_H

#include <atomic>
#include <vector>

#include "record.h"

namespace flowgpu::replay {

class Aliases {
  public:
    CUdeviceptr driver(CUdeviceptr program) const;
    CUdeviceptr program(CUdeviceptr driver) const;
    std::vector<Alias> all;
};

// Null while every program's address is the driver's.
static constexpr auto& aliases = flowgpu_page.aliases;

inline CUdeviceptr to_driver(CUdeviceptr address) {
    const Aliases* table = aliases.load(std::memory_order_acquire);
    return __builtin_expect(table != nullptr, 0) ? table->driver(address) : address;
}
inline CUdeviceptr to_program(CUdeviceptr address) {
    const Aliases* table = aliases.load(std::memory_order_acquire);
    return __builtin_expect(table != nullptr, 0) ? table->program(address) : address;
}

// The registry is locked for these.
// What the program gets for the address of a constant, noted in `variable`.
CUdeviceptr alias_of(Variable& variable, Object* context, CUdeviceptr address, size_t bytes);
// After the driver's addresses have changed, or aliases have ended.
void renew_aliases();
// True if the program knows a constant by an address in this range.
bool is_taken(CUdeviceptr address, size_t bytes);
// True if the driver's address lies in a constant that the program knows.
bool is_aliased(CUdeviceptr driver);

// A parameter of a function or kernel of the program's.
CUresult parameter_of(CUfunction function, size_t index, size_t* offset, size_t* bytes);

// The arguments of a launch with the driver's addresses in them.
class LaunchArguments {
  public:
    // All as the program gave them.
    LaunchArguments(CUfunction function, void** parameters, void** extra);
    void** parameters() { return pointers_.empty() ? given_ : pointers_.data(); }
    void** extra() { return packed_.empty() ? given_extra_ : extra_; }

  private:
    void** given_;
    void** given_extra_;
    std::vector<std::vector<char>> values_;
    std::vector<void*> pointers_;
    std::vector<char> packed_;
    size_t packed_bytes_ = 0;
    void* extra_[5];
};

} // namespace flowgpu::replay

#endif
