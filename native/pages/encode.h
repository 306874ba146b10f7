// Writes files of CRIU's kind: two magic numbers, then protobuf messages behind their sizes.
#pragma once

#include <cstdint>
#include <string>

namespace pages {

void put32(std::string& out, uint32_t value);
// A field of an integer type.
void put_field(std::string& out, unsigned number, uint64_t value);
// A field that is a message.
void put_field(std::string& out, unsigned number, const std::string& message);
// A message of a file.
void put_message(std::string& out, const std::string& message);

// Writes a new file. Throws PagesFailure.
void write_file(const std::string& path, const std::string& data);

} // namespace pages
