#include "encode.h"

#include "failure.h"

#include <fcntl.h>
#include <unistd.h>

namespace pages {
namespace {

void put_varint(std::string& out, uint64_t value) {
    for (; value >= 0x80; value >>= 7)
        out += static_cast<char>(value | 0x80);
    out += static_cast<char>(value);
}

} // namespace

void put32(std::string& out, uint32_t value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_field(std::string& out, unsigned number, uint64_t value) {
    put_varint(out, number << 3);
    put_varint(out, value);
}

void put_field(std::string& out, unsigned number, const std::string& message) {
    put_varint(out, number << 3 | 2);
    put_varint(out, message.size());
    out += message;
}

void put_message(std::string& out, const std::string& message) {
    put32(out, static_cast<uint32_t>(message.size()));
    out += message;
}

void write_file(const std::string& path, const std::string& data) {
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        throw system_failure("cannot create " + path, errno);
    for (size_t done = 0; done < data.size();) {
        ssize_t count = write(fd, data.data() + done, data.size() - done);
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
