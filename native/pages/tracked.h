// The pages of a process that runs, copied before the cut.
//
// Its private memory is under userfaultfd's asynchronous write protection (Linux 6.7): the kernel
// ends the protection of a page at its first write, and tells nobody. PAGEMAP_SCAN finds those
// pages and protects them again in one step. Each pass copies what it has found. A page that is
// there and still protected when the process is stopped has the bytes of its last copy. All others
// are sent by CRIU, from which criu_memory.cpp hides the protected ones.
//
// The copy does not know about writes that pass the page tables: a device's. So what a device may
// have written is compared while the process is stopped.
#pragma once

#include "copier.h"
#include "inherited.h"
#include "process_memory.h"

#include <map>
#include <set>

namespace pages {

class Tracked {
  public:
    // `descriptor`: a userfaultfd of the process, owned from here on. Throws PagesFailure.
    Tracked(pid_t pid, int descriptor, const std::string& folder);
    ~Tracked();
    Tracked(const Tracked&) = delete;
    Tracked& operator=(const Tracked&) = delete;

    // Protects and copies what was written since the last pass, but for what is common with the
    // parent, which may be null; gives its pages. Throws PagesFailure.
    uint64_t pass(unsigned threads, const Tracked* parent);

    // Pages in a range that were copied.
    uint64_t copied(const Range& range) const;

    // The process is stopped: its pages are looked up in there.
    ProcessMemory& memory() { return memory_; }
    // After that: pages of its own that are in memory, in order.
    std::vector<Entry> present() const;
    // CRIU need not send what is common with the parent, which is looked up as well.
    void spare(const Tracked& parent);
    // Pages that CRIU has to send, in order of their addresses.
    std::vector<scan::Region> for_criu() const;

    // The process is stopped, and CRIU has sent these pages (in order of their addresses).
    // `devices`: what a device may have written. `parent`: settled, or null. Throws PagesFailure.
    void settle(const std::vector<Entry>& sent, std::vector<Range> devices, unsigned threads,
                const Tracked* parent);
    // After that: pages that are common with the parent, which keeps them.
    const std::vector<Entry>& inherited() const { return inherited_; }
    // All that the image has of it.
    const std::vector<Entry>& stored() const { return stored_; }
    // Ends the protection, after which the process is as it was.
    void release();
    // Hands the pages to `copier` in order of their addresses, with those that CRIU has sent:
    // `sent`, whose bytes are `sent_file`'s.
    void hand_over(Copier& copier, Output& output, const std::vector<Entry>& sent,
                   const PageFile& sent_file) const;

    pid_t pid() const { return pid_; }
    uint64_t kept_bytes() const { return kept_bytes_; }
    uint64_t compared_bytes() const { return compared_bytes_; }
    uint64_t mended_bytes() const { return mended_bytes_; }

  private:
    struct Place {
        uint64_t count, offset; // pages, and where they are in the file
    };
    struct Piece {
        uint64_t address, count, offset;
    };

    void protect_new();
    bool is_to_be_tracked(const Range& range) const;
    void place(uint64_t address, uint64_t count, std::vector<Piece>& pieces);
    template <class Take> void each_copied(uint64_t address, uint64_t count, Take take) const;
    void copy(const std::vector<Piece>& pieces, unsigned threads);
    void forget(const std::vector<uint64_t>& pages);
    void compare(const std::vector<Range>& devices, unsigned threads);
    bool reads_past_the_cache() const;

    pid_t pid_;
    ProcessMemory memory_;
    int descriptor_;
    PageFile file_;
    std::map<uint64_t, Place> copied_; // by address
    std::vector<Range> registered_;
    std::vector<Entry> inherited_; // protected and not copied, in order
    std::vector<Entry> spared_;    // not protected, and not sent
    std::vector<Entry> stored_;    // settled: what the image has of it, in order
    std::vector<Piece> kept_;
    bool all_by_devices_ = false;
    uint64_t kept_bytes_ = 0, compared_bytes_ = 0, mended_bytes_ = 0;
};

using AllTracked = std::map<pid_t, std::unique_ptr<Tracked>>;

// A pass of all; gives the pages.
uint64_t pass_all(const AllTracked& tracked, unsigned threads);

} // namespace pages
