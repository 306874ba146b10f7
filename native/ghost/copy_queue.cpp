#include "copy_queue.h"

#include <algorithm>
#include <utility>

namespace fgg {
namespace {

// Enough that a stream never waits for the host between two copies.
constexpr unsigned kInFlightPerStream = 3;

} // namespace

Segments::Segments(const fgg_segment* rows, uint64_t count) : rows_(rows, rows + count) {
    for (const fgg_segment& row : rows_) {
        if (!row.bytes || row.bytes > INT64_MAX - starts_.back())
            throw Failure(FGG_ARGUMENT, "a segment without bytes, or too many bytes");
        starts_.push_back(starts_.back() + row.bytes);
    }
}

template <typename Part> void Segments::split(const Piece& piece, Part part) const {
    const uint64_t end = piece.offset + piece.bytes;
    auto row = std::upper_bound(starts_.begin(), starts_.end(), piece.offset) - starts_.begin() - 1;
    for (uint64_t at = piece.offset; at < end; row++) {
        const uint64_t length = std::min(end, starts_[row + 1]) - at;
        part(rows_[row].address + (at - starts_[row]), at - piece.offset, length);
        at += length;
    }
}

CopyQueue::CopyQueue(uint64_t context, unsigned streams, const Segments& segments)
    : segments_(segments) {
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context)), "cuCtxSetCurrent");
    try {
        for (unsigned i = 0; i < streams; i++) {
            CUstream stream;
            check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
            streams_.push_back(stream);
        }
        for (unsigned i = 0; i < streams * kInFlightPerStream; i++) {
            CUevent event;
            check(driver().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                  "cuEventCreate");
            events_.push_back(event);
        }
    } catch (...) {
        release();
        throw;
    }
}

CopyQueue::~CopyQueue() {
    drain();
    release();
}

void CopyQueue::release() {
    for (CUevent event : events_)
        driver().cuEventDestroy_v2(event);
    for (CUstream stream : streams_)
        driver().cuStreamDestroy_v2(stream);
}

void CopyQueue::issue(const Piece& piece, fgg_kind kind) {
    CUstream stream = streams_[issued_ % streams_.size()];
    CUevent event = events_[issued_ % events_.size()];
    // In flight before the first call: a failure in the middle leaves a copy that drain() must wait
    // for.
    flight_.push_back(piece);
    issued_++;
    segments_.split(piece, [&](uint64_t address, uint64_t at, uint64_t bytes) {
        if (kind == FGG_DUMP)
            check(driver().cuMemcpyDtoHAsync_v2(piece.host + at, address, bytes, stream),
                  "cuMemcpyDtoHAsync");
        else
            check(driver().cuMemcpyHtoDAsync_v2(address, piece.host + at, bytes, stream),
                  "cuMemcpyHtoDAsync");
    });
    check(driver().cuEventRecord(event, stream), "cuEventRecord");
}

Piece CopyQueue::complete_oldest() {
    CUevent event = events_[(issued_ - flight_.size()) % events_.size()];
    check(driver().cuEventSynchronize(event), "cuEventSynchronize");
    const Piece piece = flight_.front();
    flight_.pop_front();
    return piece;
}

std::deque<Piece> CopyQueue::drain() {
    if (!flight_.empty())
        for (CUstream stream : streams_)
            driver().cuStreamSynchronize(stream);
    return std::exchange(flight_, {});
}

} // namespace fgg
