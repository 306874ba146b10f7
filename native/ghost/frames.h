// Bytes of a file that is stored packed, as zstd frames (docs/reference/image-format.md, "Packed
// files").
#pragma once

#include "file.h"

#include <vector>

namespace fgg {

class Frames {
  public:
    // Throws FGG_ARGUMENT, and FGG_SYSTEM where there is no libzstd.
    Frames(const uint32_t* sizes, uint64_t count, uint64_t plain_bytes);

    uint64_t stored_bytes() const { return starts_.back(); }
    uint64_t plain_bytes() const { return plain_bytes_; }
    // Plain bytes, by any thread. Throws FGG_DAMAGED, which names the frame.
    void read(File& file, char* host, uint64_t bytes, uint64_t offset) const;

  private:
    void expand(File& file, uint64_t index, char* target, uint64_t bytes) const;

    std::vector<uint64_t> starts_; // of frames in the file, and the end of the last
    const uint64_t plain_bytes_;
};

} // namespace fgg
