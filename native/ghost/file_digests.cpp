#include "file_digests.h"
#include "digest.h"
#include "failure.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <optional>
#include <sys/stat.h>
#include <unistd.h>

namespace fgg {
namespace {

// A buffer of this size is still in the core's cache when it is digested.
constexpr uint64_t kBufferBytes = 256ull << 10;
// A thread takes pieces of this size one after another. A larger step is a piece by itself.
constexpr uint64_t kPieceBytes = 8ull << 20;

struct Piece {
    uint64_t file;
    uint64_t offset;
    uint64_t bytes;
    uint8_t* digests;
};

class Descriptor {
  public:
    explicit Descriptor(const char* path)
        : fd_(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)) {}
    ~Descriptor() {
        if (fd_ >= 0)
            close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    int value() const { return fd_; }

  private:
    const int fd_;
};

class FileDigests {
  public:
    FileDigests(const fgg_file* files, uint64_t step, fgg_digest_progress& progress)
        : files_(files), step_(step), progress_(progress) {}

    void cut(uint64_t count, uint8_t* digests);
    void run(uint32_t threads);

  private:
    void work();
    void digest(const Piece& piece, char* buffer);
    void digest_step(int fd, uint64_t offset, uint64_t bytes, char* buffer, uint8_t* out);
    void read(int fd, char* buffer, uint64_t bytes, uint64_t offset);
    void fail(fgg_status status, const std::string& text, uint64_t file);
    bool stopped() const { return failed_ || __atomic_load_n(&progress_.stop, __ATOMIC_RELAXED); }

    const fgg_file* files_;
    const uint64_t step_;
    fgg_digest_progress& progress_;
    const DigestFunctions& functions_ = digest_functions();
    std::vector<Piece> pieces_;
    std::atomic<uint64_t> next_{0};
    std::atomic<bool> failed_{false};
    std::mutex lock_;
    std::optional<MoverFailure> failure_;
};

void FileDigests::cut(uint64_t count, uint8_t* digests) {
    const uint64_t size = std::max(kPieceBytes / step_, uint64_t{1}) * step_;
    for (uint64_t file = 0; file < count; file++)
        for (uint64_t at = 0; at < files_[file].bytes; at += size) {
            const uint64_t bytes = std::min(size, files_[file].bytes - at);
            pieces_.push_back({file, at, bytes, digests});
            digests += (bytes + step_ - 1) / step_ * FGG_DIGEST_BYTES;
        }
}

void FileDigests::run(uint32_t threads) {
    const uint64_t used = std::min<uint64_t>(std::max(threads, 1u), pieces_.size());
    run_threads(static_cast<unsigned>(used), [this](unsigned) { work(); });
    if (failure_)
        throw *failure_;
    if (stopped())
        throw MoverFailure(FGG_CANCELLED, "it was asked to stop");
}

void FileDigests::work() {
    uint64_t index = 0;
    try {
        const std::unique_ptr<char[]> buffer(new char[kBufferBytes]);
        while (!stopped() && (index = next_++) < pieces_.size())
            digest(pieces_[index], buffer.get());
    } catch (const MoverFailure& failure) {
        fail(failure.status(), failure.what(), pieces_[index].file);
    } catch (const std::exception& error) {
        fail(FGG_SYSTEM, error.what(), 0);
    }
}

void FileDigests::digest(const Piece& piece, char* buffer) {
    const Descriptor fd(files_[piece.file].path);
    if (fd.value() < 0)
        throw MoverFailure(FGG_IO, std::strerror(errno));
    struct stat status;
    if (fstat(fd.value(), &status) != 0)
        throw MoverFailure(FGG_IO, std::strerror(errno));
    if (!S_ISREG(status.st_mode))
        throw MoverFailure(FGG_IO, "not a regular file");
    // Reads from a disk are best long, and those of the buffer are not. No matter where it fails.
    posix_fadvise(fd.value(), static_cast<off_t>(piece.offset), static_cast<off_t>(piece.bytes),
                  POSIX_FADV_WILLNEED);
    uint8_t* out = piece.digests;
    for (uint64_t at = 0; at < piece.bytes && !stopped(); at += step_, out += FGG_DIGEST_BYTES)
        digest_step(fd.value(), piece.offset + at, std::min(step_, piece.bytes - at), buffer, out);
    __atomic_fetch_add(&progress_.bytes_done, piece.bytes, __ATOMIC_RELAXED);
}

void FileDigests::digest_step(int fd, uint64_t offset, uint64_t bytes, char* buffer, uint8_t* out) {
    DigestState state;
    functions_.begin(state);
    for (uint64_t at = 0; at < bytes && !stopped(); at += kBufferBytes) {
        const uint64_t size = std::min(kBufferBytes, bytes - at);
        read(fd, buffer, size, offset + at);
        functions_.add(state, buffer, size);
    }
    functions_.end(state, out);
}

void FileDigests::read(int fd, char* buffer, uint64_t bytes, uint64_t offset) {
    for (uint64_t at = 0; at < bytes;) {
        const ssize_t done = pread(fd, buffer + at, bytes - at, static_cast<off_t>(offset + at));
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            throw MoverFailure(FGG_IO, std::strerror(errno));
        if (done == 0) { // anywhere behind its end
            struct stat file;
            if (fstat(fd, &file) != 0)
                throw MoverFailure(FGG_IO, std::strerror(errno));
            throw MoverFailure(FGG_SHORT, "it ends at byte " + std::to_string(file.st_size));
        }
        at += static_cast<uint64_t>(done);
    }
}

void FileDigests::fail(fgg_status status, const std::string& text, uint64_t file) {
    const std::lock_guard<std::mutex> guard(lock_);
    if (failed_.exchange(true))
        return;
    failure_.emplace(status, text);
    progress_.failed_file = file;
}

} // namespace

void digest_files(const fgg_file* files, uint64_t count, uint64_t step, uint32_t threads,
                  uint8_t* digests, fgg_digest_progress& progress) {
    if (!step)
        throw MoverFailure(FGG_ARGUMENT, "a step has no bytes");
    FileDigests work(files, step, progress);
    work.cut(count, digests);
    work.run(threads);
}

} // namespace fgg
