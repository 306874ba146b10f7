// Reads the code that a program loads, and the first values of its variables.
#include "image.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace flowgpu::emu {

namespace {

bool newer_than_the_driver(const std::string& text) {
    int major = 0;
    int minor = 0;
    const size_t at = text.find(".version");
    return at != std::string::npos &&
           std::sscanf(text.c_str() + at, ".version %d.%d", &major, &minor) == 2 &&
           (major > 9 || (major == 9 && minor > 0));
}

std::shared_ptr<ptx::Module> parse(const std::string& text, CUresult* error, std::string* message) {
    if (newer_than_the_driver(text)) {
        *error = CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
        *message = "PTX of a version above 9.0";
        return nullptr;
    }
    ptx::Error parse_error;
    auto code = ptx::Module::parse(text, &parse_error);
    if (code == nullptr) {
        *error = CUDA_ERROR_INVALID_PTX;
        *message = parse_error.message;
    }
    return code;
}

template <class T> size_t index_of(const std::vector<T>& all, const std::string& name) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const T& one) { return one.name == name; });
    return static_cast<size_t>(found - all.begin());
}

// The first value that the text gives to a variable: a constant is already where an address goes.
Image::Variable first_value(const ptx::Module& code, const ptx::Variable& variable) {
    Image::Variable out;
    out.init = variable.init;
    for (const ptx::Variable::Reloc& reloc : variable.relocs) {
        uint64_t addend;
        std::memcpy(&addend, variable.init.data() + reloc.offset, sizeof addend);
        size_t index = index_of(code.variables(), reloc.symbol);
        const bool function = index == code.variables().size();
        index = function ? index_of(code.functions(), reloc.symbol) : index;
        out.relocs.push_back({reloc.offset, function, index, addend});
    }
    return out;
}

} // namespace

std::vector<uint64_t> Image::known_to_kernels(std::vector<uint64_t> own) const {
    for (size_t i = 0; i < own.size(); ++i) {
        own[i] = variables[i].elsewhere.value_or(own[i]);
    }
    return own;
}

std::shared_ptr<const Image> read_image(std::string_view bytes, CUresult* error,
                                        std::string* message) {
    auto image = std::make_shared<Image>();
    const bool linked = is_linked(bytes);
    image->bytes = bytes;
    image->code = parse(std::string(linked ? text_of(bytes) : bytes), error, message);
    if (image->code == nullptr) {
        return nullptr;
    }
    if (linked) {
        if (!read_variables(bytes, *image->code, &image->variables, message)) {
            *error = CUDA_ERROR_INVALID_IMAGE;
            return nullptr;
        }
        return image;
    }
    for (const ptx::Variable& variable : image->code->variables()) {
        image->variables.push_back(first_value(*image->code, variable));
    }
    return image;
}

} // namespace flowgpu::emu
