// The receiving end of `criu dump --page-server`: one connection, from its first message to its
// last.
//
// CRIU 4.2 sends headers of 32 bytes (command, pages, address, target), each followed by the pages
// it announces, and waits for an answer to "open" (one byte: no parent image) and "close" (32 bits:
// the dump's success, as far as it is ours).
#pragma once

#include "copier.h"

#include <map>
#include <memory>

namespace pages {

struct Totals {
    uint64_t files = 0, bytes = 0, zero_bytes = 0, entries = 0;
    uint64_t copied_twice = 0;    // bytes that came without a pipe
    double seconds = 0, tail = 0; // from the first message to the last answer; of it after "close"
};

class Server {
  public:
    // `reserved`: files prepared for the pages of processes, by their number.
    Server(int socket, const std::string& folder, unsigned threads,
           std::map<pid_t, std::unique_ptr<PageFile>> reserved);

    // Until CRIU says "close" and everything is in its files. Throws Failure.
    Totals serve();

  private:
    struct Header {
        uint32_t command, unused;
        uint64_t pages, address, target;
    };
    static_assert(sizeof(Header) == 32);

    Header receive_header();
    void receive(char* to, uint64_t bytes, const char* what);
    void open(const Header& header);
    void add(const Header& header, uint32_t flags);
    void fetch(Chunk& chunk, uint64_t bytes);
    void flush();
    void close();
    void answer(const void* data, size_t bytes);

    int socket_;
    std::string folder_;
    std::map<pid_t, std::unique_ptr<PageFile>> reserved_;
    std::vector<std::unique_ptr<PageFile>> files_;
    std::map<uint64_t, Output> outputs_; // by target
    Output* output_ = nullptr;
    uint64_t target_ = 0;
    Chunk* chunk_ = nullptr;
    bool pipes_work_ = true;
    Totals totals_;
    uint32_t next_number_;
    Copier copier_; // last: its threads use what is above
};

} // namespace pages
