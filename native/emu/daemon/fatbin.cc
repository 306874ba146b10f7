// Finds PTX text in what a program gives to the driver: text, or a fat binary that holds some.
#include "state.h"

#include "fatbin.h"

namespace flowgpu::emu {

std::string extract_ptx(std::string_view image, CUresult* error, std::string* message) {
    *error = CUDA_ERROR_INVALID_IMAGE;
    if (fatbin::value_at<uint32_t>(image, 0) != fatbin::kMagic) {
        if (image.substr(0, 4) == "\177ELF") {
            *error = CUDA_ERROR_NO_BINARY_FOR_GPU;
            *message = "a cubin holds machine code; the emulated GPU runs PTX";
            return {};
        }
        // Measured: what has no directive in it is no PTX at all.
        if (image.find('.') != std::string_view::npos) {
            *error = CUDA_SUCCESS;
        }
        return std::string(image.substr(0, image.find('\0')));
    }
    std::string best;
    uint32_t best_architecture = 0;
    fatbin::Entries entries(image);
    for (fatbin::Entry entry; entries.next(&entry);) {
        // The newest PTX that a device of compute capability 8.0 may run.
        constexpr uint32_t kArchitecture = 80;
        if (entry.kind == fatbin::kPtx && entry.architecture <= kArchitecture &&
            entry.architecture >= best_architecture) {
            std::string buffer;
            std::string_view text;
            if (fatbin::unpack(entry, &buffer, &text, message) && !text.empty()) {
                best = text.substr(0, text.find('\0'));
                best_architecture = entry.architecture;
            }
        }
    }
    *error = best.empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
    if (best.empty() && message->empty()) {
        *message = "the fat binary holds no PTX for compute capability 8.0 or less";
    }
    return best;
}

} // namespace flowgpu::emu
