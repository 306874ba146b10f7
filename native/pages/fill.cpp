#include "fill.h"

#include "fault.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

namespace pages {
namespace {

constexpr uint64_t kBlock = 2 << 20;

// Runs in one block of kBlock bytes of a process's memory, which are read together. No two pieces
// are in one huge page: both threads would clear one.
struct Piece {
    const Fill* fill;
    std::vector<Run> runs;
};

std::vector<Piece> cut(const std::vector<Fill>& fills) {
    std::vector<Piece> pieces;
    for (const Fill& fill : fills) {
        uint64_t block = UINT64_MAX;
        for (Run rest : fill.runs)
            while (rest.bytes) {
                if (rest.address / kBlock != block) {
                    block = rest.address / kBlock;
                    pieces.push_back({&fill, {}});
                }
                Run part = rest;
                part.bytes = std::min(rest.bytes, (block + 1) * kBlock - rest.address);
                pieces.back().runs.push_back(part);
                rest = {rest.address + part.bytes, rest.bytes - part.bytes,
                        rest.offset + part.bytes};
            }
    }
    return pieces;
}

// Files of pages, open.
class Files {
  public:
    explicit Files(const std::vector<Piece>& pieces) {
        for (const Piece& piece : pieces) {
            const std::string& path = piece.fill->pages;
            if (!fds_.count(path) && (fds_[path] = open(path.c_str(), O_RDONLY | O_CLOEXEC)) < 0)
                throw system_failure("cannot open " + path, errno);
        }
    }
    Files(const Files&) = delete;
    Files& operator=(const Files&) = delete;
    ~Files() {
        for (const auto& [path, fd] : fds_)
            close(fd);
    }

    int of(const Piece& piece) const { return fds_.at(piece.fill->pages); }

  private:
    std::map<std::string, int> fds_;
};

void read_all(int fd, const std::string& path, char* to, uint64_t bytes, uint64_t offset) {
    while (bytes) {
        const ssize_t count = flowgpu::read_at(flowgpu::Fault::at_pages_read, fd, to, bytes,
                                               static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            throw system_failure("cannot read " + path, errno);
        if (count == 0)
            throw short_file(path, fd);
        to += count, offset += static_cast<uint64_t>(count), bytes -= static_cast<uint64_t>(count);
    }
}

PagesFailure unwritten(const Piece& piece, uint64_t done, int error) {
    const Run* run = piece.runs.data();
    for (; done >= run->bytes; run++)
        done -= run->bytes;
    return system_failure("memory of process " + std::to_string(piece.fill->pid) + " at " +
                              hex(run->address + done) + " cannot be written",
                          error);
}

// Through a buffer that stays in the cache: pages of a mapped file would have to be mapped one by
// one, and unmapped in the end.
void write_piece(const Piece& piece, int fd, char* buffer) {
    const uint64_t first = piece.runs.front().offset;
    const Run& last = piece.runs.back();
    read_all(fd, piece.fill->pages, buffer, last.offset + last.bytes - first, first);
    std::vector<iovec> local, remote;
    uint64_t bytes = 0;
    for (const Run& run : piece.runs) {
        local.push_back({buffer + (run.offset - first), run.bytes});
        remote.push_back({reinterpret_cast<void*>(run.address), run.bytes});
        bytes += run.bytes;
    }
    const ssize_t count = process_vm_writev(piece.fill->pid, local.data(), local.size(),
                                            remote.data(), remote.size(), 0);
    if (count < 0)
        throw unwritten(piece, 0, errno);
    if (static_cast<uint64_t>(count) != bytes)
        throw unwritten(piece, static_cast<uint64_t>(count), EFAULT);
}

} // namespace

void fill(const std::vector<Fill>& fills, unsigned threads) {
    const std::vector<Piece> pieces = cut(fills);
    const Files files(pieces);
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::string failure;
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < threads; i++)
        workers.emplace_back([&] {
            // A file has a page once, so a block's lie in no more than its size.
            std::vector<char> buffer(kBlock);
            try {
                for (size_t n; (n = next++) < pieces.size();)
                    write_piece(pieces[n], files.of(pieces[n]), buffer.data());
            } catch (const std::exception& error) {
                next = pieces.size();
                const std::lock_guard<std::mutex> hold(mutex);
                if (failure.empty())
                    failure = error.what();
            }
        });
    for (std::thread& worker : workers)
        worker.join();
    if (!failure.empty())
        throw PagesFailure(failure);
}

} // namespace pages
