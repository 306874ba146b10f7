// Addresses of hosts that programs of the job know, and where they are since a restore on hosts
// with other addresses.
//
// Programs go on with what they know: what they connect, bind and send to is translated, and what
// they are told of sockets is translated back. The coordinator writes the table while all is
// stopped (flowgpu/host/addresses.py). Until then it is empty, and a call looks at its count alone.
//
// Rules: those of kept.h.
#ifndef FLOWGPU_EXEC_ADDRESSES_H
#define FLOWGPU_EXEC_ADDRESSES_H

#include <cstddef>
#include <cstdint>

namespace flowgpu::exec {

// The variable that gives a program the table of the one that has started it.
constexpr const char* kAddresses = "FLOWGPU_ADDRESSES";

// IPv4 addresses are as IPv6 has them, behind ::ffff.
struct AddressRow {
    unsigned char known[16];
    unsigned char now[16];
};

// The coordinator finds it by its first bytes in the library's memory, and fills what it points to.
struct AddressTable {
    char magic[16];
    uint64_t capacity;
    AddressRow* rows;
    uint64_t text_bytes;
    char* text; // the whole variable, with its name
    uint64_t count;
};

// Fills the table with the value of the variable, "KNOWN=NOW,...". What is no address is left out.
void take_addresses(const char* value);

// The variable for a program that starts; null: there is none.
const char* addresses_variable();

} // namespace flowgpu::exec

#endif
