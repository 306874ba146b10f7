// Device memory of one job for pieces that kernels gather before one copy out, or scatter after one
// copy in.
#pragma once

#include "kernels.h"
#include "segments.h"

namespace fgg {

// Device memory that the current context owns.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    // False when the GPU has no more.
    bool take(uint64_t bytes);
    CUdeviceptr address() const { return address_; }

  private:
    CUdeviceptr address_ = 0;
};

// Used by the thread of the copy queue. `copy` numbers a copy in flight, `lane` its stream: what is
// in one stream runs in order, so that one piece of scratch memory a stream is enough.
class Gather {
  public:
    Gather(const Kernels& kernels, const Segments& segments, uint64_t piece_bytes);
    ~Gather();
    Gather(const Gather&) = delete;
    Gather& operator=(const Gather&) = delete;

    // False when the GPU lacks the memory for so many copies and lanes.
    bool take(unsigned copies, unsigned lanes);
    // True when a kernel and one copy cost less than a copy a part.
    static bool worthwhile(const Piece& piece);

    void out(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);
    void in(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);

  private:
    // Lists of one copy in device memory: the chunks' addresses, and their places in scratch
    // memory.
    struct Lists {
        CUdeviceptr chunks, scratch;
        uint32_t count;
    };
    uint64_t list_bytes() const;
    CUdeviceptr scratch(unsigned lane) const { return pieces_.address() + lane * piece_bytes_; }
    Lists send_lists(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);

    const Kernels& kernels_;
    const Segments& segments_;
    const uint64_t piece_bytes_;
    char* staging_ = nullptr;
    DeviceMemory lists_, pieces_;
};

} // namespace fgg
