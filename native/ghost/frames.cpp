#include "frames.h"

#include <algorithm>
#include <dlfcn.h>
#include <memory>

namespace fgg {
namespace {

// Stable since zstd 1.0 (zstd.h, "Simple API"). A part of every system's package manager or init,
// unlike its header.
struct Zstd {
    size_t (*decompress)(void* target, size_t capacity, const void* source, size_t bytes);
    unsigned (*is_error)(size_t code);
    const char* (*error_name)(size_t code);
};

template <typename Function> void resolve(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function)
        throw MoverFailure(FGG_SYSTEM, std::string("libzstd.so.1 has no ") + name);
}

const Zstd& zstd() {
    static const Zstd found = [] {
        void* library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library)
            throw MoverFailure(FGG_SYSTEM,
                               std::string("packed GPU data needs libzstd: ") + dlerror());
        Zstd functions;
        resolve(library, "ZSTD_decompress", functions.decompress);
        resolve(library, "ZSTD_isError", functions.is_error);
        resolve(library, "ZSTD_getErrorName", functions.error_name);
        return functions;
    }();
    return found;
}

} // namespace

Frames::Frames(const uint32_t* sizes, uint64_t count, uint64_t plain_bytes)
    : starts_{0}, plain_bytes_(plain_bytes) {
    if (count != (plain_bytes + FGG_FRAME_BYTES - 1) / FGG_FRAME_BYTES)
        throw MoverFailure(FGG_ARGUMENT,
                           "a packed file has another number of frames than its bytes");
    for (uint64_t i = 0; i < count; i++)
        starts_.push_back(starts_.back() + sizes[i]);
    zstd();
}

void Frames::read(File& file, char* host, uint64_t bytes, uint64_t offset) const {
    std::unique_ptr<char[]> part;
    for (const uint64_t end = offset + bytes; offset < end;) {
        const uint64_t index = offset / FGG_FRAME_BYTES, start = index * FGG_FRAME_BYTES;
        const uint64_t size = std::min<uint64_t>(FGG_FRAME_BYTES, plain_bytes_ - start);
        const uint64_t wanted = std::min(end, start + size) - offset;
        if (wanted == size) {
            expand(file, index, host, size);
        } else {
            if (!part)
                part.reset(new char[FGG_FRAME_BYTES]);
            expand(file, index, part.get(), size);
            std::memcpy(host, part.get() + (offset - start), wanted);
        }
        host += wanted;
        offset += wanted;
    }
}

void Frames::expand(File& file, uint64_t index, char* target, uint64_t bytes) const {
    const uint64_t stored = starts_[index + 1] - starts_[index];
    const std::unique_ptr<char[]> packed(new char[stored]);
    file.read(packed.get(), stored, starts_[index]);
    const size_t done = zstd().decompress(target, bytes, packed.get(), stored);
    const std::string name = "frame " + std::to_string(index) + " of " + file.path();
    if (zstd().is_error(done))
        throw MoverFailure(FGG_DAMAGED, name + ": " + zstd().error_name(done));
    if (done != bytes)
        throw MoverFailure(FGG_DAMAGED, name + " holds " + std::to_string(done) + " bytes, not " +
                                            std::to_string(bytes));
}

} // namespace fgg
