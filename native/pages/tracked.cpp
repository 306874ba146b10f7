#include "tracked.h"

#include "parallel.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif

namespace pages {
namespace {

constexpr uint64_t kSmall = 64 << 10; // a mapping that CRIU sends as fast as it would be scanned
constexpr uint64_t kPiece = 16 << 20;

// Each thread has a buffer with room for two chunks.
char* own_buffer() {
    static thread_local const auto buffer = std::make_unique<char[]>(2 * kChunk);
    return buffer.get();
}

std::string folder_of(pid_t pid) {
    return "/proc/" + std::to_string(pid) + "/";
}

} // namespace

Tracked::Tracked(pid_t pid, int descriptor, const std::string& folder)
    : pid_(pid), memory_(pid), descriptor_(descriptor), file_(folder) {
    fcntl(descriptor_, F_SETFD, FD_CLOEXEC);
    uffdio_api api = {};
    api.api = UFFD_API;
    api.features = UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED;
    if (ioctl(descriptor_, UFFDIO_API, &api) != 0)
        throw system_failure("this kernel does not tell which pages are written (Linux 6.7)",
                             errno);
}

Tracked::~Tracked() {
    release();
}

// The kernel ends the protection of all pages with the process's memory locked, so in pieces: the
// process, which may run again, waits for one at most.
void Tracked::release() {
    for (const Range& range : registered_)
        for (uint64_t at = range.start, end; at < range.end; at = end) {
            end = std::min(range.end, (at / kPiece + 1) * kPiece);
            uffdio_range piece = {at, end - at};
            ioctl(descriptor_, UFFDIO_UNREGISTER, &piece); // else it ends with the descriptor
        }
    registered_.clear();
    if (descriptor_ >= 0)
        close(descriptor_);
    descriptor_ = -1;
}

// Says whether it has pages that are not tracked.
bool Tracked::is_to_be_tracked(const Range& range) const {
    scan::Region region;
    scan::Request request = {};
    request.size = sizeof request;
    request.start = range.start;
    request.end = range.end;
    request.regions = reinterpret_cast<uint64_t>(&region);
    request.most_regions = request.most_pages = 1;
    request.inverted = scan::kTracked | scan::kNotOwn;
    request.all_of = scan::kTracked | scan::kPresent | scan::kNotOwn;
    request.wanted = scan::kPresent;
    return memory_.scan(request) > 0;
}

// What cannot be registered stays for CRIU. A mapping that was moved may have marks of its old
// place, so they are taken away before it counts as tracked.
void Tracked::protect_new() {
    for (const Range& range : writable(pid_)) {
        if (range.end - range.start < kSmall || range.end > scan::kHighest ||
            !is_to_be_tracked(range))
            continue;
        uffdio_register wanted = {};
        wanted.range = {range.start, range.end - range.start};
        wanted.mode = UFFDIO_REGISTER_MODE_WP;
        if (ioctl(descriptor_, UFFDIO_REGISTER, &wanted) != 0)
            continue;
        registered_.push_back(range);
        uffdio_writeprotect none = {};
        none.range = wanted.range;
        ioctl(descriptor_, UFFDIO_WRITEPROTECT, &none);
    }
}

uint64_t pass_all(const AllTracked& tracked, unsigned threads) {
    std::atomic<uint64_t> pages{0};
    by_generation(threads, generations(pids_of(tracked)), [&](const Kin& kin, unsigned some) {
        pages +=
            tracked.at(kin.pid)->pass(some, kin.parent ? tracked.at(kin.parent).get() : nullptr);
    });
    return pages;
}

uint64_t Tracked::pass(unsigned threads, const Tracked* parent) {
    if (!memory_.open())
        return 0;
    protect_new();
    std::vector<Piece> pieces;
    std::vector<Entry> found;
    uint64_t pages = 0;
    // Only pages that are in memory: marks of other kinds are not pages.
    constexpr uint64_t kFound = scan::kTracked | scan::kWritten | scan::kPresent;
    memory_.each_region(kAllMemory, scan::kProtect, kFound, [&](const scan::Region& region) {
        const uint64_t count = (region.end - region.start) / kPage;
        pages += count;
        found.push_back({region.start, count, kInParent});
    });
    // What was common may be so no more: the parent has written.
    std::vector<Entry> common;
    const auto look = [&](uint64_t start, uint64_t end) {
        each_common(memory_, parent ? &parent->memory_ : nullptr, start, (end - start) / kPage,
                    [&](uint64_t address, uint64_t count, bool is_common) {
                        if (is_common)
                            common.push_back({address, count, kInParent});
                        else
                            place(address, count, pieces);
                    });
    };
    for (const Entry& one : inherited_)
        without(found, one.address, one.address + one.count * kPage, look);
    for (const Entry& one : found) {
        const uint64_t end = one.address + one.count * kPage;
        if (copied({one.address, end}))
            place(one.address, one.count, pieces);
        else
            look(one.address, end);
    }
    sort(common);
    inherited_ = std::move(common);
    // A read that began before its target was protected goes on behind the protection.
    all_by_devices_ |= reads_past_the_cache();
    copy(pieces, threads);
    return pages;
}

bool Tracked::reads_past_the_cache() const {
    const std::string folder = folder_of(pid_) + "fdinfo";
    DIR* const list = opendir(folder.c_str());
    bool found = false;
    for (const dirent* one; list && !found && (one = readdir(list));) {
        const std::string text = read_file(folder + "/" + one->d_name);
        const size_t at = text.find("flags:\t");
        found = at != std::string::npos && strtoul(text.c_str() + at + 7, nullptr, 8) & O_DIRECT;
    }
    if (list)
        closedir(list);
    return found;
}

// Adds what is to be copied where: over an older copy, and at the end of the file.
void Tracked::place(uint64_t address, uint64_t count, std::vector<Piece>& pieces) {
    const uint64_t end = address + count * kPage;
    const auto add = [&](uint64_t start, uint64_t stop, uint64_t offset) {
        for (; start < stop; start += kChunk, offset += kChunk)
            pieces.push_back({start, std::min(kChunk, stop - start) / kPage, offset});
    };
    auto next = copied_.upper_bound(address);
    if (next != copied_.begin())
        next--;
    while (address < end) {
        while (next != copied_.end() && next->first + next->second.count * kPage <= address)
            next++;
        const bool is_copied = next != copied_.end() && next->first <= address;
        uint64_t stop = end;
        if (is_copied) {
            stop = std::min(end, next->first + next->second.count * kPage);
            add(address, stop, next->second.offset + (address - next->first));
        } else {
            if (next != copied_.end())
                stop = std::min(end, next->first);
            const uint64_t offset = file_.take(stop - address);
            copied_.emplace_hint(next, address, Place{(stop - address) / kPage, offset});
            add(address, stop, offset);
        }
        address = stop;
    }
}

template <class Take> void Tracked::each_copied(uint64_t address, uint64_t count, Take take) const {
    const uint64_t end = address + count * kPage;
    auto next = copied_.upper_bound(address);
    if (next != copied_.begin())
        next--;
    for (; next != copied_.end() && next->first < end; next++) {
        const uint64_t start = std::max(address, next->first);
        const uint64_t stop = std::min(end, next->first + next->second.count * kPage);
        if (start < stop)
            take(Piece{start, (stop - start) / kPage, next->second.offset + (start - next->first)});
    }
}

uint64_t Tracked::copied(const Range& range) const {
    uint64_t pages = 0;
    each_copied(range.start, (range.end - range.start) / kPage,
                [&](const Piece& piece) { pages += piece.count; });
    return pages;
}

void Tracked::copy(const std::vector<Piece>& pieces, unsigned threads) {
    std::mutex mutex;
    std::vector<uint64_t> lost;
    in_parallel(threads, pieces.size(), [&](size_t n) {
        const Piece& piece = pieces[n];
        const uint64_t bytes = piece.count * kPage;
        char* const buffer = own_buffer();
        for (uint64_t at = 0; at < bytes;) {
            const uint64_t done =
                memory_.read(piece.address + at, buffer, bytes - at) / kPage * kPage;
            file_.write(piece.offset + at, buffer, done);
            at += done;
            if (at < bytes) { // it was unmapped meanwhile
                std::lock_guard<std::mutex> lock(mutex);
                lost.push_back(piece.address + at);
                at += kPage;
            }
        }
    });
    forget(lost);
}

// Pages without a copy are not to be protected.
void Tracked::forget(const std::vector<uint64_t>& pages) {
    for (uint64_t page : pages) {
        uffdio_writeprotect none = {};
        none.range = {page, kPage};
        ioctl(descriptor_, UFFDIO_WRITEPROTECT, &none);
        auto next = copied_.upper_bound(page);
        if (next == copied_.begin())
            continue;
        next--;
        const Place place = next->second;
        const uint64_t before = (page - next->first) / kPage;
        if (before >= place.count)
            continue;
        if (before + 1 < place.count)
            copied_.emplace(page + kPage,
                            Place{place.count - before - 1, place.offset + (before + 1) * kPage});
        if (before)
            next->second.count = before;
        else
            copied_.erase(next);
    }
}

// What is protected was not written since it was copied. What is swapped out or only a mark CRIU
// looks at itself.
std::vector<scan::Region> Tracked::for_criu() const {
    std::vector<scan::Region> found;
    memory_.each_found([&](const scan::Region& region) {
        if ((region.categories & (scan::kTracked | scan::kWritten | scan::kPresent)) !=
            (scan::kTracked | scan::kPresent))
            without(spared_, region.start, region.end, [&](uint64_t start, uint64_t end) {
                found.push_back({start, end, region.categories});
            });
    });
    return found;
}

std::vector<Entry> Tracked::present() const {
    std::vector<Entry> found;
    memory_.each_found([&](const scan::Region& region) {
        if (region.categories & scan::kPresent)
            found.push_back({region.start, (region.end - region.start) / kPage, kPresent});
    });
    return found;
}

void Tracked::spare(const Tracked& parent) {
    memory_.each_found([&](const scan::Region& region) {
        if (region.categories & (scan::kTracked | scan::kSwapped))
            return;
        each_common(memory_, &parent.memory_, region.start, (region.end - region.start) / kPage,
                    [&](uint64_t address, uint64_t count, bool common) {
                        if (common)
                            spared_.push_back({address, count, kInParent});
                    });
    });
}

void Tracked::settle(const std::vector<Entry>& sent, std::vector<Range> devices, unsigned threads,
                     const Tracked* parent) {
    kept_.clear();
    if (!memory_.is_divided()) {
        if (memory_.divide({}) == 0)
            throw PagesFailure("process " + std::to_string(pid_) + " has ended");
        memory_.look(0);
    }
    std::vector<Piece> late;
    std::vector<Range> kept;
    std::vector<Entry> common;
    uint64_t least = 0, common_bytes = 0;
    const auto copy_late = [&](uint64_t start, uint64_t end) {
        place(start, (end - start) / kPage, late);
    };
    const auto inherit = [&](uint64_t start, uint64_t end) {
        each_common(memory_, &parent->memory_, start, (end - start) / kPage,
                    [&](uint64_t address, uint64_t count, bool is_common) {
                        if (!is_common)
                            return copy_late(address, address + count * kPage);
                        common.push_back({address, count, kInParent});
                        common_bytes += count * kPage;
                    });
    };
    // It has no copy, since it was common.
    const auto look = [&](uint64_t start, uint64_t end) {
        if (!parent)
            return copy_late(start, end);
        without(parent->stored_, start, end, copy_late);
        within(parent->stored_, start, end, inherit);
    };
    memory_.each_found([&](const scan::Region& region) {
        const auto keep = [&](uint64_t start, uint64_t end) {
            kept.push_back({start, end});
            if (region.categories & scan::kPresent)
                least += end - start;
        };
        if (!(region.categories & scan::kTracked))
            return within(spared_, region.start, region.end, [&](uint64_t from, uint64_t to) {
                without(sent, from, to, [&](uint64_t start, uint64_t end) {
                    keep(start, end);
                    look(start, end);
                });
            });
        without(sent, region.start, region.end, [&](uint64_t start, uint64_t end) {
            keep(start, end);
            // CRIU lets the threads run, so the kernel writes where they have their processor's
            // number. And a mark without a page looks as if it were swapped out, or cannot be read.
            if (region.categories & (scan::kSwapped | scan::kWritten))
                copy_late(start, end);
            else
                within(inherited_, start, end, look);
        });
    });
    copy(late, threads);
    stored_ = sent;
    for (const Range& range : kept)
        each_copied(range.start, (range.end - range.start) / kPage, [&](const Piece& piece) {
            kept_.push_back(piece);
            stored_.push_back({piece.address, piece.count, kPresent});
            kept_bytes_ += piece.count * kPage;
        });
    if (kept_bytes_ + common_bytes < least)
        throw PagesFailure("process " + std::to_string(pid_) + " has pages that cannot be read");
    sort(common);
    stored_.insert(stored_.end(), common.begin(), common.end());
    sort(stored_);
    inherited_ = std::move(common);
    if (all_by_devices_)
        devices = {kAllMemory};
    compare(devices, threads);
}

void Tracked::compare(const std::vector<Range>& devices, unsigned threads) {
    std::vector<Piece> pieces;
    for (const Piece& piece : kept_)
        for (const Range& range : devices) {
            const uint64_t start = std::max(piece.address, range.start / kPage * kPage);
            const uint64_t end = std::min(piece.address + piece.count * kPage,
                                          (range.end + kPage - 1) / kPage * kPage);
            for (uint64_t at = start; at < end; at += kChunk)
                pieces.push_back(
                    {at, std::min(kChunk, end - at) / kPage, piece.offset + (at - piece.address)});
        }
    std::atomic<uint64_t> compared{0}, mended{0};
    in_parallel(threads, pieces.size(), [&](size_t n) {
        const Piece& piece = pieces[n];
        const uint64_t bytes = piece.count * kPage;
        char* const buffer = own_buffer();
        char* const copy = buffer + kChunk;
        if (memory_.read(piece.address, buffer, bytes) != bytes)
            throw PagesFailure("pages of process " + std::to_string(pid_) + " cannot be read");
        file_.read(piece.offset, copy, bytes);
        compared += bytes;
        if (memcmp(buffer, copy, bytes) == 0)
            return;
        mended += bytes;
        file_.write(piece.offset, buffer, bytes);
    });
    compared_bytes_ += compared;
    mended_bytes_ += mended;
}

void Tracked::hand_over(Copier& copier, Output& output, const std::vector<Entry>& sent,
                        const PageFile& sent_file) const {
    Feed feed(copier, output);
    auto kept = kept_.begin();
    uint64_t offset = 0;
    for (const Entry& entry : sent) {
        for (; kept != kept_.end() && kept->address < entry.address; kept++)
            feed.add(kept->address, kept->count, {nullptr, &file_, kept->offset});
        feed.add(entry.address, entry.count, {nullptr, &sent_file, offset});
        offset += entry.count * kPage;
    }
    for (; kept != kept_.end(); kept++)
        feed.add(kept->address, kept->count, {nullptr, &file_, kept->offset});
    feed.end();
}

} // namespace pages
