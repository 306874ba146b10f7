// What the loading of modules and the linker have in common: the logs of a compilation, and files.
#pragma once

#include "client.h"

namespace flowgpu::emu {

// A buffer of the program's, and where it wants to be told how much is in it.
struct JitLog {
    char* buffer = nullptr;
    size_t size = 0;
    void** size_out = nullptr;

    void write(const std::string& text) const;
};

struct JitLogs {
    JitLogs(unsigned int count, const CUjit_option* options, void** values);
    JitLog error;
    JitLog info;
};

// False where it cannot be opened. Zeros for an ELF header follow the content.
bool read_file(const char* path, std::string* content);

} // namespace flowgpu::emu
