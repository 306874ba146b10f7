// File -> GPU memory. Threads read pieces and check their digests; the job's own thread copies what
// fits into the GPU.
#include "job.h"
#include "threads.h"

#include <algorithm>
#include <cstring>

namespace fgg {
namespace {

// Checked while still in the core's cache.
constexpr uint64_t kBlockBytes = 256ull << 10;

class Restore final : public Job {
  public:
    explicit Restore(const fgg_job_options& options)
        : Job(options, File::open(options.path, options.mode == FGG_RING && options.direct_io)) {}
    ~Restore() override { end(); }

  private:
    void prepare() override;
    void run() override;
    void wake() override { read_.close(); }

    void read_pieces(std::atomic<uint64_t>& next);
    void read(const Piece& piece);
    void check_chunks(const Piece& piece, uint64_t from, uint64_t to);
    void copy_in();

    PieceQueue read_;
};

void Restore::prepare() {
    const uint64_t bytes = file_.size();
    if (options_.mode == FGG_RING || !bytes)
        return;
    file_.map(bytes, false);
    prepare_mapping(bytes, CU_MEMHOSTREGISTER_READ_ONLY);
}

void Restore::run() {
    if (file_.size() != segments_.bytes())
        throw Failure(FGG_SHORT, file_.path() + " has " + std::to_string(file_.size()) +
                                     " bytes, not " + std::to_string(segments_.bytes()));
    std::thread readers([&] {
        guarded([&] {
            std::atomic<uint64_t> next{0};
            run_threads(options_.threads, [&](unsigned) { guarded([&] { read_pieces(next); }); });
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

void Restore::read_pieces(std::atomic<uint64_t>& next) {
    for (uint64_t count = piece_count();;) {
        const uint64_t index = next.fetch_add(1);
        if (index >= count || stop_)
            return;
        Piece piece = this->piece(index);
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
    const uint64_t block = file_.direct() ? piece.bytes : kBlockBytes;
    for (uint64_t at = 0; at < piece.bytes; at += block) {
        const uint64_t bytes = std::min(block, piece.bytes - at);
        // What is checked is what goes to the GPU, so a file changed meanwhile does not matter.
        if (!piece.direct && pages(piece) == Pages::populated)
            std::memcpy(piece.host + at, file_.mapping() + piece.offset + at, bytes);
        else if (!piece.direct)
            file_.read(piece.host + at, bytes, piece.offset + at);
        check_chunks(piece, at, at + bytes);
        file_bytes_ += bytes;
    }
}

void Restore::check_chunks(const Piece& piece, uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; at += FGG_CHUNK_BYTES) {
        const uint64_t chunk = (piece.offset + at) / FGG_CHUNK_BYTES;
        uint8_t found[FGG_DIGEST_BYTES];
        digest_(piece.host + at, std::min<uint64_t>(FGG_CHUNK_BYTES, to - at), found);
        if (std::memcmp(found, digests_ + chunk * FGG_DIGEST_BYTES, FGG_DIGEST_BYTES) == 0)
            continue;
        fail(FGG_DAMAGED, "chunk " + std::to_string(chunk) + " of " + file_.path() + " is damaged",
             chunk);
        throw_if_stopped();
    }
}

void Restore::copy_in() {
    CopyQueue queue(options_.context, options_.streams, segments_);
    try {
        while (copied_bytes_ < segments_.bytes()) {
            throw_if_stopped();
            Piece piece;
            if (!queue.full() && read_.pop(piece, queue.empty())) {
                queue.issue(piece, FGG_RESTORE);
                continue;
            }
            if (queue.empty())
                continue;
            piece = queue.complete_oldest();
            copied_bytes_ += piece.bytes;
            if (piece.direct)
                direct_bytes_ += piece.bytes;
            release(piece);
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
