// The receiving end of `criu dump --page-server`: one connection, from its first message to its
// last.
//
// CRIU 4.2 sends headers of 32 bytes (command, pages, address, target), each followed by the pages
// it announces, and waits for an answer to "open" (one byte: no parent image) and "close" (32 bits:
// the dump's success, as far as it is ours).
//
// Where processes are tracked (tracked.h), CRIU sends only what was written since the last pass.
// What it sends is set aside, and put in its place once the processes may go on. Standard input has
// commands until CRIU says "close", a line each: "pass" makes a pass, and is answered with "passed"
// and the count of pages; "device PID START-END" (hexadecimal) tells what a device may have
// written. "look PID..." comes when these processes stand still: what CRIU is going to ask about
// their memory is looked up and told to its library (standing.h).
#pragma once

#include "smaps.h"
#include "tracked.h"

#include <map>
#include <memory>

namespace pages {

struct Totals {
    uint64_t files = 0, bytes = 0, zero_bytes = 0, entries = 0;
    uint64_t copied_twice = 0;                     // bytes that came without a pipe
    uint64_t early_bytes = 0;                      // that were copied while their processes ran
    uint64_t compared_bytes = 0, mended_bytes = 0; // of those
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

    // Until CRIU has said "close" and everything is in its files. Throws PagesFailure.
    Totals serve();

  private:
    struct Header {
        uint32_t command, unused;
        uint64_t pages, address, target;
    };
    static_assert(sizeof(Header) == 32);

    // What CRIU sends of one process that is tracked.
    struct Early {
        Early(Tracked& one, const std::string& folder) : tracked(one), rest(folder) {}
        Tracked& tracked;
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
    void write(const Output& output);
    void settle_tracked();
    void join_tracked();
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
    std::map<pid_t, Smaps> smaps_;
    std::map<pid_t, std::vector<Range>> devices_;
    std::string commands_; // the begin of a line
    std::vector<std::unique_ptr<PageFile>> files_;
    std::map<uint64_t, Output> outputs_; // by target
    std::map<uint64_t, Early> joined_;   // by target, too
    Early* early_ = nullptr;             // of the target that is open
    Output* output_ = nullptr;
    uint64_t target_ = 0;
    Chunk* chunk_ = nullptr;
    bool pipes_work_ = true;
    Totals totals_;
    uint32_t next_number_;
    Copier copier_; // last: its threads use what is above
};

} // namespace pages
