// Fat binaries: a container of one program for several architectures. Field by field as
// `fatbinary` of CUDA 13 writes them; the wrapper is that of CUDA's fatbinary_section.h.
#ifndef FLOWGPU_COMMON_FATBIN_H
#define FLOWGPU_COMMON_FATBIN_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace flowgpu::fatbin {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kMagic = 0xBA55ED50;

// What a compiled program gives to the driver: a pointer to the container.
struct Wrapper {
    uint32_t magic;
    uint32_t version;
    const void* container;
    // Version 1: a file name. Version 2: containers of relocatable code that `container` was linked
    // from, ended by null; the driver links them itself where `container` has nothing for its GPU.
    const void* extra;
};

struct Header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint64_t body_bytes;
};

enum : uint16_t { kPtx = 1, kCubin = 2 };

struct Entry {
    uint16_t kind = 0;
    uint32_t architecture = 0; // 80: compute capability 8.0
    uint64_t flags = 0;
    uint64_t unpacked_bytes = 0; // 0: not packed
    std::string_view stored;
};

// The value at `offset`; zeros beyond the end.
template <class T> T value_at(std::string_view bytes, uint64_t offset) {
    T value{};
    if (offset < bytes.size()) {
        std::memcpy(&value, bytes.data() + offset,
                    std::min<uint64_t>(sizeof value, bytes.size() - offset));
    }
    return value;
}

// Walks through a container; reads nothing outside of the bytes given.
class Entries {
  public:
    explicit Entries(std::string_view container);
    // False behind the last entry, and where what follows is no entry.
    bool next(Entry* entry);
    // Bytes that belong to no entry: 0 behind the last one of a sound container.
    size_t left() const { return rest_.size(); }

  private:
    std::string_view rest_;
};

// The bytes of an entry as they were before they were packed: `stored` itself, or `*buffer`. False
// with `*why` where they cannot be had. Packed ones are unpacked with liblz4.so.1 or libzstd.so.1,
// opened at the first need.
bool unpack(const Entry& entry, std::string* buffer, std::string_view* bytes, std::string* why);

} // namespace flowgpu::fatbin

#endif
