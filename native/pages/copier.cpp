#include "copier.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

namespace pages {
namespace {

constexpr uint64_t kMinimumRun = 4; // pages; an entry of a pagemap costs a restore about as much

struct Piece {
    uint64_t offset, bytes; // in the chunk
};

bool is_zero(const char* page) {
    for (uint64_t at = 0; at < kPage; at += 256) {
        uint64_t words[32], any = 0;
        memcpy(words, page + at, sizeof words);
        for (uint64_t word : words)
            any |= word;
        if (any)
            return false;
    }
    return true;
}

// Pages from `address` on that may be left out if they are zeros, at most `count`.
uint64_t allowed(const std::vector<Range>& ranges, uint64_t address, uint64_t count) {
    auto after = std::upper_bound(ranges.begin(), ranges.end(), address,
                                  [](uint64_t a, const Range& range) { return a < range.start; });
    if (after == ranges.begin())
        return 0;
    uint64_t end = (after - 1)->end;
    return end <= address ? 0 : std::min(count, (end - address) / kPage);
}

// Splits the chunk's entries into those that are kept and where their bytes are.
void select(const Chunk& chunk, std::vector<Entry>& kept, std::vector<Piece>& pieces) {
    uint64_t offset = 0;
    auto keep = [&](const Entry& entry, uint64_t first, uint64_t end) {
        if (first == end)
            return;
        kept.push_back({entry.address + first * kPage, end - first, entry.flags});
        pieces.push_back({offset + first * kPage, (end - first) * kPage});
    };
    for (const Entry& entry : chunk.entries) {
        const char* data = chunk.buffer.get() + offset;
        uint64_t begin = 0; // of the pages to keep
        for (uint64_t page = 0; page < entry.count;) {
            if (!is_zero(data + page * kPage)) {
                page++;
                continue;
            }
            uint64_t most =
                allowed(chunk.output->zeros, entry.address + page * kPage, entry.count - page);
            uint64_t run = 0;
            while (run < most && is_zero(data + (page + run) * kPage))
                run++;
            // At an edge of the chunk a run may go on in the next one.
            const bool at_edge =
                offset + page * kPage == 0 || offset + (page + run) * kPage == chunk.bytes;
            if (run && (run >= kMinimumRun || at_edge)) {
                keep(entry, begin, page);
                begin = page + run;
            }
            page += std::max<uint64_t>(run, 1);
        }
        keep(entry, begin, entry.count);
        offset += entry.count * kPage;
    }
}

void append(std::vector<Entry>& all, const std::vector<Entry>& more) {
    for (const Entry& entry : more) {
        Entry* last = all.empty() ? nullptr : &all.back();
        if (last && last->flags == entry.flags &&
            last->address + last->count * kPage == entry.address)
            last->count += entry.count;
        else
            all.push_back(entry);
    }
}

} // namespace

Copier::Copier(unsigned threads, std::function<void()> on_failure)
    : on_failure_(std::move(on_failure)), chunks_(2 * threads + 2) {
    for (Chunk& chunk : chunks_) {
        chunk.buffer = std::make_unique<char[]>(kChunk);
        if (pipe2(chunk.pipe, O_CLOEXEC) != 0)
            throw system_failure("cannot make a pipe", errno);
        // One slot a page of a chunk, and as many again for pages in two pieces.
        fcntl(chunk.pipe[0], F_SETPIPE_SZ, static_cast<int>(2 * kChunk));
        free_.push_back(&chunk);
    }
    for (unsigned i = 0; i < threads; i++)
        threads_.emplace_back([this] { work(); });
}

Copier::~Copier() {
    end();
    for (std::thread& thread : threads_)
        thread.join();
    for (Chunk& chunk : chunks_)
        for (int end : chunk.pipe)
            close(end);
}

void Copier::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ending_ = true;
    }
    wake_all();
}

void Copier::wake_all() {
    work_came_.notify_all();
    chunk_freed_.notify_all();
    turn_came_.notify_all();
}

void Copier::check() {
    if (!failure_.empty())
        throw PagesFailure(failure_);
}

std::string Copier::failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

Chunk& Copier::next() {
    std::unique_lock<std::mutex> lock(mutex_);
    chunk_freed_.wait(lock, [&] { return !free_.empty() || !failure_.empty() || ending_; });
    check();
    if (ending_)
        throw PagesFailure("the work has ended");
    Chunk* chunk = free_.back();
    free_.pop_back();
    chunk->entries.clear();
    chunk->sources.clear();
    chunk->bytes = chunk->piped = 0;
    return *chunk;
}

void Copier::submit(Chunk& chunk) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        chunk.turn = submitted_++;
        waiting_.push_back(&chunk);
    }
    work_came_.notify_one();
}

void Copier::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    chunk_freed_.wait(lock, [&] { return done_ == submitted_ || !failure_.empty(); });
    check();
}

void Copier::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        work_came_.wait(lock, [&] { return ending_ || !failure_.empty() || !waiting_.empty(); });
        if (ending_ || !failure_.empty())
            return;
        Chunk* chunk = waiting_.front();
        waiting_.pop_front();
        lock.unlock();
        std::string problem;
        try {
            copy(*chunk);
        } catch (const std::exception& error) {
            problem = error.what();
        }
        lock.lock();
        done_++;
        free_.push_back(chunk);
        if (!problem.empty() && failure_.empty()) {
            failure_ = problem;
            on_failure_();
            wake_all();
        }
        chunk_freed_.notify_all(); // several may wait for one, and one for all
    }
}

void Copier::fetch(Chunk& chunk) {
    if (!chunk.sources.empty() && chunk.sources[0].memory) {
        chunk.sources[0].memory->read(chunk.entries, chunk.buffer.get());
        return;
    }
    uint64_t done = 0;
    for (size_t n = 0; n < chunk.sources.size(); n++) {
        const uint64_t bytes = chunk.entries[n].count * kPage;
        chunk.sources[n].file->read(chunk.sources[n].offset, chunk.buffer.get() + done, bytes);
        done += bytes;
    }
    for (uint64_t at = 0; at < chunk.piped;) {
        ssize_t count = read(chunk.pipe[0], chunk.buffer.get() + at, chunk.piped - at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            throw system_failure("cannot read a pipe", count < 0 ? errno : EPIPE);
        at += static_cast<uint64_t>(count);
    }
}

void Copier::copy(Chunk& chunk) {
    fetch(chunk);
    std::vector<Entry> kept;
    std::vector<Piece> pieces;
    select(chunk, kept, pieces);
    uint64_t bytes = 0, offset;
    for (const Piece& piece : pieces)
        bytes += piece.bytes;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        turn_came_.wait(lock, [&] { return turn_ == chunk.turn || ending_ || !failure_.empty(); });
        check();
        if (ending_)
            return;
        offset = chunk.output->file->take(bytes);
        append(chunk.output->entries, kept);
        zero_bytes_ += chunk.bytes - bytes;
        turn_++;
    }
    turn_came_.notify_all();
    for (const Piece& piece : pieces) {
        chunk.output->file->write(offset, chunk.buffer.get() + piece.offset, piece.bytes);
        offset += piece.bytes;
    }
}

void Feed::add(uint64_t address, uint64_t count, Source source) {
    while (count) {
        if (!chunk_) {
            chunk_ = &copier_.next();
            chunk_->output = &output_;
        }
        const uint64_t here = std::min(count, (kChunk - chunk_->bytes) / kPage);
        chunk_->entries.push_back({address, here, kPresent});
        chunk_->sources.push_back(source);
        chunk_->bytes += here * kPage;
        address += here * kPage, source.offset += here * kPage, count -= here;
        if (chunk_->bytes == kChunk)
            end();
    }
}

void Feed::end() {
    if (chunk_)
        copier_.submit(*chunk_);
    chunk_ = nullptr;
}

} // namespace pages
