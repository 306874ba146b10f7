// Code that a program loads: PTX text, or a cubin of the form that the emulated linker writes.
#pragma once

#include "client_header.h"

#include "ptx.h"

#include <optional>

namespace flowgpu::emu {

struct Image {
    // The 8 bytes at `offset` become the address of the driver's copy of a variable, or of a
    // function, plus `addend`.
    struct Reloc {
        uint64_t offset;
        bool function;
        size_t index; // of it among the code's
        uint64_t addend;
    };
    struct Variable {
        std::vector<uint8_t> init; // the first bytes; the rest are zeros
        std::vector<Reloc> relocs;
        // Where kernels find it instead of in the driver's copy: memory of the program's.
        std::optional<uint64_t> elsewhere;
    };
    std::string bytes; // the text or the cubin, from which the rest can be read again
    std::shared_ptr<ptx::Module> code;
    std::vector<Variable> variables; // in the order of code->variables()

    // The addresses that kernels use where the driver's copies lie at `own`.
    std::vector<uint64_t> known_to_kernels(std::vector<uint64_t> own) const;
};

// image.cc: null, with *error and *message, for bytes that cannot be loaded.
std::shared_ptr<const Image> read_image(std::string_view bytes, CUresult* error,
                                        std::string* message);

// fatbin.cc: the text or the cubin in what the program gave, for a device of this architecture (80
// for compute capability 8.0).
std::string select_code(std::string_view given, uint32_t device, CUresult* error,
                        std::string* message);

// cubin.cc
bool is_linked(std::string_view bytes);
uint32_t architecture_of(std::string_view cubin);
// Empty where it has more functions than an ELF header can count.
std::string write_cubin(std::string_view text, const ptx::Module& code, uint32_t architecture);
std::string_view text_of(std::string_view cubin);
// False, with *why, where the tables do not say where each variable of the code is.
bool read_variables(std::string_view cubin, const ptx::Module& code,
                    std::vector<Image::Variable>* variables, std::string* why);

} // namespace flowgpu::emu
