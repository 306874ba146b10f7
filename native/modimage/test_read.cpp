// Reads images for tests/emu/test_module_images.py, which builds it with sanitizers: each image
// lies in an allocation of exactly its size.
//
// Input, again and again: how (0: bare, with its size as the limit; 1: bare, without; 2 and 3:
// behind a wrapper of version 1 and 2) and the number of parts, 32 bits each, then each part: 64
// bits of size, bytes. Output: a line an image, and one of its copy for the three without a limit:
// known, by address alone, heap, managed, length, number of further containers, why, | and names of
// variables, | and those of constants, | and those that have addresses, each with its offset
// and 1 for that of a function behind it; the texts in hexadecimal digits.
#include "modimage.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

using flowgpu::ModuleImage;

struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
};
using Part = std::unique_ptr<char, Free>;

template <class T> bool take(T* value) {
    return std::fread(value, sizeof *value, 1, stdin) == 1;
}

void print_hex(std::string_view text) {
    for (const char c : text) {
        std::printf("%02x", static_cast<unsigned char>(c));
    }
}

void print(const ModuleImage& image) {
    std::printf("%d %d %d %d %zu %zu ", image.known, image.by_address_alone, image.heap,
                image.managed, image.bytes.size(), image.linked_from.size());
    print_hex(image.why);
    for (const auto* names : {&image.variables, &image.constants}) {
        std::printf(" |");
        for (const std::string& name : *names) {
            std::printf(" ");
            print_hex(name);
        }
    }
    std::printf(" |");
    for (const flowgpu::AddressField& one : image.addresses) {
        std::printf(" ");
        print_hex(one.variable);
        std::printf(" %" PRIu64 " %d", one.offset, one.code);
    }
    std::printf("\n");
    std::fflush(stdout);
}

} // namespace

int main() {
    for (uint32_t how, count; take(&how) && take(&count);) {
        std::vector<Part> parts;
        std::vector<const void*> linked_from;
        uint64_t size = 0;
        for (uint32_t i = 0; i < count; ++i) {
            if (!take(&size)) {
                return 1;
            }
            parts.emplace_back(static_cast<char*>(std::malloc(size)));
            if (size != 0 && std::fread(parts.back().get(), size, 1, stdin) != 1) {
                return 1;
            }
            if (i > 0) {
                linked_from.push_back(parts.back().get());
            }
        }
        linked_from.push_back(nullptr);
        if (how == 0) {
            print(flowgpu::read_module_image(parts[0].get(), size));
            continue;
        }
        const flowgpu::fatbin::Wrapper wrapper{flowgpu::fatbin::kWrapperMagic, how - 1,
                                               parts[0].get(), linked_from.data()};
        const ModuleImage image = flowgpu::read_module_image(
            how == 1 ? parts[0].get() : static_cast<const void*>(&wrapper));
        print(image);
        const flowgpu::ModuleImageCopy copy(image);
        parts.clear();
        print(flowgpu::read_module_image(copy.image()));
    }
    return 0;
}
