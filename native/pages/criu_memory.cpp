// Preloaded into CRIU. What CRIU asks the kernel at each start it keeps in /run/criu.kdat, but only
// where that is a tmpfs, so that no answer outlives the kernel that gave it. Elsewhere, as in many
// containers, the questions take 0.1 to 0.3 s of each dump and restore: there the file is kept in
// the folder FLOWGPU_CRIU_MEMORY, that flowgpu/host/criu.py has made on a tmpfs.
//
// What is known of processes that stand still (standing.h) CRIU gets from there: the list of their
// mappings, and which pages it has to send. The others it takes for pages that the process does not
// have. What is not there the kernel is asked. From its answers, pages of tracked memory are taken
// that were not written since their last copy (tracked.h).
//
// A process whose session none of its parents has is made by CRIU below one that ends at once. The
// job's first process is to adopt it, if it adopted orphans before (FLOWGPU_SUBREAPER, its id).
// CRIU tells the kernel so only later.
//
// Takes nothing but names from the C library it meets, which is the one that CRIU comes with.
#include <cstdarg>
#include <cstddef>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "scan.h"
#include "standing.h"

extern "C" {
long syscall(long, ...);
char* getenv(const char*);
}

namespace {

constexpr char kKept[] = "/run/criu.kdat";
constexpr size_t kFolder = sizeof "/run" - 1;

// `path`, or where it is kept instead, in `place`.
const char* kept(const char* path, char (&place)[4096]) {
    for (size_t i = 0; i < sizeof kKept - 1; i++)
        if (!path || path[i] != kKept[i])
            return path;
    const char* folder = getenv("FLOWGPU_CRIU_MEMORY");
    size_t used = 0;
    const char* const parts[] = {folder, path + kFolder};
    for (const char* part : parts)
        for (; part && *part && used < sizeof place; part++)
            place[used++] = *part;
    if (!folder || used == sizeof place)
        return path;
    place[used] = 0;
    return place;
}

// Whatever the C library has for it, a call of the kernel.
template <class... Words> long call(long number, Words... words) {
    return syscall(number, words...);
}

int number_at(const char*& text) {
    int found = 0;
    while (*text >= '0' && *text <= '9')
        found = found * 10 + (*text++ - '0');
    return found;
}

bool is(const char* text, const char* other) {
    while (*text && *text == *other) {
        text++;
        other++;
    }
    return *text == *other;
}

// What is told of processes that stand still. Waits for it once.
const char* told() {
    static const char* found = nullptr;
    static bool asked = false;
    const char* words = getenv(pages::standing::kVariable);
    if (asked || !words)
        return found;
    asked = true;
    const int file = number_at(words);
    words += *words == ' ';
    const int said = number_at(words);
    char there = 0;
    struct stat about;
    if (call(SYS_read, said, &there, 1) != 1 || there != pages::standing::kIsThere ||
        call(SYS_fstat, file, &about) != 0)
        return found;
    const long at = call(SYS_mmap, nullptr, about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (at != -1)
        found = reinterpret_cast<const char*>(at);
    return found;
}

// Finds what we were told of the process whose folder in /proc is open as `folder`.
const pages::standing::Process* told_of(int folder) {
    char link[64] = "/proc/self/fd/", path[64];
    size_t used = sizeof "/proc/self/fd/" - 1, digits = 1;
    for (int rest = folder; rest >= 10; rest /= 10)
        digits++;
    for (size_t i = digits; i > 0; i--, folder /= 10)
        link[used + i - 1] = static_cast<char>('0' + folder % 10);
    link[used + digits] = 0;
    const long bytes = call(SYS_readlink, link, path, sizeof path - 1);
    constexpr char kProc[] = "/proc/";
    constexpr long kHead = sizeof kProc - 1;
    if (bytes <= kHead)
        return nullptr;
    path[bytes] = 0;
    const char* rest = path + kHead;
    const auto pid = static_cast<uint64_t>(number_at(rest));
    const char* data = *rest ? nullptr : told();
    if (!data)
        return nullptr;
    const auto* all =
        reinterpret_cast<const pages::standing::Process*>(data + sizeof(pages::standing::Head));
    for (uint64_t n = 0; n < reinterpret_cast<const pages::standing::Head*>(data)->processes; n++)
        if (all[n].pid == pid)
            return &all[n];
    return nullptr;
}

// A file with a process's list of mappings; -1: the kernel has to be asked.
int list_of_mappings(int folder) {
    const auto* one = told_of(folder);
    if (!one || !one->smaps_bytes)
        return -1;
    const long fd = call(SYS_memfd_create, "smaps", 0);
    uint64_t done = 0;
    while (fd >= 0 && done < one->smaps_bytes) {
        const long count = call(SYS_write, fd, told() + one->smaps + done, one->smaps_bytes - done);
        if (count <= 0) {
            call(SYS_close, fd);
            return -1;
        }
        done += static_cast<uint64_t>(count);
    }
    if (fd >= 0)
        call(SYS_lseek, fd, 0, 0);
    return static_cast<int>(fd);
}

// What the kernel is asked about pages by the descriptor that CRIU has opened last for it.
int pages_fd = -1;
const pages::standing::Process* pages_of = nullptr;

// What CRIU 4.2 asks, if that is what the server has looked up.
bool is_usual(const pages::scan::Request& request) {
    using namespace pages::scan;
    return request.flags == 0 && request.inverted == kNotOwn && request.all_of == kNotOwn &&
           request.any_of == (kPresent | kSwapped) && !request.most_pages &&
           request.start >= kLowest && request.end <= kHighest && pages_of && pages_of->kinds &&
           !(request.wanted & ~pages_of->kinds);
}

int regions_told(pages::scan::Request& request) {
    using pages::scan::Region;
    const auto* regions = reinterpret_cast<const Region*>(told() + pages_of->regions);
    uint64_t low = 0, high = pages_of->region_count;
    while (low < high) { // the first one that ends behind the start
        const uint64_t middle = low + (high - low) / 2;
        if (regions[middle].end <= request.start)
            low = middle + 1;
        else
            high = middle;
    }
    auto* to = reinterpret_cast<Region*>(request.regions);
    uint64_t count = 0;
    request.walk_end = request.end;
    for (; low < pages_of->region_count && regions[low].start < request.end; low++) {
        if (count == request.most_regions) {
            request.walk_end = to[count - 1].end;
            break;
        }
        Region one = regions[low];
        one.start = one.start < request.start ? request.start : one.start;
        one.end = one.end > request.end ? request.end : one.end;
        one.categories &= request.wanted;
        to[count++] = one;
    }
    return static_cast<int>(count);
}

} // namespace

#define FGC_EXPORT extern "C" __attribute__((visibility("default")))

FGC_EXPORT int open64(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const unsigned mode = flags & O_CREAT ? va_arg(more, unsigned) : 0; // CRIU makes no other
    va_end(more);
    char place[4096];
    return static_cast<int>(syscall(SYS_openat, AT_FDCWD, kept(path, place), flags, mode));
}

FGC_EXPORT int openat64(int folder, const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const bool makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
    const unsigned mode = makes ? va_arg(more, unsigned) : 0;
    va_end(more);
    if (folder >= 0 && is(path, "smaps"))
        if (const int fd = list_of_mappings(folder); fd >= 0)
            return fd;
    const int fd = static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
    if (folder >= 0 && is(path, "pagemap")) {
        pages_fd = fd;
        pages_of = told_of(folder);
    }
    return fd;
}

FGC_EXPORT int ioctl(int fd, unsigned long number, ...) {
    va_list more;
    va_start(more, number);
    void* const argument = va_arg(more, void*);
    va_end(more);
    if (number != pages::scan::kScan || !getenv(pages::standing::kVariable))
        return static_cast<int>(syscall(SYS_ioctl, fd, number, argument));
    using namespace pages::scan;
    if (fd == pages_fd && is_usual(*static_cast<Request*>(argument)))
        return regions_told(*static_cast<Request*>(argument));
    constexpr auto kKinds = kTracked | kWritten | kPresent;
    auto* request = static_cast<Request*>(argument);
    const auto wanted = request->wanted;
    request->wanted |= kKinds;
    const int found = static_cast<int>(syscall(SYS_ioctl, fd, number, request));
    request->wanted = wanted;
    if (found >= 0 && static_cast<uint64_t>(found) < request->most_regions)
        request->walk_end = request->end; // as in tracked.cpp
    auto* regions = reinterpret_cast<Region*>(request->regions);
    int left = 0;
    for (int i = 0; i < found; i++) {
        if ((regions[i].categories & kKinds) == (kTracked | kPresent))
            continue;
        regions[left] = regions[i];
        regions[left++].categories &= wanted;
    }
    return found < 0 ? found : left;
}

FGC_EXPORT int unlink(const char* path) {
    char place[4096];
    return static_cast<int>(syscall(SYS_unlinkat, AT_FDCWD, kept(path, place), 0));
}

FGC_EXPORT int rename(const char* from, const char* to) {
    char from_place[4096], to_place[4096];
    return static_cast<int>(syscall(SYS_rename, kept(from, from_place), kept(to, to_place)));
}

FGC_EXPORT pid_t setsid() {
    const char* adopts = getenv("FLOWGPU_SUBREAPER");
    if (adopts && number_at(adopts) == call(SYS_getpid))
        call(SYS_prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    return static_cast<pid_t>(syscall(SYS_setsid));
}
