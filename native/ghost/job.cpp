#include "job.h"

#include "driver.h"

namespace fgg {
namespace {

void check_options(const fgg_job_options& options) {
    if (!options.path || !options.arena || !options.threads || !options.streams ||
        options.mode > FGG_REGISTERED || options.kind > FGG_RESTORE)
        throw MoverFailure(FGG_ARGUMENT, "a job needs a path, an arena, a thread and a stream");
    if (options.kernels &&
        reinterpret_cast<const Kernels*>(options.kernels)->context() != options.context)
        throw MoverFailure(FGG_ARGUMENT,
                           "the kernels are loaded in another context than the job's");
    if (options.given_digests && options.kind != FGG_DUMP)
        throw MoverFailure(FGG_ARGUMENT, "given_digests is for dumps");
    if (options.mode != FGG_RING && options.kind != FGG_DUMP)
        throw MoverFailure(FGG_ARGUMENT, "a restore is in ring mode");
    if (options.frames && options.kind != FGG_RESTORE)
        throw MoverFailure(FGG_ARGUMENT, "frames are for restores");
}

uint64_t chunks_of(uint64_t bytes) {
    return (bytes + FGG_CHUNK_BYTES - 1) / FGG_CHUNK_BYTES;
}

} // namespace

std::unique_ptr<Job> Job::create(const fgg_job_options& options) {
    check_options(options);
    driver();
    std::unique_ptr<Job> job =
        options.kind == FGG_DUMP ? make_dump(options) : make_restore(options);
    job->thread_ = std::thread(&Job::body, job.get());
    return job;
}

Job::Job(const fgg_job_options& options, File file)
    : options_(options), arena_(*reinterpret_cast<Arena*>(options.arena)), file_(std::move(file)),
      created_at_(std::chrono::steady_clock::now()) {}

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
    {
        std::lock_guard<std::mutex> guard(lock_);
        finished_ = true;
    }
    changed_.notify_all();
}

void Job::guarded(const std::function<void()>& work) {
    try {
        work();
    } catch (const MoverFailure& failure) {
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
    wake();
    arena_.wake();
}

void Job::throw_if_stopped() const {
    if (stop_)
        throw MoverFailure(FGG_CANCELLED, "cancelled");
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

uint64_t Job::checked_file_bytes(const Segments& segments, const uint8_t* digests,
                                 uint64_t digest_count) const {
    const uint64_t chunks = chunks_of(segments.end());
    if (options_.kernels && !segments.whole_chunks())
        throw MoverFailure(FGG_ARGUMENT, "with kernels, segments are whole chunks at whole chunks");
    if (options_.kind == FGG_DUMP && segments.gaps())
        throw MoverFailure(FGG_ARGUMENT, "the segments of a dump leave a gap in the file");
    const bool gap_at_end = options_.kind == FGG_RESTORE && digest_count > chunks;
    if ((digest_count != chunks && !gap_at_end) ||
        (digest_count && !digests && !options_.given_digests))
        throw MoverFailure(FGG_ARGUMENT, "one digest a chunk of the segments is needed, not " +
                                             std::to_string(digest_count));
    if (!gap_at_end)
        return segments.end();
    if (segments.end() % FGG_CHUNK_BYTES || digest_count > INT64_MAX / FGG_CHUNK_BYTES)
        throw MoverFailure(FGG_ARGUMENT,
                           "the gap at the file's end does not start at a whole chunk");
    return digest_count * FGG_CHUNK_BYTES;
}

void Job::start(const fgg_segment* segments, uint64_t count, uint8_t* digests,
                uint64_t digest_count) {
    Segments list(segments, count);
    const uint64_t file_bytes = checked_file_bytes(list, digests, digest_count);
    std::vector<Piece> pieces = list.pieces(arena_.piece_bytes());
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (started_)
            throw MoverFailure(FGG_ARGUMENT, "the job is already started");
        segments_ = std::move(list);
        pieces_ = std::move(pieces);
        file_bytes_wanted_ = file_bytes;
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
    out.bytes_gathered = gathered_bytes_;
    out.prepare_ns = stage_ns_[FGG_PREPARED];
    out.out_ns = stage_ns_[FGG_OUT];
    out.done_ns = stage_ns_[FGG_DONE];
    out.damaged_chunk = chunk_;
}

int Job::wait(fgg_stage stage, int64_t timeout_ms) const {
    std::unique_lock<std::mutex> guard(lock_);
    if (!started_ && stage != FGG_PREPARED && status_ == FGG_OK)
        throw MoverFailure(FGG_ARGUMENT, "the job is not started");
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

void Job::use_context() const {
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(options_.context)),
          "cuCtxSetCurrent");
}

void Job::count_copied(const CopyQueue::Copied& copied) {
    copied_bytes_ += copied.piece.bytes;
    if (copied.piece.direct)
        direct_bytes_ += copied.piece.bytes;
    if (copied.gathered)
        gathered_bytes_ += copied.piece.bytes;
}

void Job::release(const Piece& piece) {
    if (!piece.direct)
        arena_.release(piece.host);
}

} // namespace fgg
