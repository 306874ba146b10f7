#include "image.h"

#include <fstream>
#include <functional>
#include <iterator>
#include <string_view>
#include <utility>

#include <link.h>

namespace flowgpu::replay {

namespace {

struct Parts {
    std::vector<Part> parts;
    size_t objects = 0; // looked at, the program first
};

int look(dl_phdr_info* info, size_t, void* data) {
    auto* all = static_cast<Parts*>(data);
    const size_t library = all->objects++ ? std::hash<std::string_view>()(info->dlpi_name) : 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && !(header.p_flags & PF_W))
            all->parts.push_back({start, start + header.p_filesz, library});
    }
    return 0;
}

std::vector<Part> read_only_parts() {
    Parts all;
    dl_iterate_phdr(look, &all);
    return std::move(all.parts);
}

const Part* part_of(const std::vector<Part>& parts, const void* data, size_t bytes) {
    const auto start = reinterpret_cast<uintptr_t>(data);
    for (const Part& part : parts)
        if (start >= part.start && start + bytes <= part.end)
            return &part;
    return nullptr;
}

} // namespace

Image Image::of_memory(const void* image) {
    Image kept;
    const ModuleImage read = read_module_image(image);
    if (!read.known) {
        kept.why = "from an image that cannot be kept: " + read.why;
        return kept;
    }
    auto next = read.addresses.begin(); // both are sorted by name
    for (const std::string& name : read.variables) {
        Variable& variable = kept.variables.emplace_back();
        variable.name = name;
        for (; next != read.addresses.end() && next->variable == name; ++next)
            variable.addresses.push_back({next->offset, next->code});
    }
    kept.constants = read.constants;
    kept.by_address_alone = read.by_address_alone;
    kept.heap = read.heap;
    kept.managed = read.managed;
    const std::vector<Part> parts = read_only_parts();
    const Part* part = part_of(parts, read.bytes.data(), read.bytes.size());
    if (part && read.linked_from.empty()) {
        kept.data = read.bytes.data();
        kept.bytes = read.bytes.size();
        kept.library = part->library;
        return kept;
    }
    kept.copy = std::make_shared<ModuleImageCopy>(read);
    kept.data = kept.copy->image();
    return kept;
}

LoadedImages::LoadedImages() : parts_(read_only_parts()) {}

bool LoadedImages::have(const Image& image) const {
    if (image.copy || !image.data)
        return true;
    const Part* part = part_of(parts_, image.data, image.bytes);
    return part && part->library == image.library;
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
