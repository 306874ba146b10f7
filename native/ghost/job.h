// What a dump and a restore have in common: the thread that runs it, its stages, progress and first
// failure.
#pragma once

#include "arena.h"
#include "copy_queue.h"
#include "digest.h"
#include "file.h"

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace fgg {

class Job {
  public:
    static std::unique_ptr<Job> create(const fgg_job_options& options);
    virtual ~Job() = default;
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    void start(const fgg_segment* segments, uint64_t count, uint8_t* digests,
               uint64_t digest_count);
    void progress(fgg_progress& out) const;
    int wait(fgg_stage stage, int64_t timeout_ms) const;
    void cancel();
    // Cancels and joins; before the derived object goes away.
    void end();
    const char* error_text() const;

  protected:
    explicit Job(const fgg_job_options& options, File file);

    virtual void prepare() {}
    virtual void run() = 0;
    // Lets threads that wait inside run() see that it is over; those that wait for the arena are
    // woken after it.
    virtual void wake() {}

    void use_context() const;
    void count_copied(const CopyQueue::Copied& copied);
    void fail(fgg_status status, const std::string& text, uint64_t chunk = 0);
    // Runs work and turns what it throws into the job's failure.
    void guarded(const std::function<void()>& work);
    void throw_if_stopped() const;
    void reach(fgg_stage stage);
    bool hurried() const { return hurry_ || stop_; }

    void release(const Piece& piece);

    const fgg_job_options options_;
    Arena& arena_;
    File file_;
    Segments segments_;
    std::vector<Piece> pieces_; // of the segments
    uint64_t file_bytes_wanted_ = 0;
    uint8_t* digests_ = nullptr;
    const DigestFunction digest_ = digest_functions().whole;
    std::atomic<bool> stop_{false};
    std::atomic<uint64_t> ready_bytes_{0}, copied_bytes_{0}, file_bytes_{0}, direct_bytes_{0},
        gathered_bytes_{0};

  private:
    void body();
    uint64_t checked_file_bytes(const Segments& segments, const uint8_t* digests,
                                uint64_t digest_count) const;
    bool await_start();
    uint64_t since_ns(std::chrono::steady_clock::time_point start) const;

    std::atomic<bool> hurry_{false};

    mutable std::mutex lock_;
    mutable std::condition_variable changed_;
    bool started_ = false;
    bool finished_ = false;
    unsigned stage_ = 0; // highest reached, plus 1
    fgg_status status_ = FGG_OK;
    std::string text_;
    uint64_t chunk_ = 0;
    std::chrono::steady_clock::time_point created_at_, started_at_;
    uint64_t stage_ns_[3] = {};
    std::thread thread_;
};

std::unique_ptr<Job> make_dump(const fgg_job_options& options);
std::unique_ptr<Job> make_restore(const fgg_job_options& options);

} // namespace fgg
