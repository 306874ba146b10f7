// Moves cubins and chooses code for tests/emu/test_movable_code.py, which builds it with
// sanitizers.
//
// Input, again and again: what (0: move; 1: choose; 2: choose behind a wrapper that names the image
// as a relocatable part as well; 3: move managed variables), two numbers, 64 bits each (move: two
// bases; choose: major and minor), 64 bits of size, bytes. Output, texts in hexadecimal digits:
// move: a line with why, bytes, of each place name, offset and size, | and of each address of a
// function name and offset; and for each base one with
// the cubin, the contents, whether the cubin is known as an image, and its variables.
// choose: a line with form, why, and the code.
#include "movable.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
};

// More is not asked for: a damaged cubin may want any.
constexpr uint64_t kMostContents = uint64_t{16} << 20;

template <class T> bool take(T* value) {
    return std::fread(value, sizeof *value, 1, stdin) == 1;
}

void print_hex(std::string_view text) {
    static const char kDigits[] = "0123456789abcdef";
    std::string out;
    for (const char c : text) {
        out += kDigits[static_cast<unsigned char>(c) >> 4];
        out += kDigits[static_cast<unsigned char>(c) & 15];
    }
    std::fwrite(out.data(), 1, out.size(), stdout);
}

using Which = flowgpu::MovableCubin::Which;

void move(std::string_view code, Which which, const uint64_t (&bases)[2]) {
    const flowgpu::MovableCubin cubin(std::string(code), which);
    print_hex(cubin.why());
    std::printf(" %" PRIu64, cubin.bytes());
    for (const auto& place : cubin.places()) {
        std::printf(" ");
        print_hex(place.name);
        std::printf(" %" PRIu64 " %" PRIu64, place.offset, place.bytes);
    }
    std::printf(" |");
    for (const auto& one : cubin.code_addresses()) {
        std::printf(" ");
        print_hex(one.variable);
        std::printf(" %" PRIu64, one.offset);
    }
    std::printf("\n");
    for (const uint64_t base : bases) {
        const std::string moved = cubin.cubin_at(base);
        print_hex(moved);
        std::printf(" ");
        if (cubin.bytes() <= kMostContents) {
            std::string contents(cubin.bytes(), '\0');
            for (const flowgpu::MovableCubin::Value& value : cubin.values_at(base)) {
                contents.replace(value.offset, value.bytes.size(), value.bytes);
            }
            print_hex(contents);
        }
        const auto image = flowgpu::read_module_image(moved.data(), moved.size());
        std::printf(" %d", image.known);
        for (const std::string& name : image.variables) {
            std::printf(" ");
            print_hex(name);
        }
        std::printf("\n");
    }
}

void choose(const void* image, size_t size, bool linked, const uint64_t (&capability)[2]) {
    const void* linked_from[] = {image, nullptr};
    const flowgpu::fatbin::Wrapper wrapper{flowgpu::fatbin::kWrapperMagic, 2, image, linked_from};
    const auto code = flowgpu::choose_code(
        linked ? flowgpu::read_module_image(&wrapper) : flowgpu::read_module_image(image, size),
        static_cast<unsigned>(capability[0]), static_cast<unsigned>(capability[1]));
    std::printf("%d ", static_cast<int>(code.form));
    print_hex(code.why);
    std::printf(" ");
    print_hex(code.bytes);
    std::printf("\n");
}

} // namespace

int main() {
    uint64_t numbers[2], size = 0;
    for (uint32_t what; take(&what) && take(&numbers) && take(&size);) {
        const std::unique_ptr<char, Free> bytes(static_cast<char*>(std::malloc(size)));
        if (size != 0 && std::fread(bytes.get(), size, 1, stdin) != 1) {
            return 1;
        }
        if (what == 0 || what == 3) {
            move({bytes.get(), size}, what == 0 ? Which::plain : Which::managed, numbers);
        } else {
            choose(bytes.get(), size, what == 2, numbers);
        }
        std::fflush(stdout);
    }
    return 0;
}
