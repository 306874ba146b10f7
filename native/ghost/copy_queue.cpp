#include "copy_queue.h"

#include <algorithm>
#include <utility>

namespace fgg {
namespace {

// Enough that a stream never waits for the host between two copies.
constexpr unsigned kInFlightPerStream = 3;

} // namespace

CopyQueue::CopyQueue(const fgg_job_options& options, const Segments& segments,
                     const std::vector<Piece>& pieces, uint64_t piece_bytes)
    : segments_(segments), kind_(static_cast<fgg_kind>(options.kind)) {
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(options.context)),
          "cuCtxSetCurrent");
    try {
        for (unsigned i = 0; i < options.streams; i++) {
            CUstream stream;
            check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
            streams_.push_back(stream);
        }
        for (unsigned i = 0; i < options.streams * kInFlightPerStream; i++) {
            CUevent event;
            check(driver().cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
                  "cuEventCreate");
            events_.push_back(event);
        }
        if (options.kernels)
            prepare_gather(options, pieces, piece_bytes);
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
    gather_.reset();
    for (CUevent event : events_)
        driver().cuEventDestroy_v2(event);
    for (CUstream stream : streams_)
        driver().cuStreamDestroy_v2(stream);
}

void CopyQueue::prepare_gather(const fgg_job_options& options, const std::vector<Piece>& pieces,
                               uint64_t piece_bytes) {
    if (std::none_of(pieces.begin(), pieces.end(), Gather::worthwhile))
        return;
    const auto& kernels = *reinterpret_cast<const Kernels*>(options.kernels);
    auto gather = std::make_unique<Gather>(kernels, segments_, piece_bytes);
    // On a full GPU pieces are copied part by part.
    if (gather->take(static_cast<unsigned>(events_.size()), options.streams))
        gather_ = std::move(gather);
}

bool CopyQueue::gathers(const Piece& piece) const {
    return gather_ && Gather::worthwhile(piece);
}

void CopyQueue::copy(const Piece& piece, unsigned number, unsigned lane) {
    CUstream stream = streams_[lane];
    if (gathers(piece)) {
        if (kind_ == FGG_DUMP)
            gather_->out(piece, number, lane, stream);
        else
            gather_->in(piece, number, lane, stream);
        return;
    }
    segments_.split(piece, [&](uint64_t address, uint64_t, uint64_t in_piece, uint64_t bytes) {
        char* host = piece.host + in_piece;
        if (kind_ == FGG_DUMP)
            check(driver().cuMemcpyDtoHAsync_v2(host, address, bytes, stream), "cuMemcpyDtoHAsync");
        else
            check(driver().cuMemcpyHtoDAsync_v2(address, host, bytes, stream), "cuMemcpyHtoDAsync");
    });
}

void CopyQueue::issue(const Piece& piece) {
    const unsigned lane = static_cast<unsigned>(issued_ % streams_.size());
    const unsigned number = static_cast<unsigned>(issued_ % events_.size());
    // In flight before the first call: a failure in the middle leaves a copy that drain() must wait
    // for.
    flight_.push_back(piece);
    issued_++;
    copy(piece, number, lane);
    check(driver().cuEventRecord(events_[number], streams_[lane]), "cuEventRecord");
}

CopyQueue::Copied CopyQueue::complete_oldest() {
    const unsigned number = static_cast<unsigned>((issued_ - flight_.size()) % events_.size());
    check(driver().cuEventSynchronize(events_[number]), "cuEventSynchronize");
    Copied copied;
    copied.piece = flight_.front();
    copied.gathered = gathers(copied.piece);
    flight_.pop_front();
    return copied;
}

std::deque<Piece> CopyQueue::drain() {
    if (!flight_.empty())
        for (CUstream stream : streams_)
            driver().cuStreamSynchronize(stream);
    return std::exchange(flight_, {});
}

} // namespace fgg
