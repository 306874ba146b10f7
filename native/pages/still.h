// A process that stands still for CRIU: its pages are copied by our threads, while CRIU is at work
// on it and on others.
//
// CRIU is told only of the other pages (standing.h), and sends those: what is swapped out or lies
// in a mapping of a device, and the kernel's code. CRIU puts a few bytes of code where the first
// mapping begins that may be executed; that page is read before.
//
// A CRIU to which that cannot be told sends all pages, and they are what is stored.
#pragma once

#include "copier.h"
#include "inherited.h"

#include <memory>

namespace pages {

class Still {
  public:
    explicit Still(pid_t pid) : pid_(pid), memory_(pid) {}
    Still(const Still&) = delete;
    Still& operator=(const Still&) = delete;

    // Its pages are looked up in there; then `choose` finds those that are copied, before CRIU is
    // at work.
    ProcessMemory& memory() { return memory_; }
    void choose();
    const std::vector<Entry>& chosen() const { return chosen_; }
    // Before `hand_over`. Any thread. Pages that its parent has as well, among `theirs`, are not
    // copied.
    void inherit(const ProcessMemory& parent, const std::vector<Entry>& theirs);
    bool has_pages() const { return !chosen_.empty(); }
    uint64_t bytes() const;
    // Pages that CRIU has to send, in order of their addresses.
    std::vector<scan::Region> for_criu() const;
    // Where pages of zeros may be left out.
    const std::vector<Range>& zeros() const { return output_.zeros; }
    bool is_chosen(uint64_t address, uint64_t count) const;
    const std::vector<Entry>& inherited() const { return inherited_; }

    // Copies to a file.
    void begin(std::unique_ptr<PageFile> file);
    // Ends early once `stops` is true. Throws PagesFailure as Copier::next does.
    void hand_over(Copier& copier, const std::atomic<bool>& stops);
    // CRIU has sent pages: `sent`, of which `kept` are in `sent_file`. Puts them in their place.
    // After all was copied. False: CRIU has sent all pages, and these are taken. Throws
    // PagesFailure.
    bool join(const std::vector<Entry>& sent, const std::vector<Entry>& kept,
              const PageFile& sent_file);

    const Output& output() const { return output_; }
    std::unique_ptr<PageFile> take_file() { return std::move(file_); }

  private:
    void insert(const std::vector<Entry>& kept, const PageFile& sent_file);

    pid_t pid_;
    ProcessMemory memory_;
    std::vector<Entry> chosen_, inherited_; // of those
    std::vector<scan::Region> left_;
    Output output_;
    std::unique_ptr<PageFile> file_;
    bool complete_ = false; // all was handed over
};

} // namespace pages
