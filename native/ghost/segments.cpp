#include "segments.h"

#include "failure.h"

namespace fgg {

Segments::Segments(const fgg_segment* rows, uint64_t count) : rows_(rows, rows + count) {
    uint64_t end = 0;
    for (const fgg_segment& row : rows_) {
        if (!row.bytes || row.bytes > INT64_MAX || row.offset > INT64_MAX - row.bytes)
            throw MoverFailure(FGG_ARGUMENT, "a segment without bytes, or too many bytes");
        if (row.offset < end)
            throw MoverFailure(FGG_ARGUMENT, "segments overlap or are not sorted at offset " +
                                                 std::to_string(row.offset));
        // A digest is of a whole chunk, so a chunk is read as a whole or not at all.
        if (row.offset != end && (row.offset % FGG_CHUNK_BYTES || end % FGG_CHUNK_BYTES))
            throw MoverFailure(FGG_ARGUMENT, "the gap before offset " + std::to_string(row.offset) +
                                                 " does not have whole chunks at its ends");
        end = row.offset + row.bytes;
        bytes_ += row.bytes;
    }
}

bool Segments::whole_chunks() const {
    for (const fgg_segment& row : rows_)
        if ((row.address | row.bytes | row.offset) % FGG_CHUNK_BYTES)
            return false;
    return true;
}

std::vector<Piece> Segments::pieces(uint64_t piece_bytes) const {
    std::vector<Piece> pieces;
    for (uint64_t i = 0; i < rows_.size(); i++) {
        const uint64_t end = rows_[i].offset + rows_[i].bytes;
        for (uint64_t at = rows_[i].offset; at < end;) {
            const uint64_t cell = at / piece_bytes;
            if (pieces.empty() || pieces.back().offset / piece_bytes != cell) {
                Piece fresh;
                fresh.offset = at;
                fresh.row = i;
                pieces.push_back(fresh);
            }
            Piece& piece = pieces.back();
            piece.end = std::min(end, (cell + 1) * piece_bytes);
            piece.bytes += piece.end - at;
            piece.parts++;
            at = piece.end;
        }
    }
    return pieces;
}

} // namespace fgg
