// Copies pages to files with several threads, without those that hold only zeros. They come in
// pipes, or the workers read them from the memory of a process, or from files.
//
// Who owns what: a Chunk belongs to who asks for it from next() to submit(), then to a worker until
// it is free again. Workers take chunks in order, and each takes room in the file in that order, so
// that a file holds its pages in the order in which they came.
#pragma once

#include "maps.h"
#include "page_file.h"
#include "pagemap.h"
#include "process_memory.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pages {

constexpr uint64_t kChunk = 256 << 10; // what a worker reads and judges stays in its cache

// What one pagemap image becomes.
struct Output {
    std::string pagemap;      // path
    std::vector<Range> zeros; // where pages of zeros may be left out
    PageFile* file = nullptr;
    std::vector<Entry> entries;
};

// Where pages are that a worker is to read.
struct Source {
    const ProcessMemory* memory; // of a process that stands still; else
    const PageFile* file;
    uint64_t offset;
};

struct Chunk {
    Output* output = nullptr;
    std::vector<Entry> entries;  // of the pages in this chunk
    std::vector<Source> sources; // of each entry; of one kind; none where the pages came here
    uint64_t bytes = 0;          // so far, of which the first `piped` lie in the pipe
    uint64_t piped = 0;
    uint64_t turn = 0;
    int pipe[2] = {-1, -1};
    std::unique_ptr<char[]> buffer;
};

class Copier {
  public:
    // `on_failure` is called once, on the thread that failed first.
    Copier(unsigned threads, std::function<void()> on_failure);
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // An empty chunk, which may have to be waited for. Throws PagesFailure when a worker has
    // failed.
    Chunk& next();
    void submit(Chunk& chunk);
    // Ends the work: who waits for a chunk gets a PagesFailure.
    void end();
    // Until all that was submitted is in its file. Throws PagesFailure when a worker has failed.
    void wait();
    // Text of the first failure; empty: none.
    std::string failure();

    uint64_t zero_bytes() const { return zero_bytes_; } // after wait()

  private:
    void work();
    void copy(Chunk& chunk);
    void fetch(Chunk& chunk);
    void check();
    void wake_all();

    std::function<void()> on_failure_;
    std::mutex mutex_;
    std::condition_variable work_came_, chunk_freed_, turn_came_;
    std::deque<Chunk> chunks_;
    std::vector<Chunk*> free_;
    std::deque<Chunk*> waiting_;
    uint64_t submitted_ = 0, turn_ = 0, done_ = 0, zero_bytes_ = 0;
    std::string failure_;
    bool ending_ = false;
    std::vector<std::thread> threads_;
};

// Hands pages that the workers read to a copier, in order of their addresses.
class Feed {
  public:
    Feed(Copier& copier, Output& output) : copier_(copier), output_(output) {}
    // Throws PagesFailure as Copier::next does.
    void add(uint64_t address, uint64_t count, Source source);
    // After all.
    void end();

  private:
    Copier& copier_;
    Output& output_;
    Chunk* chunk_ = nullptr;
};

} // namespace pages
