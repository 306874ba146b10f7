// Device memory of one job for pieces that kernels work on: gathered before one copy out, scattered
// after one copy in, or digested where they arrived.
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

    // False when the GPU lacks the memory for lists of so many copies.
    bool take_lists(unsigned copies);
    // True when a kernel and one copy cost less than a copy a part.
    static bool worthwhile(const Piece& piece);
    // Without it, or when it answers false, no piece is gathered.
    bool take_pieces(unsigned lanes);

    bool gathers(const Piece& piece) const;
    void out(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);
    void in(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);
    // Digests of the piece's chunks where they belong, for digests() when the copy is complete.
    void digest(const Piece& piece, unsigned copy, CUstream stream);
    const uint8_t* digests(unsigned copy) const;

  private:
    // Lists of one copy, in pinned and in device memory alike: the chunks' addresses, their places
    // in the scratch memory, digests, zero flags.
    enum class List : unsigned { chunks, scratch, digests, zero };
    uint64_t place(List list, unsigned copy) const;
    uint64_t list_bytes() const;
    uint64_t* host_list(List list, unsigned copy) const;
    CUdeviceptr device_list(List list, unsigned copy) const;
    uint32_t send_chunks(const Piece& piece, unsigned copy, CUstream stream);
    void send_scratch(const Piece& piece, unsigned copy, unsigned lane, CUstream stream);
    void send(List list, unsigned copy, uint64_t count, CUstream stream);
    void copy_in(const Piece& piece, CUdeviceptr scratch, CUstream stream) const;

    const Kernels& kernels_;
    const Segments& segments_;
    const uint64_t piece_bytes_;
    char* staging_ = nullptr;
    DeviceMemory lists_, pieces_;
};

} // namespace fgg
