#include "scan.h"

#include "stop.h"

#include <fcntl.h>
#include <linux/ioctl.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <thread>

namespace quiet {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPiece = 256 << 10; // fits a second level cache with its copy

// PAGEMAP_SCAN (Linux 6.7, include/uapi/linux/fs.h); headers of the build may be older.
struct Region {
    uint64_t start, end, categories;
};
struct ScanArgument {
    uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
    uint64_t inverted, mask, any_mask, return_mask;
};
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArgument);
constexpr uint64_t kFile = 4, kPresent = 8, kZeroPage = 32;

class File {
  public:
    explicit File(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
    ~File() {
        if (fd_ >= 0)
            close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }

  private:
    int fd_;
};

bool is_zero(const unsigned char* page) {
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

// Ranges of at most kPiece of pages that are there: neither the kernel's own zero page nor absent.
std::vector<Range> present(pid_t pid, const std::vector<Range>& mappings) {
    File pagemap("/proc/" + std::to_string(pid) + "/pagemap");
    std::vector<Region> regions(4096);
    std::vector<Range> found;
    for (const Range& mapping : mappings) {
        for (uint64_t at = mapping.start; at < mapping.end;) {
            ScanArgument scan = {};
            scan.size = sizeof scan;
            scan.start = at;
            scan.end = mapping.end;
            scan.regions = reinterpret_cast<uint64_t>(regions.data());
            scan.region_count = regions.size();
            scan.inverted = kFile | kZeroPage;
            scan.mask = kPresent | kFile | kZeroPage;
            scan.return_mask = kPresent;
            int count = ioctl(pagemap.fd(), kPagemapScan, &scan);
            if (count < 0)
                throw Skip(std::string("its page table cannot be read: ") + strerror(errno));
            for (int i = 0; i < count; i++)
                for (uint64_t low = regions[i].start; low < regions[i].end; low += kPiece)
                    found.push_back({low, std::min(low + kPiece, regions[i].end)});
            at = scan.walk_end;
        }
    }
    return found;
}

struct Piece {
    Range range;
    uint64_t zero = 0; // a bit a page
};
static_assert(kPiece / kPage <= 64, "a piece's pages fit its bits");

void judge(pid_t pid, Piece& piece, unsigned char* buffer) {
    const uint64_t bytes = piece.range.end - piece.range.start;
    iovec local = {buffer, bytes};
    iovec remote = {reinterpret_cast<void*>(piece.range.start), bytes};
    ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    for (uint64_t page = 0; static_cast<ssize_t>((page + 1) * kPage) <= got; page++)
        if (is_zero(buffer + page * kPage))
            piece.zero |= 1ull << page;
}

void judge_all(pid_t pid, std::vector<Piece>& pieces, unsigned threads) {
    std::atomic<size_t> next{0};
    auto work = [&] {
        std::vector<unsigned char> buffer(kPiece);
        for (size_t i; (i = next.fetch_add(1)) < pieces.size();)
            judge(pid, pieces[i], buffer.data());
    };
    std::vector<std::thread> helpers;
    size_t useful = std::min<size_t>(threads, pieces.size() / 16 + 1);
    for (size_t i = 1; i < useful; i++)
        helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers)
        helper.join();
}

// A device may have pinned pages, which must stay what it reads and writes.
bool is_device(std::string_view line) {
    return line.find(" /dev/") != std::string_view::npos &&
           line.find(" /dev/shm/") == std::string_view::npos &&
           line.find(" /dev/zero") == std::string_view::npos;
}

// Whether the flags of a mapping (smaps, VmFlags) allow to drop pages of it.
bool plain(std::string_view flags) {
    // mlocked; uffd for missing, write-protect, minor; shadow stack; hugetlb; I/O; sealed; device
    for (std::string_view bad : {" lo", " um", " uw", " ui", " ss", " ht", " io", " pf", " sl"})
        if (flags.find(bad) != std::string_view::npos)
            return false;
    return true;
}

} // namespace

std::vector<Range> droppable(pid_t pid) {
    std::string text = read_file("/proc/" + std::to_string(pid) + "/smaps");
    std::vector<Range> found;
    Range mapping = {};
    bool candidate = false;
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find('\n', at), text.size());
        std::string_view line(text.data() + at, end - at);
        at = end + 1;
        uint64_t low, high, inode;
        char access[5];
        if (line.substr(0, 8) == "VmFlags:") {
            if (candidate && plain(line))
                found.push_back(mapping);
            candidate = false;
        } else if (!line.empty() && (line[0] < 'A' || line[0] > 'Z') &&
                   sscanf(line.data(), "%lx-%lx %4s %*x %*s %lu", &low, &high, access, &inode) ==
                       4) {
            if (line.find("[aio]") != std::string_view::npos ||
                line.find("[io_uring]") != std::string_view::npos)
                throw Skip("the kernel may be reading a file into its memory");
            if (is_device(line))
                throw Skip("it has a device mapped");
            mapping = {low, high};
            candidate = inode == 0 && strncmp(access, "rw", 2) == 0 && access[3] == 'p';
        }
    }
    return found;
}

Found find_zeros(pid_t pid, const std::vector<Range>& mappings, uint64_t minimum,
                 unsigned threads) {
    std::vector<Piece> pieces;
    for (const Range& range : present(pid, mappings))
        pieces.push_back({range});
    judge_all(pid, pieces, threads);

    Found found;
    Range run = {};
    size_t mapping = 0;
    auto end_run = [&] {
        if (run.end - run.start >= std::max(minimum, kPage))
            found.runs.push_back(run);
        run = {};
    };
    for (const Piece& piece : pieces) {
        found.scanned += piece.range.end - piece.range.start;
        if (piece.range.start >= mappings[mapping].end) {
            end_run();
            while (piece.range.start >= mappings[mapping].end)
                mapping++;
        }
        for (uint64_t page = piece.range.start, i = 0; page < piece.range.end; page += kPage, i++) {
            bool zero = piece.zero >> i & 1;
            found.zero += zero ? kPage : 0;
            if (run.end != page || !zero)
                end_run();
            if (zero)
                run = {run.end == page ? run.start : page, page + kPage};
        }
    }
    end_run();
    return found;
}

} // namespace quiet
