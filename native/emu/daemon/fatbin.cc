// Finds code in what a program gives to the driver: PTX text, a cubin of the emulated linker's, or
// a fat binary that holds some of either.
#include "image.h"

#include "fatbin.h"

namespace flowgpu::emu {

namespace {

// As on hardware, machine code runs on its own major version, of the same or a later minor one.
bool is_code_for(uint32_t device, uint32_t architecture) {
    return architecture / 10 == device / 10 && architecture <= device;
}

// 80 is "8.0".
std::string capability(uint32_t architecture) {
    return std::to_string(architecture / 10) + "." + std::to_string(architecture % 10);
}

// As on hardware, a cubin for the very device comes before the newest PTX that it may run.
std::string select_entry(std::string_view container, uint32_t device, std::string* message) {
    std::string best;
    uint32_t best_architecture = 0;
    fatbin::Entries entries(container);
    for (fatbin::Entry entry; entries.next(&entry);) {
        const bool cubin = entry.kind == fatbin::kCubin && is_code_for(device, entry.architecture);
        const bool ptx = entry.kind == fatbin::kPtx && entry.architecture <= device &&
                         entry.architecture >= best_architecture;
        std::string buffer;
        std::string_view code;
        if ((!cubin && !ptx) || !fatbin::unpack(entry, &buffer, &code, message) || code.empty()) {
            continue;
        }
        if (ptx) {
            best = code.substr(0, code.find('\0'));
            best_architecture = entry.architecture;
        } else if (is_linked(code)) {
            return std::string(code);
        }
    }
    return best;
}

} // namespace

std::string select_code(std::string_view given, uint32_t device, CUresult* error,
                        std::string* message) {
    *error = CUDA_SUCCESS;
    if (fatbin::value_at<uint32_t>(given, 0) == fatbin::kMagic) {
        std::string best = select_entry(given, device, message);
        *error = best.empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
        if (best.empty() && message->empty()) {
            *message = "the fat binary holds no PTX for compute capability " + capability(device) +
                       " or less";
        }
        return best;
    }
    if (given.substr(0, 4) == "\177ELF") {
        const bool linked = is_linked(given);
        if (linked && is_code_for(device, architecture_of(given))) {
            return std::string(given);
        }
        *error = CUDA_ERROR_NO_BINARY_FOR_GPU;
        *message = linked ? "a cubin for compute capability " + capability(architecture_of(given))
                          : "a cubin holds machine code; the emulated GPU runs PTX";
        return {};
    }
    // Measured: what has no directive in it is no PTX at all.
    if (given.find('.') == std::string_view::npos) {
        *error = CUDA_ERROR_INVALID_IMAGE;
    }
    return std::string(given.substr(0, given.find('\0')));
}

} // namespace flowgpu::emu
