#include "job.h"

#include "driver.h"
#include "threads.h"

#include <algorithm>

namespace fgg {

void PieceQueue::push(const Piece& piece) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        pieces_.push_back(piece);
    }
    changed_.notify_one();
}

bool PieceQueue::pop(Piece& piece, bool wait) {
    std::unique_lock<std::mutex> guard(lock_);
    if (wait)
        changed_.wait(guard, [&] { return closed_ || !pieces_.empty(); });
    if (pieces_.empty())
        return false;
    piece = pieces_.front();
    pieces_.pop_front();
    return true;
}

void PieceQueue::close() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        closed_ = true;
    }
    changed_.notify_all();
}

std::unique_ptr<Job> Job::create(const fgg_job_options& options) {
    if (!options.path || !options.arena || !options.threads || !options.streams ||
        options.mode > FGG_REGISTERED || options.kind > FGG_RESTORE || options.reserved)
        throw Failure(FGG_ARGUMENT, "a job needs a path, an arena, a thread and a stream");
    driver();
    std::unique_ptr<Job> job =
        options.kind == FGG_DUMP ? make_dump(options) : make_restore(options);
    job->thread_ = std::thread(&Job::body, job.get());
    return job;
}

Job::Job(const fgg_job_options& options, File file)
    : options_(options), arena_(*reinterpret_cast<Arena*>(options.arena)), file_(std::move(file)),
      can_register_(options.mode == FGG_REGISTERED), created_at_(std::chrono::steady_clock::now()) {
}

void Job::body() {
    guarded([&] {
        prepare();
        reach(FGG_PREPARED);
        if (!await_start())
            return;
        run();
        throw_if_stopped();
        reach(FGG_DONE);
    });
    guarded([&] { unregister(); });
    file_.unmap();
    {
        std::lock_guard<std::mutex> guard(lock_);
        finished_ = true;
    }
    changed_.notify_all();
}

void Job::guarded(const std::function<void()>& work) {
    try {
        work();
    } catch (const Failure& failure) {
        fail(failure.status(), failure.what());
    } catch (const std::exception& error) {
        fail(FGG_SYSTEM, error.what());
    }
}

void Job::fail(fgg_status status, const std::string& text, uint64_t chunk) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        // What comes after the first failure is its consequence; after the last stage nothing can
        // be undone.
        if (status_ == FGG_OK && stage_ <= FGG_DONE) {
            status_ = status;
            text_ = text;
            chunk_ = chunk;
        }
        stop_ = true;
    }
    changed_.notify_all();
    arena_.wake();
    wake();
}

void Job::throw_if_stopped() const {
    if (stop_)
        throw Failure(FGG_CANCELLED, "cancelled");
}

void Job::reach(fgg_stage stage) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        stage_ = stage + 1u;
        stage_ns_[stage] = since_ns(stage == FGG_PREPARED ? created_at_ : started_at_);
    }
    changed_.notify_all();
}

uint64_t Job::since_ns(std::chrono::steady_clock::time_point start) const {
    const auto span = std::chrono::steady_clock::now() - start;
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(span).count());
}

bool Job::await_start() {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [&] { return started_ || stop_; });
    return !stop_;
}

void Job::start(const fgg_segment* segments, uint64_t count, uint8_t* digests,
                uint64_t digest_count) {
    Segments list(segments, count);
    if (digest_count != (list.bytes() + FGG_CHUNK_BYTES - 1) / FGG_CHUNK_BYTES ||
        (digest_count && !digests))
        throw Failure(FGG_ARGUMENT, "one digest a chunk of the segments is needed, not " +
                                        std::to_string(digest_count));
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (started_)
            throw Failure(FGG_ARGUMENT, "the job is already started");
        segments_ = std::move(list);
        digests_ = digests;
        started_at_ = std::chrono::steady_clock::now();
        started_ = true;
    }
    hurry_ = true;
    changed_.notify_all();
}

void Job::progress(fgg_progress& out) const {
    std::lock_guard<std::mutex> guard(lock_);
    out = fgg_progress{};
    out.stage = stage_;
    out.status = status_;
    out.bytes_total = started_ ? segments_.bytes() : 0;
    out.bytes_ready = ready_bytes_;
    out.bytes_copied = copied_bytes_;
    out.bytes_file = file_bytes_;
    out.bytes_direct = direct_bytes_;
    out.prepare_ns = stage_ns_[FGG_PREPARED];
    out.out_ns = stage_ns_[FGG_OUT];
    out.done_ns = stage_ns_[FGG_DONE];
    out.damaged_chunk = chunk_;
}

int Job::wait(fgg_stage stage, int64_t timeout_ms) const {
    std::unique_lock<std::mutex> guard(lock_);
    if (!started_ && stage != FGG_PREPARED && status_ == FGG_OK)
        throw Failure(FGG_ARGUMENT, "the job is not started");
    const auto reached = [&] {
        return finished_ || (status_ == FGG_OK && stage_ > static_cast<unsigned>(stage));
    };
    if (timeout_ms < 0)
        changed_.wait(guard, reached);
    else if (!changed_.wait_for(guard, std::chrono::milliseconds(timeout_ms), reached))
        return FGG_PENDING;
    return status_;
}

void Job::cancel() {
    fail(FGG_CANCELLED, "cancelled");
}

void Job::end() {
    cancel();
    if (thread_.joinable())
        thread_.join();
}

const char* Job::error_text() const {
    // The text is set once, so it may be read after the lock is gone.
    std::lock_guard<std::mutex> guard(lock_);
    return text_.c_str();
}

void Job::prepare_mapping(uint64_t bytes, unsigned register_flags) {
    if (!bytes)
        return;
    slices_ =
        std::vector<std::atomic<Pages>>((bytes + arena_.piece_bytes() - 1) / arena_.piece_bytes());
    std::atomic<uint64_t> next{0};
    run_threads(options_.threads,
                [&](unsigned) { guarded([&] { prepare_slices(next, bytes, register_flags); }); });
    throw_if_stopped();
}

void Job::prepare_slices(std::atomic<uint64_t>& next, uint64_t bytes, unsigned register_flags) {
    if (can_register_)
        check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(options_.context)),
              "cuCtxSetCurrent");
    while (!hurried()) {
        const uint64_t index = next.fetch_add(1);
        if (index >= slices_.size())
            return;
        const uint64_t offset = index * arena_.piece_bytes();
        const uint64_t length = std::min(arena_.piece_bytes(), bytes - offset);
        if (!file_.populate(offset, length))
            return;
        Pages state = Pages::populated;
        // Kernels refuse to pin pages of most file systems; then the arena stands between.
        if (can_register_) {
            if (driver().cuMemHostRegister_v2(file_.mapping() + offset, length, register_flags) ==
                CUDA_SUCCESS)
                state = Pages::registered;
            else
                can_register_ = false;
        }
        slices_[index] = state;
        ready_bytes_ += length;
    }
}

void Job::unregister() {
    if (options_.mode != FGG_REGISTERED)
        return;
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(options_.context)),
          "cuCtxSetCurrent");
    for (uint64_t i = 0; i < slices_.size(); i++)
        if (slices_[i] == Pages::registered)
            driver().cuMemHostUnregister(file_.mapping() + i * arena_.piece_bytes());
}

uint64_t Job::piece_count() const {
    return (segments_.bytes() + arena_.piece_bytes() - 1) / arena_.piece_bytes();
}

Piece Job::piece(uint64_t index) const {
    Piece piece;
    piece.offset = index * arena_.piece_bytes();
    piece.bytes = std::min(arena_.piece_bytes(), segments_.bytes() - piece.offset);
    return piece;
}

Job::Pages Job::pages(const Piece& piece) const {
    const uint64_t index = piece.offset / arena_.piece_bytes();
    if (index >= slices_.size() || piece.offset + piece.bytes > file_.mapped())
        return Pages::none;
    return slices_[index];
}

void Job::release(const Piece& piece) {
    if (!piece.direct)
        arena_.release(piece.host);
}

} // namespace fgg
