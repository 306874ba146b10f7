#include "maps.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

namespace pages {
namespace {

std::string read_file(const std::string& path) {
    std::string text;
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return text;
    char buffer[1 << 16];
    ssize_t count;
    while ((count = read(fd, buffer, sizeof buffer)) > 0)
        text.append(buffer, static_cast<size_t>(count));
    close(fd);
    return count < 0 ? std::string() : text; // half a list could lack what follows a mapping
}

std::string_view field(std::string_view status, std::string_view name) {
    size_t at = status.find(name);
    if (at == std::string_view::npos)
        return {};
    at += name.size();
    return status.substr(at, status.find('\n', at) - at);
}

// Held by a tracer, and of one pid namespace.
bool is_held(pid_t pid) {
    std::string status = read_file("/proc/" + std::to_string(pid) + "/status");
    std::string_view tracer = field(status, "\nTracerPid:\t"), own = field(status, "\nNSpid:\t");
    return !tracer.empty() && tracer != "0" && !own.empty() &&
           own.find('\t') == std::string_view::npos;
}

bool starts_with(std::string_view text, std::string_view begin) {
    return text.substr(0, begin.size()) == begin;
}

} // namespace

std::vector<Range> anonymous(pid_t pid) {
    std::vector<Range> found;
    if (!is_held(pid))
        return found;
    std::string text = read_file("/proc/" + std::to_string(pid) + "/maps");
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, end - at);
        at = end + 1;
        unsigned long low, high, inode;
        char access[5];
        int name = -1;
        if (sscanf(line.c_str(), "%lx-%lx %4s %*x %*s %lu %n", &low, &high, access, &inode,
                   &name) != 4 ||
            access[3] != 'p' || inode != 0)
            continue;
        std::string_view label =
            name < 0 ? std::string_view() : std::string_view(line).substr(name);
        if (label.empty() || label == "[heap]" || starts_with(label, "[stack") ||
            starts_with(label, "[anon:"))
            found.push_back({low, high});
    }
    return found;
}

} // namespace pages
