// The receiving end of `criu dump --page-server`: one connection, from its first message to its
// last.
//
// CRIU 4.2 sends headers of 32 bytes (command, pages, address, target), each followed by the pages
// it announces, and waits for an answer to "open" (one byte: no parent image) and "close" (32 bits:
// the dump's success, as far as it is ours).
//
// Most pages do not come that way. Where processes are tracked (tracked.h), CRIU sends only what
// was written since the last pass. Pages of the others are copied while all stand still (still.h).
// What CRIU sends of both is set aside, and put in its place at the end: where they are tracked,
// once the processes may go on.
//
// Standard input has commands until CRIU says "close", a line each:
// * "pass", while the processes run, makes a pass, and is answered with "passed" and the count of
//   pages;
// * "device PID START-END" (hexadecimal) tells what a device may have written;
// * "look PID..." comes when these processes stand still: what CRIU is going to ask about their
//   memory is looked up and told to its library (standing.h);
// * "copy" comes when nobody but CRIU is at work on them: their pages are copied from then on.
#pragma once

#include "inherited.h"
#include "smaps.h"
#include "still.h"
#include "tracked.h"

#include <map>
#include <memory>

namespace pages {

struct Totals {
    uint64_t files = 0, bytes = 0, zero_bytes = 0, entries = 0;
    uint64_t still_bytes = 0;                      // of `bytes`, that CRIU has not sent
    uint64_t copied_twice = 0;                     // bytes that came without a pipe
    uint64_t early_bytes = 0;                      // that were copied while their processes ran
    uint64_t compared_bytes = 0, mended_bytes = 0; // of those
    std::map<pid_t, uint64_t> inherited;           // bytes that are in a parent's file alone
    double seconds = 0, tail = 0; // from the first message to the last answer; of it after "close"
};

// Where CRIU's library finds what is told of processes that stand still; owned by who has it.
struct Telling {
    int file, said; // the second one is written to once the first has it
};

class Server {
  public:
    // `reserved`: files prepared for the pages of processes, by their number.
    Server(int socket, const std::string& folder, unsigned threads, Telling telling,
           std::map<pid_t, std::unique_ptr<PageFile>> reserved,
           std::map<pid_t, std::unique_ptr<Tracked>> tracked);
    ~Server();

    // Until CRIU has said "close" and everything is in its files. Throws PagesFailure.
    Totals serve();

  private:
    struct Header {
        uint32_t command, unused;
        uint64_t pages, address, target;
    };
    static_assert(sizeof(Header) == 32);

    // What CRIU sends of one process of which we have copied pages: tracked, or still.
    struct Apart {
        Apart(Tracked* one, Still* other, const std::string& folder)
            : tracked(one), still(other), rest(folder) {}
        Tracked* tracked;
        Still* still;
        PageFile rest;
        std::vector<Entry> sent; // with pages of zeros, which are not in the file
    };

    Header receive_header();
    void receive(char* to, uint64_t bytes, const char* what);
    void open(const Header& header);
    void add(const Header& header, uint32_t flags);
    void fetch(Chunk& chunk, uint64_t bytes);
    void flush();
    void close();
    void write(const Output& output, const std::vector<Entry>& entries);
    Apart* apart(pid_t pid);
    std::unique_ptr<PageFile> file_for(pid_t pid);
    void copy_still();
    void join_still();
    void settle_tracked();
    void join_tracked();
    void write_lists();
    void await();
    bool take_commands();
    void obey(const std::string& command);
    void pass();
    void look(const std::vector<pid_t>& pids);
    void tell(const std::vector<pid_t>& pids);
    void answer(const void* data, size_t bytes);

    int socket_;
    std::string folder_;
    unsigned threads_;
    Telling telling_;
    std::map<pid_t, std::unique_ptr<PageFile>> reserved_;
    std::map<pid_t, std::unique_ptr<Tracked>> tracked_;
    std::map<pid_t, std::unique_ptr<Still>> still_;
    std::thread copying_;
    std::atomic<bool> is_copied_for_nothing_{false}; // CRIU sends all
    std::string copying_failure_;
    bool has_begun_copying_ = false;
    std::map<pid_t, Smaps> smaps_;
    std::map<pid_t, std::vector<Range>> devices_;
    std::string commands_; // the begin of a line
    std::vector<std::unique_ptr<PageFile>> files_;
    std::map<uint64_t, Output> outputs_; // by target
    std::map<pid_t, Apart> apart_;
    std::vector<std::vector<Kin>> kin_; // of those of which we copy pages, as they stand still
    Lists lists_;
    Apart* open_apart_ = nullptr; // of the target that is open
    Output* output_ = nullptr;
    uint64_t target_ = 0;
    Chunk* chunk_ = nullptr;
    bool pipes_work_ = true;
    Totals totals_;
    uint32_t next_number_;
    Copier copier_; // last: its threads use what is above
};

} // namespace pages
