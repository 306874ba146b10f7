// Which bytes of a file belong where in device memory, and the pieces in which they travel.
#pragma once

#include "fgg.h"

#include <algorithm>
#include <vector>

namespace fgg {

// What one copy moves: the bytes of a file's range [offset, end) that segments cover, one behind
// another at `host`.
struct Piece {
    uint64_t offset = 0; // of the first byte
    uint64_t end = 0;    // behind the last byte
    uint64_t bytes = 0;  // without the gaps
    uint64_t row = 0;    // first segment that it touches
    uint64_t parts = 0;  // segments that it touches
    char* host = nullptr;
    bool direct = false; // host is the file's own mapping, not a slot of the arena
};

class Segments {
  public:
    Segments() = default;
    // Throws FGG_ARGUMENT unless they are sorted by offset, apart, and meet gaps at whole chunks.
    Segments(const fgg_segment* rows, uint64_t count);

    uint64_t bytes() const { return bytes_; }
    // The file has at least this many bytes.
    uint64_t end() const { return rows_.empty() ? 0 : rows_.back().offset + rows_.back().bytes; }
    bool gaps() const { return bytes_ != end(); }
    // All addresses, sizes and offsets are whole chunks.
    bool whole_chunks() const;
    // In the order of the file, cut at multiples of piece_bytes.
    std::vector<Piece> pieces(uint64_t piece_bytes) const;

    // Calls part(address, offset in the file, offset in the piece, bytes) for each segment that the
    // piece touches.
    template <typename Part> void split(const Piece& piece, Part part) const {
        uint64_t at = 0;
        for (uint64_t i = piece.row; i < piece.row + piece.parts; i++) {
            const fgg_segment& row = rows_[i];
            const uint64_t from = std::max(piece.offset, row.offset);
            const uint64_t bytes = std::min(piece.end, row.offset + row.bytes) - from;
            part(row.address + (from - row.offset), from, at, bytes);
            at += bytes;
        }
    }

    // Calls run(offset in the file, offset in the piece, bytes) for each part of the file without
    // a gap.
    template <typename Run> void runs(const Piece& piece, Run run) const {
        uint64_t start = piece.offset, packed = 0, length = 0;
        split(piece, [&](uint64_t, uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
            if (in_file != start + length) {
                run(start, packed, length);
                start = in_file;
                packed = in_piece;
                length = 0;
            }
            length += bytes;
        });
        run(start, packed, length);
    }

  private:
    std::vector<fgg_segment> rows_;
    uint64_t bytes_ = 0;
};

} // namespace fgg
