// Preloaded into CRIU. What CRIU asks the kernel at each start it keeps in /run/criu.kdat, but only
// where that is a tmpfs, so that no answer outlives the kernel that gave it. Elsewhere, as in many
// containers, the questions take 0.1 to 0.3 s of each dump and restore: there the file is kept in
// the folder FLOWGPU_CRIU_MEMORY, that flowgpu/criu.py has made on a tmpfs.
//
// Where FLOWGPU_PAGES_ARE_EARLY is set, pages of tracked memory that were not written since their
// last copy (tracked.h) are hidden from CRIU, which takes them for pages that the process does not
// have.
//
// Takes nothing but names from the C library it meets, which is the one that CRIU comes with.
#include <cstdarg>
#include <cstddef>

#include <fcntl.h>
#include <sys/syscall.h>

#include "scan.h"

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

FGC_EXPORT int ioctl(int fd, unsigned long number, ...) {
    va_list more;
    va_start(more, number);
    void* const argument = va_arg(more, void*);
    va_end(more);
    if (number != pages::scan::kScan || !getenv("FLOWGPU_PAGES_ARE_EARLY"))
        return static_cast<int>(syscall(SYS_ioctl, fd, number, argument));
    using namespace pages::scan;
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
