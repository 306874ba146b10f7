#include "image.h"

#include <fstream>
#include <iterator>

#include <link.h>

namespace flowgpu::replay {

namespace {

struct Search {
    uintptr_t start;
    uintptr_t end;
    bool found;
    size_t objects; // looked at, the program first
};

int look(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<Search*>(data);
    search->objects++;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && !(header.p_flags & PF_W) && search->start >= start &&
            search->end <= start + header.p_filesz)
            search->found = true;
    }
    return search->found;
}

// The read-only part of the program or of one of its libraries: it stays as it is, and where it is.
bool is_constant(std::string_view bytes, bool* of_program) {
    const auto start = reinterpret_cast<uintptr_t>(bytes.data());
    Search search = {start, start + bytes.size(), false, 0};
    dl_iterate_phdr(look, &search);
    *of_program = search.found && search.objects == 1;
    return search.found;
}

} // namespace

Image Image::of_memory(const void* image) {
    Image kept;
    const ModuleImage read = read_module_image(image);
    if (!read.known) {
        kept.why = "from an image that cannot be kept: " + read.why;
        return kept;
    }
    for (const std::string& name : read.variables)
        kept.variables.emplace_back().name = name;
    kept.constants = read.constants;
    kept.by_address_alone = read.by_address_alone;
    kept.heap = read.heap;
    kept.managed = read.managed;
    if (read.linked_from.empty() && is_constant(read.bytes, &kept.of_program)) {
        kept.data = read.bytes.data();
        kept.bytes = read.bytes.size();
        return kept;
    }
    kept.copy = std::make_shared<ModuleImageCopy>(read);
    kept.data = kept.copy->image();
    return kept;
}

bool Image::is_there() const {
    bool of_program = false;
    return copy || is_constant({static_cast<const char*>(data), bytes}, &of_program);
}

Image Image::of_file(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!bytes.empty()) {
        bytes.push_back(0); // a text need not end with it in a file
        return of_memory(bytes.data());
    }
    Image kept;
    kept.why = "from a file that could not be read again";
    return kept;
}

template <>
Options<CUjit_option>::Options(const CUjit_option* given, void* const* of, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        switch (given[i]) {
        case CU_JIT_WALL_TIME:
        case CU_JIT_INFO_LOG_BUFFER:
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
        case CU_JIT_ERROR_LOG_BUFFER:
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
        case CU_JIT_LOG_VERBOSE:
            continue;
        default:
            names.push_back(given[i]);
            values.push_back(of ? of[i] : nullptr);
        }
    }
}

template <>
Options<CUlibraryOption>::Options(const CUlibraryOption* given, void* const* of, unsigned count)
    : names(given, given + count) {
    using Tables = CUlibraryHostUniversalFunctionAndDataTable;
    for (unsigned i = 0; i < count; i++) {
        void* value = of ? of[i] : nullptr; // where no option has one, there may be no array
        if (given[i] == CU_LIBRARY_HOST_UNIVERSAL_FUNCTION_AND_DATA_TABLE && value) {
            copies.push_back(std::make_shared<Tables>(*static_cast<Tables*>(value)));
            value = copies.back().get();
        }
        values.push_back(value);
    }
}

} // namespace flowgpu::replay
