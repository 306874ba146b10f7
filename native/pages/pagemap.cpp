#include "pagemap.h"

#include <fcntl.h>
#include <unistd.h>

namespace pages {
namespace {

constexpr uint32_t kImageMagic = 0x54564319, kPagemapMagic = 0x56084025;

void put32(std::string& out, uint32_t value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// A protobuf field of an integer type.
void put_field(std::string& out, unsigned number, uint64_t value) {
    out += static_cast<char>(number << 3);
    for (; value >= 0x80; value >>= 7)
        out += static_cast<char>(value | 0x80);
    out += static_cast<char>(value);
}

void put_message(std::string& out, const std::string& message) {
    put32(out, static_cast<uint32_t>(message.size()));
    out += message;
}

} // namespace

void write_pagemap(const std::string& path, uint32_t pages_number,
                   const std::vector<Entry>& entries) {
    std::string out, message;
    put32(out, kImageMagic);
    put32(out, kPagemapMagic);
    put_field(message, 1, pages_number);
    put_message(out, message);
    for (const Entry& entry : entries) {
        message.clear();
        put_field(message, 1, entry.address);
        put_field(message, 2, 0); // the count of old versions, required and not read
        put_field(message, 4, entry.flags);
        put_field(message, 5, entry.count);
        put_message(out, message);
    }
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        throw system_failure("cannot create " + path, errno);
    for (size_t done = 0; done < out.size();) {
        ssize_t count = write(fd, out.data() + done, out.size() - done);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            int error = count < 0 ? errno : ENOSPC;
            close(fd);
            unlink(path.c_str());
            throw system_failure("cannot write " + path, error);
        }
        done += static_cast<size_t>(count);
    }
    close(fd);
}

} // namespace pages
