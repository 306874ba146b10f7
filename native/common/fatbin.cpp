#include "fatbin.h"

#include <dlfcn.h>

namespace flowgpu::fatbin {

namespace {

constexpr uint64_t kFlagLz4 = 0x2000;
constexpr uint64_t kFlagZstd = 0x8000;
constexpr uint64_t kMostBytes = 256ull << 20;

struct EntryHeader {
    uint16_t kind;
    uint16_t version;
    uint32_t header_bytes;
    uint64_t padded_bytes;
    uint32_t packed_bytes; // 0: not packed
    uint32_t unused0[2];
    uint32_t architecture;
    uint32_t unused1[2];
    uint64_t flags;
    uint64_t unused2;
    uint64_t unpacked_bytes;
};
static_assert(sizeof(Header) == 16 && sizeof(EntryHeader) == 64);

// Not kept in a static: its guard would be held while dlopen waits for the loader, and another
// thread may be inside the loader, in a constructor that loads a module.
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

} // namespace

Entries::Entries(std::string_view container) {
    const auto header = value_at<Header>(container, 0);
    rest_ = container.substr(std::min<size_t>(header.header_bytes, container.size()));
    rest_ = rest_.substr(0, header.body_bytes);
}

bool Entries::next(Entry* entry) {
    const auto header = value_at<EntryHeader>(rest_, 0);
    if (rest_.size() < sizeof header || header.header_bytes < sizeof header ||
        header.header_bytes > rest_.size() ||
        header.padded_bytes > rest_.size() - header.header_bytes) {
        return false;
    }
    entry->kind = header.kind;
    entry->architecture = header.architecture;
    entry->flags = header.flags;
    entry->unpacked_bytes = header.unpacked_bytes;
    entry->stored = rest_.substr(header.header_bytes, header.padded_bytes);
    if (header.packed_bytes != 0) {
        entry->stored = entry->stored.substr(0, header.packed_bytes);
    }
    rest_ = rest_.substr(header.header_bytes + header.padded_bytes);
    return true;
}

bool unpack(const Entry& entry, std::string* buffer, std::string_view* bytes, std::string* why) {
    const bool zstd = (entry.flags & kFlagZstd) != 0;
    const bool lz4 = (entry.flags & kFlagLz4) != 0;
    if (!zstd && !lz4) {
        *bytes = entry.stored;
        return true;
    }
    if (entry.unpacked_bytes <= kMostBytes && entry.stored.size() <= kMostBytes) {
        buffer->resize(entry.unpacked_bytes);
        if (zstd ? unpack_zstd(entry.stored, buffer) : unpack_lz4(entry.stored, buffer)) {
            *bytes = *buffer;
            return true;
        }
    }
    const std::string what = entry.kind == kPtx ? "PTX" : "code";
    *why = what + " in the fat binary is " +
           (zstd ? "zstd-compressed: libzstd.so.1 cannot unpack it"
                 : "LZ4-compressed: liblz4.so.1 cannot unpack it");
    return false;
}

} // namespace flowgpu::fatbin
