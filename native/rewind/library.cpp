#include "library.h"

#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace flowgpu::rewind {

namespace {

constexpr size_t kPage = 4096;

// Thread-local storage cannot be put back in threads of the program. A C++ runtime that is linked
// in has 16 bytes, which are zero while no exception is under way.
constexpr size_t kRuntimeTls = 16;

struct Search {
    uintptr_t address;
    dl_phdr_info found;
    bool any;
};

int look(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<Search*>(data);
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) & header = info->dlpi_phdr[i];
        if (header.p_type == PT_LOAD &&
            search->address - (info->dlpi_addr + header.p_vaddr) < header.p_memsz) {
            search->found = *info;
            search->any = true;
            return 1;
        }
    }
    return 0;
}

// Makes a page of relocated memory writable while it lives.
class Writable {
  public:
    Writable(uint8_t* page, bool already)
        : page_(page), ours_(!already && mprotect(page, kPage, PROT_READ | PROT_WRITE) == 0),
          usable_(already || ours_) {}
    ~Writable() {
        if (ours_)
            mprotect(page_, kPage, PROT_READ);
    }
    Writable(const Writable&) = delete;
    Writable& operator=(const Writable&) = delete;
    explicit operator bool() const { return usable_; }

  private:
    uint8_t* page_;
    bool ours_, usable_;
};

bool all_zero(const uint8_t* page) {
    return page[0] == 0 && memcmp(page, page + 1, kPage - 1) == 0;
}

uint8_t* page_of(uintptr_t address) {
    return reinterpret_cast<uint8_t*>(address & ~(kPage - 1));
}

} // namespace

bool find_library(uintptr_t address, dl_phdr_info* found) {
    Search search = {address, {}, false};
    dl_iterate_phdr(look, &search);
    *found = search.found;
    return search.any;
}

const char* Library::open(const void* symbol) {
    dl_phdr_info found;
    if (!find_library(reinterpret_cast<uintptr_t>(symbol), &found))
        return "the driver is no shared library";
    base_ = found.dlpi_addr;
    for (int i = 0; i < found.dlpi_phnum; i++) {
        const ElfW(Phdr) & header = found.dlpi_phdr[i];
        uintptr_t start = base_ + header.p_vaddr;
        uintptr_t end = start + header.p_memsz;
        if (header.p_type == PT_TLS && header.p_memsz > kRuntimeTls)
            return "the driver keeps state in thread-local storage";
        if (header.p_type == PT_DYNAMIC)
            dynamic_ = reinterpret_cast<const void*>(start);
        if (header.p_type == PT_GNU_RELRO) { // as the loader rounds it
            relro_start_ = start & ~(kPage - 1);
            relro_end_ = end & ~(kPage - 1);
        }
        if (header.p_type != PT_LOAD)
            continue;
        start_ = start < start_ ? start : start_;
        end_ = end > end_ ? end : end_;
        if (!(header.p_flags & PF_W))
            continue;
        if (segment_count_ == kMaxSegments)
            return "the driver has too many segments";
        uint8_t* first = page_of(start);
        segments_[segment_count_++] = {first, nullptr,
                                       static_cast<size_t>(page_of(end + kPage - 1) - first)};
    }
    return dynamic_ ? nullptr : "the driver has no dynamic section";
}

bool Library::writable(uint8_t* page) const {
    auto address = reinterpret_cast<uintptr_t>(page);
    return address < relro_start_ || address >= relro_end_;
}

bool Library::redirect(Import* imports, size_t count) {
    bool all = true;
    each_import(base_, dynamic_, [&](const char* name, void** slot, auto) {
        for (size_t i = 0; i < count; i++) {
            if (strcmp(imports[i].name, name) != 0)
                continue;
            uint8_t* page = page_of(reinterpret_cast<uintptr_t>(slot));
            Writable open(page, writable(page));
            all = all && static_cast<bool>(open);
            if (!open)
                continue;
            __atomic_store_n(slot, imports[i].ours, __ATOMIC_RELEASE);
            imports[i].found = true;
        }
    });
    return all;
}

bool Library::copy_segments() {
    for (size_t i = 0; i < segment_count_; i++) {
        Segment& segment = segments_[i];
        void* copy = mmap(nullptr, segment.bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (copy == MAP_FAILED)
            return false;
        segment.copy = static_cast<uint8_t*>(copy);
        for (size_t at = 0; at < segment.bytes; at += kPage)
            if (!all_zero(segment.start + at))
                memcpy(segment.copy + at, segment.start + at, kPage);
    }
    return true;
}

void Library::put_back() {
    for (size_t i = 0; i < segment_count_; i++)
        for (size_t at = 0; at < segments_[i].bytes; at += kPage) {
            uint8_t* page = segments_[i].start + at;
            const uint8_t* copy = segments_[i].copy + at;
            if (memcmp(page, copy, kPage) == 0)
                continue;
            Writable open(page, writable(page));
            if (open)
                memcpy(page, copy, kPage);
        }
}

} // namespace flowgpu::rewind
