// GPU memory -> file. The job's own thread copies pieces out of the GPU; the others digest and
// store them behind it.
#include "job.h"
#include "threads.h"

#include <algorithm>
#include <cstring>

namespace fgg {
namespace {

// Digested and written while still in the core's cache.
constexpr uint64_t kBlockBytes = 256ull << 10;
constexpr uint64_t kHugePage = 2ull << 20;
constexpr uint64_t kReserveBytes = 256ull << 20;

// Pieces that have left the GPU, on their way to the threads that store them.
class PieceQueue {
  public:
    void push(const Piece& piece) {
        {
            std::lock_guard<std::mutex> guard(lock_);
            pieces_.push_back(piece);
        }
        changed_.notify_one();
    }
    // False when there is none: at once, or with wait after close().
    bool pop(Piece& piece, bool wait) {
        std::unique_lock<std::mutex> guard(lock_);
        if (wait)
            changed_.wait(guard, [&] { return closed_ || !pieces_.empty(); });
        if (pieces_.empty())
            return false;
        piece = pieces_.front();
        pieces_.pop_front();
        return true;
    }
    void close() {
        {
            std::lock_guard<std::mutex> guard(lock_);
            closed_ = true;
        }
        changed_.notify_all();
    }

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<Piece> pieces_;
    bool closed_ = false;
};

class Dump final : public Job {
  public:
    explicit Dump(const fgg_job_options& options)
        : Job(options, File::create(options.path, options.mode == FGG_RING && options.direct_io)),
          can_register_(options.mode == FGG_REGISTERED) {}
    ~Dump() override {
        end();
        guarded([&] { let_go_of_pages(); });
    }

  private:
    void prepare() override;
    void run() override;
    void wake() override { stored_.close(); }

    // The mapping is prepared in slices of a piece each, on all threads, until a start or a cancel.
    void prepare_slices(uint64_t bytes);
    bool prepare_slice(uint64_t index, uint64_t bytes);
    void let_go_of_pages();
    // The state of the piece's pages: only a piece that lies wholly in the mapping has one.
    enum class Pages : uint8_t { none, populated, registered };
    Pages pages(const Piece& piece) const;

    void copy_out();
    bool place(Piece& piece, bool wait);
    void store_pieces();
    void store(const Piece& piece);
    void digest(const Piece& piece, uint64_t from, uint64_t to);

    std::atomic<bool> can_register_;
    std::vector<std::atomic<Pages>> slices_;
    PieceQueue stored_;
};

void Dump::prepare() {
    if (options_.mode == FGG_RING) {
        for (uint64_t at = 0; at < options_.expected_bytes && !hurried(); at += kReserveBytes) {
            const uint64_t bytes = std::min(kReserveBytes, options_.expected_bytes - at);
            if (!file_.reserve(at, bytes))
                break;
            ready_bytes_ += bytes;
        }
        return;
    }
    // Parallel writes to one tmpfs file wait for its lock; stores to its mapped pages do not.
    const uint64_t bytes = (options_.expected_bytes + kHugePage - 1) / kHugePage * kHugePage;
    if (!bytes)
        return;
    file_.resize(bytes);
    file_.map(bytes);
    prepare_slices(bytes);
}

void Dump::prepare_slices(uint64_t bytes) {
    slices_ =
        std::vector<std::atomic<Pages>>((bytes + arena_.piece_bytes() - 1) / arena_.piece_bytes());
    std::atomic<uint64_t> next{0};
    run_threads(options_.threads, [&](unsigned) {
        guarded([&] {
            if (can_register_)
                use_context();
            while (!hurried()) {
                const uint64_t index = next.fetch_add(1);
                if (index >= slices_.size() || !prepare_slice(index, bytes))
                    return;
            }
        });
    });
    throw_if_stopped();
}

// False where the kernel cannot.
bool Dump::prepare_slice(uint64_t index, uint64_t bytes) {
    const uint64_t offset = index * arena_.piece_bytes();
    const uint64_t length = std::min(arena_.piece_bytes(), bytes - offset);
    if (!file_.populate(offset, length))
        return false;
    Pages state = Pages::populated;
    // Kernels refuse to pin pages of most file systems; then the arena stands between.
    if (can_register_) {
        if (driver().cuMemHostRegister_v2(file_.mapping() + offset, length, 0) == CUDA_SUCCESS)
            state = Pages::registered;
        else
            can_register_ = false;
    }
    slices_[index] = state;
    ready_bytes_ += length;
    return true;
}

void Dump::let_go_of_pages() {
    if (options_.mode != FGG_REGISTERED)
        return;
    // By one thread, as at the end of the process, it takes longer than the copy. It holds up
    // whoever else maps or unmaps memory, and the driver frees what is left only behind it.
    std::atomic<uint64_t> next{0};
    run_threads(options_.threads, [&](unsigned) {
        use_context();
        for (uint64_t i; (i = next.fetch_add(1)) < slices_.size();) {
            const uint64_t offset = i * arena_.piece_bytes();
            if (slices_[i] == Pages::registered)
                driver().cuMemHostUnregister(file_.mapping() + offset);
            file_.leave(offset, arena_.piece_bytes());
        }
    });
}

Dump::Pages Dump::pages(const Piece& piece) const {
    const uint64_t index = piece.offset / arena_.piece_bytes();
    if (index >= slices_.size() || piece.end > file_.mapped())
        return Pages::none;
    return slices_[index];
}

void Dump::run() {
    std::thread copier([&] {
        guarded([&] {
            copy_out();
            reach(FGG_OUT);
        });
        stored_.close();
    });
    guarded([&] { run_threads(options_.threads, [&](unsigned) { store_pieces(); }); });
    copier.join();
    Piece left;
    while (stored_.pop(left, false))
        release(left);
    throw_if_stopped();
    file_.resize(segments_.bytes());
}

void Dump::copy_out() {
    CopyQueue queue(options_, segments_, pieces_, arena_.piece_bytes());
    try {
        uint64_t next = 0;
        const uint64_t count = pieces_.size();
        while (next < count || !queue.empty()) {
            throw_if_stopped();
            if (next < count && !queue.full()) {
                Piece piece = pieces_[next];
                if (place(piece, queue.empty())) {
                    queue.issue(piece);
                    next++;
                    continue;
                }
                if (queue.empty())
                    continue;
            }
            const CopyQueue::Copied copied = queue.complete_oldest();
            count_copied(copied);
            stored_.push(copied.piece);
        }
    } catch (...) {
        for (const Piece& piece : queue.drain())
            release(piece);
        throw;
    }
}

bool Dump::place(Piece& piece, bool wait) {
    piece.direct = pages(piece) == Pages::registered;
    piece.host = piece.direct ? file_.mapping() + piece.offset : arena_.acquire(wait, stop_);
    return piece.host;
}

void Dump::store_pieces() {
    Piece piece;
    while (stored_.pop(piece, true)) {
        if (!stop_)
            guarded([&] { store(piece); });
        release(piece);
    }
}

void Dump::digest(const Piece& piece, uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; at += FGG_CHUNK_BYTES) {
        const uint64_t chunk = (piece.offset + at) / FGG_CHUNK_BYTES;
        digest_(piece.host + at, std::min<uint64_t>(FGG_CHUNK_BYTES, to - at),
                digests_ + chunk * FGG_DIGEST_BYTES);
    }
}

void Dump::store(const Piece& piece) {
    if (piece.direct && options_.given_digests) {
        file_bytes_ += piece.bytes;
        return;
    }
    // Pages that were not prepared in time are populated now: still in parallel, unlike writes.
    const bool mapped = pages(piece) != Pages::none ||
                        (piece.end <= file_.mapped() && file_.populate(piece.offset, piece.bytes));
    const uint64_t block = file_.direct() || options_.given_digests ? piece.bytes : kBlockBytes;
    for (uint64_t at = 0; at < piece.bytes; at += block) {
        const uint64_t bytes = std::min(block, piece.bytes - at);
        if (!options_.given_digests)
            digest(piece, at, at + bytes);
        if (file_.direct()) {
            // The end of the last piece is padded, and cut off by the last resize.
            const uint64_t padded =
                (bytes + File::kAlignment - 1) / File::kAlignment * File::kAlignment;
            std::memset(piece.host + bytes, 0, padded - bytes);
            file_.write(piece.host, padded, piece.offset);
        } else if (!mapped) {
            file_.write(piece.host + at, bytes, piece.offset + at);
        } else if (!piece.direct) {
            std::memcpy(file_.mapping() + piece.offset + at, piece.host + at, bytes);
        }
        file_bytes_ += bytes;
    }
}

} // namespace

std::unique_ptr<Job> make_dump(const fgg_job_options& options) {
    return std::make_unique<Dump>(options);
}

} // namespace fgg
