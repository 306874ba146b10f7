#include "pagemap.h"

#include "encode.h"

namespace pages {
namespace {

constexpr uint32_t kImageMagic = 0x54564319, kPagemapMagic = 0x56084025;

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
    write_file(path, out);
}

} // namespace pages
