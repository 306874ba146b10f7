// File -> GPU memory. Each thread reads a piece, checks its digests and issues its copy; there is
// no thread between them, so that a piece costs no wake-up.
#include "frames.h"
#include "job.h"
#include "threads.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

namespace fgg {
namespace {

// Checked while still in the core's cache.
constexpr uint64_t kBlockBytes = 256ull << 10;

class Restore final : public Job {
  public:
    explicit Restore(const fgg_job_options& options)
        : Job(options, File::open(options.path, options.direct_io && !options.frames)) {
        if (options.frames)
            frames_.emplace(options.frames, options.frame_count, options.plain_bytes);
    }
    ~Restore() override {
        end();
        driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(options_.context)); // for the queue
    }

  private:
    void prepare() override;
    void run() override;
    void wake() override { none_wanted_ = true; }

    void check_size() const;
    void read_pieces();
    char* take_slot();
    void complete_oldest();
    void read(const Piece& piece);
    void check_chunks(const char* host, uint64_t in_file, uint64_t bytes);

    std::optional<Frames> frames_; // of a packed file
    std::atomic<uint64_t> next_{0};
    std::mutex copying_; // held by whoever uses the copy queue
    // Ends with the job: to free what it has waits for the driver's lock, and a task for the fill.
    std::optional<CopyQueue> queue_;
    std::atomic<bool> none_wanted_{false}; // no more slots
};

void Restore::prepare() {
    file_.size(); // refuses what is no regular file
}

void Restore::run() {
    check_size();
    queue_.emplace(options_, segments_, pieces_, arena_.piece_bytes());
    try {
        const uint64_t threads = std::min<uint64_t>(options_.threads, pieces_.size());
        run_threads(static_cast<unsigned>(threads),
                    [&](unsigned) { guarded([&] { read_pieces(); }); });
        throw_if_stopped();
        reach(FGG_OUT);
        while (!queue_->empty())
            complete_oldest();
    } catch (...) {
        for (const Piece& piece : queue_->drain())
            release(piece);
        throw;
    }
}

void Restore::check_size() const {
    const uint64_t stored = frames_ ? frames_->stored_bytes() : file_bytes_wanted_;
    if (file_.size() != stored)
        throw MoverFailure(FGG_SHORT, file_.path() + " has " + std::to_string(file_.size()) +
                                          " bytes, not " + std::to_string(stored));
    if (frames_ && frames_->plain_bytes() != file_bytes_wanted_)
        throw MoverFailure(FGG_SHORT, file_.path() + " stands for " +
                                          std::to_string(frames_->plain_bytes()) + " bytes, not " +
                                          std::to_string(file_bytes_wanted_));
}

void Restore::read_pieces() {
    use_context();
    while (char* slot = take_slot()) {
        const uint64_t index = next_++;
        if (index + 1 >= pieces_.size()) {
            none_wanted_ = true;
            arena_.wake();
        }
        if (index >= pieces_.size()) {
            arena_.release(slot);
            return;
        }
        Piece piece = pieces_[index];
        piece.host = slot;
        std::unique_lock<std::mutex> guard(copying_, std::defer_lock);
        try {
            read(piece);
            guard.lock();
            throw_if_stopped();
            // Copies are looked at when their places are needed: by then they have ended, unless
            // the GPU is what everybody waits for.
            if (queue_->full())
                complete_oldest();
        } catch (...) {
            release(piece);
            throw;
        }
        queue_->issue(piece);
    }
}

// A free slot, or null when none is wanted any more.
char* Restore::take_slot() {
    while (!none_wanted_) {
        if (char* slot = arena_.acquire(false, none_wanted_))
            return slot;
        std::unique_lock<std::mutex> guard(copying_);
        if (queue_->empty()) {
            // All slots are with threads that read, or with other jobs.
            guard.unlock();
            return arena_.acquire(true, none_wanted_);
        }
        complete_oldest();
    }
    return nullptr;
}

void Restore::complete_oldest() {
    const CopyQueue::Copied copied = queue_->complete_oldest();
    count_copied(copied);
    release(copied.piece);
}

void Restore::read(const Piece& piece) {
    segments_.runs(piece, [&](uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
        const uint64_t block = file_.direct() || frames_ ? bytes : kBlockBytes;
        for (uint64_t at = 0; at < bytes; at += block) {
            char* host = piece.host + in_piece + at;
            const uint64_t length = std::min(block, bytes - at);
            // What is checked is what goes to the GPU, so a file changed meanwhile does not matter.
            if (frames_)
                frames_->read(file_, host, length, in_file + at);
            else
                file_.read(host, length, in_file + at);
            check_chunks(host, in_file + at, length);
            file_bytes_ += length;
        }
    });
}

void Restore::check_chunks(const char* host, uint64_t in_file, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES) {
        uint8_t found[FGG_DIGEST_BYTES];
        digest_(host + at, std::min<uint64_t>(FGG_CHUNK_BYTES, bytes - at), found);
        const uint64_t chunk = (in_file + at) / FGG_CHUNK_BYTES;
        if (std::memcmp(found, digests_ + chunk * FGG_DIGEST_BYTES, FGG_DIGEST_BYTES) == 0)
            continue;
        fail(FGG_DAMAGED, "chunk " + std::to_string(chunk) + " of " + file_.path() + " is damaged",
             chunk);
        throw_if_stopped();
    }
}

} // namespace

std::unique_ptr<Job> make_restore(const fgg_job_options& options) {
    return std::make_unique<Restore>(options);
}

} // namespace fgg
