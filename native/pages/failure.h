// The one exception of this program: its text is the reason of the dump's failure.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <sys/stat.h>

namespace pages {

constexpr uint64_t kPage = 4096;

struct PagesFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// CRIU ended, for a reason that its own log tells.
struct Gone : PagesFailure {
    using PagesFailure::PagesFailure;
};

inline PagesFailure system_failure(const std::string& what, int error) {
    return PagesFailure(what + ": " + std::strerror(error));
}

inline std::string hex(uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

// Names the file's size, because a read may have begun anywhere behind its end.
inline PagesFailure short_file(const std::string& path, int fd) {
    struct stat file;
    if (fstat(fd, &file) != 0)
        return system_failure(path, errno);
    return PagesFailure(path + " ends at byte " + std::to_string(file.st_size));
}

} // namespace pages
