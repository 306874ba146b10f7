// Finds PTX text in what a program gives to the driver: text, or a fat binary that holds some.
#include "state.h"

#include <dlfcn.h>

namespace flowgpu::emu {

namespace {

constexpr uint32_t kFatbinMagic = 0xBA55ED50;
constexpr uint16_t kKindPtx = 1;
constexpr uint64_t kFlagLz4 = 0x2000;
constexpr uint64_t kFlagZstd = 0x8000;
constexpr uint32_t kZstdFrame = 0xFD2FB528;
constexpr uint64_t kMostText = 256ull << 20;

struct FatbinHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t header_size;
    uint64_t size;
};

struct EntryHeader {
    uint16_t kind;
    uint16_t version;
    uint32_t header_size;
    uint64_t padded_size;
    uint32_t unused0;
    uint32_t packed_size;
    uint32_t unused1;
    uint32_t unused2;
    uint32_t architecture;
    uint32_t address_bits;
    uint64_t unused3;
    uint64_t flags;
    uint64_t unused4;
    uint64_t unpacked_size;
};
static_assert(sizeof(EntryHeader) == 72);

template <class T> T at(std::string_view data) {
    T value{};
    std::memcpy(&value, data.data(), std::min(sizeof value, data.size()));
    return value;
}

// The compression libraries are opened when an image needs them: no image of a test does.
void* symbol(const char* library, const char* name) {
    void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
    return handle == nullptr ? nullptr : ::dlsym(handle, name);
}

bool unpack_lz4(std::string_view packed, std::string* out) {
    using Decompress = int (*)(const char*, char*, int, int);
    auto* run = reinterpret_cast<Decompress>(symbol("liblz4.so.1", "LZ4_decompress_safe"));
    return run != nullptr && run(packed.data(), out->data(), static_cast<int>(packed.size()),
                                 static_cast<int>(out->size())) == static_cast<int>(out->size());
}

bool unpack_zstd(std::string_view packed, std::string* out) {
    using Decompress = size_t (*)(void*, size_t, const void*, size_t);
    auto* run = reinterpret_cast<Decompress>(symbol("libzstd.so.1", "ZSTD_decompress"));
    return run != nullptr &&
           run(out->data(), out->size(), packed.data(), packed.size()) == out->size();
}

std::string entry_text(const EntryHeader& entry, std::string_view payload, std::string* message) {
    const bool packed = entry.unpacked_size != 0;
    const uint64_t stored = packed && entry.packed_size != 0 ? entry.packed_size : payload.size();
    payload = payload.substr(0, stored);
    if (!packed) {
        return std::string(payload);
    }
    std::string text(std::min(entry.unpacked_size, kMostText), '\0');
    const bool zstd = (entry.flags & kFlagZstd) != 0 || at<uint32_t>(payload) == kZstdFrame;
    const bool lz4 = (entry.flags & kFlagLz4) != 0;
    const bool ok = zstd ? unpack_zstd(payload, &text) : lz4 && unpack_lz4(payload, &text);
    if (!ok) {
        *message = zstd  ? "PTX in the fat binary is zstd-compressed: libzstd.so.1 cannot unpack it"
                   : lz4 ? "PTX in the fat binary is LZ4-compressed: liblz4.so.1 cannot unpack it"
                         : "PTX in the fat binary is compressed in an unknown way";
        return {};
    }
    return text;
}

} // namespace

std::string extract_ptx(std::string_view image, CUresult* error, std::string* message) {
    *error = CUDA_ERROR_INVALID_IMAGE;
    if (at<uint32_t>(image) != kFatbinMagic) {
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
    const auto header = at<FatbinHeader>(image);
    std::string_view rest = image.substr(std::min<size_t>(header.header_size, image.size()));
    std::string best;
    uint32_t best_architecture = 0;
    while (rest.size() >= sizeof(EntryHeader)) {
        const auto entry = at<EntryHeader>(rest);
        if (entry.header_size < 64 || entry.header_size > rest.size() ||
            entry.padded_size > rest.size() - entry.header_size) {
            break;
        }
        // The newest PTX that a device of compute capability 8.0 may run.
        constexpr uint32_t kArchitecture = 80;
        if (entry.kind == kKindPtx && entry.architecture <= kArchitecture &&
            entry.architecture >= best_architecture) {
            std::string text =
                entry_text(entry, rest.substr(entry.header_size, entry.padded_size), message);
            if (!text.empty()) {
                best = text.substr(0, text.find('\0'));
                best_architecture = entry.architecture;
            }
        }
        rest = rest.substr(entry.header_size + entry.padded_size);
    }
    *error = best.empty() ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
    if (best.empty() && message->empty()) {
        *message = "the fat binary holds no PTX for compute capability 8.0 or less";
    }
    return best;
}

} // namespace flowgpu::emu
