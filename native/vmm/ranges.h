// A range allocator over one span of addresses: first fit from the lowest address, neighbours
// joined on release.
#ifndef FLOWGPU_VMM_RANGES_H
#define FLOWGPU_VMM_RANGES_H

#include <cstdint>
#include <map>

namespace flowgpu {

class Ranges {
  public:
    // [base, base + bytes) becomes free; base and bytes are multiples of the caller's granule.
    Ranges(uint64_t base, uint64_t bytes);

    // The lowest free range of that many bytes (> 0), or 0 when none is left.
    uint64_t claim(uint64_t bytes);
    // Frees a range that was claimed; false, with nothing changed, when any part of it is free
    // or outside.
    bool release(uint64_t address, uint64_t bytes);

    uint64_t free_bytes() const { return free_bytes_; }
    bool all_free() const { return free_bytes_ == bytes_; }

  private:
    uint64_t base_;
    uint64_t bytes_;
    uint64_t free_bytes_;
    std::map<uint64_t, uint64_t> free_; // address -> bytes, never adjacent
};

} // namespace flowgpu

#endif
