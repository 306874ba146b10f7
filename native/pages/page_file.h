// A pages-N.img that grows at its end and is written by several threads.
#pragma once

#include "failure.h"

#include <atomic>
#include <thread>

namespace pages {

class PageFile {
  public:
    // Creates the file, which must not exist.
    PageFile(const std::string& folder, uint32_t number);
    // Creates one without a name, which goes with this object.
    explicit PageFile(const std::string& folder);
    ~PageFile(); // removes it again unless it was finished
    PageFile(const PageFile&) = delete;
    PageFile& operator=(const PageFile&) = delete;

    // Takes blocks for so many bytes and maps them. False where that cannot be; the file then grows
    // as it is written. Once, first of all.
    bool reserve(uint64_t bytes);
    // Has the kernel make the pages of a part of what is reserved. False when it cannot.
    bool populate(uint64_t offset, uint64_t bytes);
    // [0, bytes) has its pages: writing there is no more than copying.
    void set_populated(uint64_t bytes) { populated_ = bytes; }

    // Room for `bytes` behind what was taken before; its offset. One thread at a time.
    uint64_t take(uint64_t bytes);
    // Into room that was taken. Any thread.
    void write(uint64_t offset, const char* data, uint64_t bytes);

    // Gives all room back that was taken. One thread at a time, as the next one.
    void restart() { size_ = 0; }
    // Moves what was written to a later place. Throws PagesFailure.
    void move(uint64_t from, uint64_t to, uint64_t bytes);

    // From where something was written. Any thread. Throws PagesFailure.
    void read(uint64_t offset, char* to, uint64_t bytes) const;

    // Cuts off what was not taken. The kernel may still be at work on the pages behind the new end
    // afterwards; the destructor waits for it.
    void finish();

    uint32_t number() const { return number_; }

  private:
    PagesFailure failure(const char* what, int error) const;

    uint32_t number_;
    std::string path_;
    int fd_;
    char* mapping_ = nullptr;
    uint64_t size_ = 0, reserved_ = 0, populated_ = 0;
    bool finished_ = false;
    std::thread cutting_;
    std::atomic<int> cut_{-1}; // errno of it
};

} // namespace pages
