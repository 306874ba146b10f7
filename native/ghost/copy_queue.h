// Copies between host and GPU memory, in flight on several streams of one context, completed in the
// order of issue.
#pragma once

#include "gather.h"

#include <deque>
#include <memory>

namespace fgg {

// Used by one thread at a time, in which the job's context is current.
class CopyQueue {
  public:
    struct Copied {
        Piece piece;
        bool gathered = false;
    };

    CopyQueue(const fgg_job_options& options, const Segments& segments,
              const std::vector<Piece>& pieces, uint64_t piece_bytes);
    ~CopyQueue();
    CopyQueue(const CopyQueue&) = delete;
    CopyQueue& operator=(const CopyQueue&) = delete;

    bool full() const { return flight_.size() == events_.size(); }
    bool empty() const { return flight_.empty(); }
    void issue(const Piece& piece);
    Copied complete_oldest();
    // Ends all copies, whatever their result, and gives back what was in flight.
    std::deque<Piece> drain();

  private:
    void prepare_gather(const fgg_job_options& options, const std::vector<Piece>& pieces,
                        uint64_t piece_bytes);
    bool gathers(const Piece& piece) const;
    void copy(const Piece& piece, unsigned number, unsigned lane);
    void release();

    const Segments& segments_;
    const fgg_kind kind_;
    std::vector<CUstream> streams_;
    std::vector<CUevent> events_; // used in turn
    std::unique_ptr<Gather> gather_;
    std::deque<Piece> flight_;
    uint64_t issued_ = 0;
};

} // namespace fgg
