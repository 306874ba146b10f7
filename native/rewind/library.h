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

// Calls visit(name, slot, type) for each slot of a loaded library that the loader fills by a
// function's name, as the relocation's type says. `dynamic`: its dynamic section.
template <class Visit> void each_import(uintptr_t base, const void* dynamic, Visit visit) {
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    uintptr_t tables[2] = {};
    size_t sizes[2] = {};
    for (auto* d = static_cast<const ElfW(Dyn)*>(dynamic); d->d_tag != DT_NULL; d++) {
        // The loader has added the base, where it may write.
        uintptr_t at = d->d_un.d_ptr < base ? base + d->d_un.d_ptr : d->d_un.d_ptr;
        if (d->d_tag == DT_SYMTAB)
            symbols = reinterpret_cast<const ElfW(Sym)*>(at);
        else if (d->d_tag == DT_STRTAB)
            names = reinterpret_cast<const char*>(at);
        else if (d->d_tag == DT_RELA)
            tables[0] = at;
        else if (d->d_tag == DT_JMPREL)
            tables[1] = at;
        else if (d->d_tag == DT_RELASZ)
            sizes[0] = d->d_un.d_val;
        else if (d->d_tag == DT_PLTRELSZ)
            sizes[1] = d->d_un.d_val;
    }
    for (int t = 0; t < 2 && symbols && names; t++) {
        auto* rows = reinterpret_cast<const ElfW(Rela)*>(tables[t]);
        for (size_t row = 0; row < sizes[t] / sizeof *rows; row++) {
            auto type = ELF64_R_TYPE(rows[row].r_info);
            if (type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64)
                visit(names + symbols[ELF64_R_SYM(rows[row].r_info)].st_name,
                      reinterpret_cast<void**>(base + rows[row].r_offset), type);
        }
    }
}

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
