// File -> GPU memory. Threads read pieces and check their digests; the job's own thread copies what
// fits into the GPU.
#include "frames.h"
#include "job.h"
#include "threads.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace fgg {
namespace {

// Checked while still in the core's cache.
constexpr uint64_t kBlockBytes = 256ull << 10;

// Numbers of pieces, taken from both ends by any number of threads, each once.
class Ends {
  public:
    explicit Ends(uint64_t count) : count_(count) {}
    // False when none is left.
    bool take(bool from_back, uint64_t& index) {
        if (taken_.fetch_add(1) >= count_)
            return false;
        index = from_back ? count_ - 1 - back_.fetch_add(1) : front_.fetch_add(1);
        return true;
    }

  private:
    const uint64_t count_;
    std::atomic<uint64_t> taken_{0}, front_{0}, back_{0};
};

class Restore final : public Job {
  public:
    explicit Restore(const fgg_job_options& options)
        : Job(options, File::open(options.path, options.mode == FGG_RING && options.direct_io &&
                                                    !options.frames)) {
        if (options.frames)
            frames_.emplace(options.frames, options.frame_count, options.plain_bytes);
    }
    ~Restore() override { end(); }

  private:
    void prepare() override;
    void run() override;
    void wake() override { read_.close(); }

    void read_pieces(Ends& left, bool pins);
    void read(const Piece& piece);
    void read_run(const Piece& piece, uint64_t in_file, uint64_t in_piece, uint64_t bytes);
    void check_chunks(const char* host, uint64_t in_file, uint64_t bytes);
    void check_digests(const CopyQueue::Copied& copied);
    void check_digest(const uint8_t* found, uint64_t chunk);
    void copy_in();

    std::optional<Frames> frames_; // of a packed file
    PieceQueue read_;
};

void Restore::prepare() {
    const uint64_t bytes = file_.size();
    if (options_.mode == FGG_RING || !bytes)
        return;
    file_.map(bytes, false);
    cut_slices(bytes, CU_MEMHOSTREGISTER_READ_ONLY);
    if (!options_.prepare_behind)
        prepare_slices();
}

void Restore::run() {
    const uint64_t stored = frames_ ? frames_->stored_bytes() : file_bytes_wanted_;
    if (file_.size() != stored)
        throw Failure(FGG_SHORT, file_.path() + " has " + std::to_string(file_.size()) +
                                     " bytes, not " + std::to_string(stored));
    if (frames_ && frames_->plain_bytes() != file_bytes_wanted_)
        throw Failure(FGG_SHORT, file_.path() + " stands for " +
                                     std::to_string(frames_->plain_bytes()) + " bytes, not " +
                                     std::to_string(file_bytes_wanted_));
    std::thread readers([&] {
        guarded([&] {
            Ends left(pieces_.size());
            run_threads(options_.threads, [&](unsigned i) {
                guarded([&] { read_pieces(left, i < options_.prepare_behind); });
            });
            throw_if_stopped();
            reach(FGG_OUT);
        });
        read_.close();
    });
    guarded([&] { copy_in(); });
    readers.join();
    Piece left;
    while (read_.pop(left, false))
        release(left);
}

void Restore::read_pieces(Ends& left, bool pins) {
    if (pins)
        use_context();
    // Threads that pin start at the other end than those that read, so that both keep on until they
    // meet, whichever is faster.
    for (uint64_t index; !stop_ && left.take(pins, index);) {
        Piece piece = pieces_[index];
        if (pins)
            prepare_slice(piece.offset / arena_.piece_bytes());
        piece.direct = pages(piece) == Pages::registered;
        piece.host = piece.direct ? file_.mapping() + piece.offset : arena_.acquire(true, stop_);
        if (!piece.host)
            return;
        try {
            read(piece);
        } catch (...) {
            release(piece);
            throw;
        }
        read_.push(piece);
    }
}

void Restore::read(const Piece& piece) {
    if (piece.direct && options_.check_on_gpu)
        return;
    segments_.runs(piece, [&](uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
        const bool whole = file_.direct() || frames_ || options_.check_on_gpu;
        const uint64_t block = whole ? bytes : kBlockBytes;
        for (uint64_t at = 0; at < bytes; at += block)
            read_run(piece, in_file + at, in_piece + at, std::min(block, bytes - at));
    });
}

void Restore::read_run(const Piece& piece, uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
    char* host = piece.at(in_file, in_piece);
    // What is checked is what goes to the GPU, so a file changed meanwhile does not matter.
    if (!piece.direct && pages(piece) == Pages::populated)
        std::memcpy(host, file_.mapping() + in_file, bytes);
    else if (frames_)
        frames_->read(file_, host, bytes, in_file);
    else if (!piece.direct)
        file_.read(host, bytes, in_file);
    if (options_.check_on_gpu)
        return;
    check_chunks(host, in_file, bytes);
    file_bytes_ += bytes;
}

void Restore::check_chunks(const char* host, uint64_t in_file, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES) {
        uint8_t found[FGG_DIGEST_BYTES];
        digest_(host + at, std::min<uint64_t>(FGG_CHUNK_BYTES, bytes - at), found);
        check_digest(found, (in_file + at) / FGG_CHUNK_BYTES);
    }
}

void Restore::check_digests(const CopyQueue::Copied& copied) {
    const uint8_t* found = copied.digests;
    segments_.split(copied.piece, [&](uint64_t, uint64_t in_file, uint64_t, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES, found += FGG_DIGEST_BYTES)
            check_digest(found, (in_file + at) / FGG_CHUNK_BYTES);
    });
    file_bytes_ += copied.piece.bytes;
}

void Restore::check_digest(const uint8_t* found, uint64_t chunk) {
    if (std::memcmp(found, digests_ + chunk * FGG_DIGEST_BYTES, FGG_DIGEST_BYTES) == 0)
        return;
    fail(FGG_DAMAGED, "chunk " + std::to_string(chunk) + " of " + file_.path() + " is damaged",
         chunk);
    throw_if_stopped();
}

void Restore::copy_in() {
    CopyQueue queue(options_, segments_, pieces_, arena_.piece_bytes());
    try {
        while (copied_bytes_ < segments_.bytes()) {
            throw_if_stopped();
            Piece piece;
            if (!queue.full() && read_.pop(piece, queue.empty())) {
                queue.issue(piece);
                continue;
            }
            if (queue.empty())
                continue;
            const CopyQueue::Copied copied = queue.complete_oldest();
            count_copied(copied);
            release(copied.piece);
            if (options_.check_on_gpu)
                check_digests(copied);
        }
    } catch (...) {
        for (const Piece& piece : queue.drain())
            release(piece);
        throw;
    }
}

} // namespace

std::unique_ptr<Job> make_restore(const fgg_job_options& options) {
    return std::make_unique<Restore>(options);
}

} // namespace fgg
