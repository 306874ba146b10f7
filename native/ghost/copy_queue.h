// Copies between host and GPU memory, in flight on several streams of one context, completed in the
// order of issue.
#pragma once

#include "driver.h"

#include <deque>
#include <vector>

namespace fgg {

// Part of a file: bytes [offset, offset + bytes), at host while it is between the file and the GPU.
struct Piece {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    char* host = nullptr;
    bool direct = false; // host is the file's own mapping, not a slot of the arena
};

// The file's bytes are the segments one behind another.
class Segments {
  public:
    Segments() = default;
    Segments(const fgg_segment* rows, uint64_t count);
    uint64_t bytes() const { return starts_.back(); }
    // Calls part(address, offset in the piece, bytes) for each segment that the piece touches.
    template <typename Part> void split(const Piece& piece, Part part) const;

  private:
    std::vector<fgg_segment> rows_;
    std::vector<uint64_t> starts_{0}; // of each row in the file, and the end
};

// Used by one thread.
class CopyQueue {
  public:
    CopyQueue(uint64_t context, unsigned streams, const Segments& segments);
    ~CopyQueue();
    CopyQueue(const CopyQueue&) = delete;
    CopyQueue& operator=(const CopyQueue&) = delete;

    bool full() const { return flight_.size() == events_.size(); }
    bool empty() const { return flight_.empty(); }
    void issue(const Piece& piece, fgg_kind kind);
    Piece complete_oldest();
    // Ends all copies, whatever their result, and gives back what was in flight.
    std::deque<Piece> drain();

  private:
    void release();

    const Segments& segments_;
    std::vector<CUstream> streams_;
    std::vector<CUevent> events_; // used in turn
    std::deque<Piece> flight_;
    uint64_t issued_ = 0;
};

} // namespace fgg
