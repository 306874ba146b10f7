// The driver library as the loader sees it: its writable memory, and the slots through which it
// calls libc.
#ifndef FLOWGPU_REWIND_LIBRARY_H
#define FLOWGPU_REWIND_LIBRARY_H

#include <cstddef>
#include <cstdint>

#include <link.h>

namespace flowgpu::rewind {

// The loaded library that holds an address. False: there is none.
bool find_library(uintptr_t address, dl_phdr_info* found);

struct Import {
    const char* name;
    void* ours;
    bool found;
};

class Library {
  public:
    // The library that holds `symbol`. Null or the reason why it cannot be rewound.
    const char* open(const void* symbol);

    // Where it is mapped.
    uintptr_t start() const { return start_; }
    uintptr_t end() const { return end_; }

    // Points the library's slots for these functions to ours. False if one cannot be written.
    bool redirect(Import* imports, size_t count);

    // Keeps a copy of all that the library may write, and of what was writable until the loader
    // had relocated it: slots of tables there are patched in place. False without memory.
    bool copy_segments();
    void put_back();

  private:
    static constexpr size_t kMaxSegments = 8;

    struct Segment {
        uint8_t* start;
        uint8_t* copy; // zero pages take no memory
        size_t bytes;
    };

    bool writable(uint8_t* page) const;

    uintptr_t base_ = 0;
    uintptr_t start_ = UINTPTR_MAX, end_ = 0;
    const void* dynamic_ = nullptr;
    Segment segments_[kMaxSegments] = {};
    size_t segment_count_ = 0;
    uintptr_t relro_start_ = 0, relro_end_ = 0;
};

} // namespace flowgpu::rewind

#endif
