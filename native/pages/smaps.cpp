#include "smaps.h"

#include "parallel.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace pages {
namespace {

constexpr size_t kRead = 4096; // the kernel gives whole mappings, as many as there is room for
constexpr uint64_t kShown = 4; // to show a mapping takes as long as to count so many pages
constexpr uint64_t kHuge = 2 << 20;

std::string folder_of(pid_t pid) {
    return "/proc/" + std::to_string(pid) + "/";
}

// The first line about a mapping begins with its address, the others begin with a name.
bool is_head(char first) {
    return (first >= '0' && first <= '9') || (first >= 'a' && first <= 'f');
}

// Calls take(offset, its start) for each mapping in the text, from the offset `from` on.
template <class Take> void each_head(const std::string& text, size_t from, Take take) {
    for (size_t at = from; at < text.size();) {
        if (is_head(text[at]))
            take(at, strtoull(text.c_str() + at, nullptr, 16));
        const size_t end = text.find('\n', at);
        at = end == std::string::npos ? text.size() : end + 1;
    }
}

// Adds what the file has next; gives where the last mapping of it starts, or where all end.
uint64_t read_on(int fd, std::string& text) {
    char buffer[kRead];
    const ssize_t count = read(fd, buffer, sizeof buffer);
    if (count <= 0)
        return UINT64_MAX;
    const size_t before = text.size();
    text.append(buffer, static_cast<size_t>(count));
    uint64_t last = 0;
    each_head(text, before, [&](size_t, uint64_t start) { last = start; });
    return last;
}

} // namespace

void Smaps::close_parts() {
    for (const Part& part : parts_)
        close(part.fd);
    parts_.clear();
}

int Smaps::open_smaps() const {
    return open((folder_of(pid_) + "smaps").c_str(), O_RDONLY | O_CLOEXEC);
}

void Smaps::divide(unsigned parts, const std::function<uint64_t(const Range&)>& pages) {
    close_parts();
    mappings_.clear();
    uint64_t cost = 0;
    for (const Range& range : mappings(pid_)) {
        mappings_.push_back({range, pages(range)});
        cost += mappings_.back().pages + kShown;
    }
    std::vector<uint64_t> begins{0};
    uint64_t done = 0;
    for (const Mapping& one : mappings_) {
        if (done && done >= cost * begins.size() / parts)
            begins.push_back(one.range.start);
        done += one.pages + kShown;
    }
    for (size_t i = 0; i < begins.size(); i++)
        if (const int fd = open_smaps(); fd >= 0)
            parts_.push_back({fd, begins[i], {}});
    in_parallel(parts, parts_.size(), [&](size_t n) {
        std::string passed;
        uint64_t begin = parts_[n].first;
        while (begin && (passed.clear(), read_on(parts_[n].fd, passed)) < begin)
            ;
    });
}

std::vector<uint64_t> Smaps::pieces(unsigned count) const {
    uint64_t pages = 0, done = 0;
    for (const Mapping& one : mappings_)
        pages += one.pages;
    const uint64_t most = std::max<uint64_t>(pages / count, 1);
    std::vector<uint64_t> begins;
    for (const Mapping& one : mappings_) {
        const uint64_t here = one.pages / most;
        for (uint64_t n = 1; n < here; n++)
            begins.push_back((one.range.start + (one.range.end - one.range.start) / here * n) /
                             kHuge * kHuge);
        done += one.pages;
        if (done >= most || here > 1) {
            begins.push_back(one.range.end);
            done = 0;
        }
    }
    std::sort(begins.begin(), begins.end());
    return begins;
}

void Smaps::begin(size_t part) {
    Part& one = parts_[part];
    one.text.clear();
    one.first = UINT64_MAX;
    read_on(one.fd, one.text);
    if (!one.text.empty())
        one.first = strtoull(one.text.c_str(), nullptr, 16);
}

void Smaps::end(size_t part) {
    Part& one = parts_[part];
    const uint64_t next = part + 1 < parts_.size() ? parts_[part + 1].first : UINT64_MAX;
    if (one.text.empty())
        return;
    uint64_t last = 0;
    each_head(one.text, 0, [&](size_t, uint64_t start) { last = start; });
    while (last < next)
        last = read_on(one.fd, one.text);
    size_t stop = one.text.size();
    each_head(one.text, 0, [&](size_t at, uint64_t start) {
        if (start >= next)
            stop = std::min(stop, at);
    });
    one.text.resize(stop);
}

// Mappings may have come or gone since the parts were made, and another program may have begun. The
// shorter list has the same first lines, and is read in no time.
std::string Smaps::text() {
    std::string found, heads;
    for (const Part& part : parts_)
        found += part.text;
    close_parts();
    each_head(found, 0,
              [&](size_t at, uint64_t) { heads.append(found, at, found.find('\n', at) + 1 - at); });
    if (heads.empty() || heads != read_file(folder_of(pid_) + "maps"))
        return read_file(folder_of(pid_) + "smaps");
    return found;
}

} // namespace pages
