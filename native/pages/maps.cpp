#include "maps.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

namespace pages {

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

namespace {

std::string_view field(std::string_view status, std::string_view name) {
    size_t at = status.find(name);
    if (at == std::string_view::npos)
        return {};
    at += name.size();
    return status.substr(at, status.find('\n', at) - at);
}

std::string status_of(pid_t pid) {
    return read_file("/proc/" + std::to_string(pid) + "/status");
}

bool has_one_number(std::string_view status) {
    const std::string_view own = field(status, "\nNSpid:\t");
    return !own.empty() && own.find('\t') == std::string_view::npos;
}

// Held by a tracer, and of one pid namespace.
bool is_held(pid_t pid) {
    const std::string status = status_of(pid);
    const std::string_view tracer = field(status, "\nTracerPid:\t");
    return !tracer.empty() && tracer != "0" && has_one_number(status);
}

bool starts_with(std::string_view text, std::string_view begin) {
    return text.substr(0, begin.size()) == begin;
}

struct Mapping {
    Range range;
    char access[5];
    unsigned long inode;
    std::string_view name;
};

bool is_anonymous(const Mapping& one) {
    return one.inode == 0 && (one.name.empty() || one.name == "[heap]" ||
                              starts_with(one.name, "[stack") || starts_with(one.name, "[anon:"));
}

bool is_of_device(const Mapping& one) {
    return starts_with(one.name, "/dev/") && !starts_with(one.name, "/dev/zero");
}

template <class Take> void each_mapping(pid_t pid, Take take) {
    const std::string text = read_file("/proc/" + std::to_string(pid) + "/maps");
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string line = text.substr(at, end - at);
        at = end + 1;
        unsigned long low, high;
        Mapping found;
        int name = -1;
        if (sscanf(line.c_str(), "%lx-%lx %4s %*x %*s %lu %n", &low, &high, found.access,
                   &found.inode, &name) != 4)
            continue;
        found.range = {low, high};
        if (name >= 0)
            found.name = std::string_view(line).substr(static_cast<size_t>(name));
        take(found);
    }
}

} // namespace

std::vector<Range> anonymous(pid_t pid) {
    std::vector<Range> found;
    if (!is_held(pid))
        return found;
    each_mapping(pid, [&](const Mapping& one) {
        if (one.access[3] == 'p' && is_anonymous(one))
            found.push_back(one.range);
    });
    return found;
}

std::vector<Own> own(pid_t pid) {
    std::vector<Own> found;
    each_mapping(pid, [&](const Mapping& one) {
        const bool file = starts_with(one.name, "/") && !is_of_device(one);
        if (one.access[3] == 'p' && (file || is_anonymous(one)))
            found.push_back({one.range, is_anonymous(one)});
    });
    return found;
}

uint64_t first_code(pid_t pid) {
    uint64_t found = 0;
    each_mapping(pid, [&](const Mapping& one) {
        if (!found && one.access[2] == 'x')
            found = one.range.start;
    });
    return found;
}

pid_t parent_of(pid_t pid) {
    const std::string status = status_of(pid);
    return static_cast<pid_t>(strtol(std::string(field(status, "\nPPid:\t")).c_str(), nullptr, 10));
}

bool has_other_number(pid_t pid) {
    return !has_one_number(status_of(pid));
}

std::vector<Range> mappings(pid_t pid) {
    std::vector<Range> found;
    each_mapping(pid, [&](const Mapping& one) { found.push_back(one.range); });
    return found;
}

std::vector<Range> writable(pid_t pid) {
    std::vector<Range> found;
    each_mapping(pid, [&](const Mapping& one) {
        if (one.access[1] == 'w' && one.access[3] == 'p' && !is_of_device(one))
            found.push_back(one.range);
    });
    return found;
}

} // namespace pages
