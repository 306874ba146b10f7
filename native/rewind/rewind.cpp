#include "rewind.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <pthread.h>
#include <sys/mman.h>

#include "descriptors.h"
#include "device.h"
#include "environment.h"
#include "heap.h"
#include "imports.h"
#include "keys.h"
#include "library.h"
#include "proc.h"
#include "ranges.h"
#include "threads.h"

namespace flowgpu::rewind {

namespace {

constexpr size_t kPage = 4096;

// Where the driver's calls of mmap cannot be seen: an inaccessible range of this size that was not
// there before cuInit is taken for the driver's. One more than half of what malloc reserves for a
// thread's arena, which never stays inaccessible as a whole.
constexpr size_t kLarge = size_t{64} << 20;
constexpr size_t kMaxBefore = 4096;

Library library;
Range before[kMaxBefore]; // large inaccessible ranges at remember()
size_t before_count;

bool inaccessible(const proc::Mapping& mapping) {
    return memcmp(mapping.mode, "---p", 4) == 0 && !mapping.name[0];
}

// As the driver's memory of the host is mapped; in a process that CRIU has restored it is a memfd.
bool shared_memory(const proc::Mapping& mapping) {
    return mapping.mode[3] == 's' && (strcmp(mapping.name, "/dev/zero (deleted)") == 0 ||
                                      strcmp(mapping.name, "/memfd:/dev/zero (deleted)") == 0);
}

bool was_before(const proc::Mapping& mapping) {
    for (size_t i = 0; i < before_count; i++)
        if (mapping.start < before[i].start + before[i].bytes && before[i].start < mapping.end)
            return true;
    return false;
}

void* pointer(uintptr_t address) {
    return reinterpret_cast<void*>(address);
}

bool hold(const Range* keep, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (mmap(pointer(keep[i].start), keep[i].bytes, PROT_NONE,
                 MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
            return false;
    return true;
}

// Unmaps what of start to end is not kept.
void unmap_rest(uintptr_t start, uintptr_t end, const Range* keep, size_t count) {
    while (start < end) {
        uintptr_t until = end, next = end;
        for (size_t i = 0; i < count; i++) {
            uintptr_t kept = keep[i].start, behind = kept + keep[i].bytes;
            if (behind <= start || kept >= until)
                continue;
            until = kept > start ? kept : start;
            next = behind;
        }
        if (until > start)
            munmap(pointer(start), until - start);
        start = next < end ? next : end;
    }
}

void unmap_driver(const Range* keep, size_t count) {
    proc::each_mapping([&](const proc::Mapping& mapping) {
        if (device::is_mapping(mapping.name))
            return unmap_rest(mapping.start, mapping.end, keep, count);
        if (!inaccessible(mapping) && !shared_memory(mapping))
            return;
        if (!imports::sees_ranges()) {
            if (inaccessible(mapping) && mapping.end - mapping.start >= kLarge &&
                !was_before(mapping))
                unmap_rest(mapping.start, mapping.end, keep, count);
            return;
        }
        size_t reserved_count = 0;
        const ranges::Reserved* reserved = ranges::reserved(&reserved_count);
        for (size_t i = 0; i < reserved_count; i++) {
            uintptr_t start = mapping.start > reserved[i].start ? mapping.start : reserved[i].start;
            uintptr_t end = mapping.end < reserved[i].end ? mapping.end : reserved[i].end;
            if (start < end)
                unmap_rest(start, end, keep, count);
        }
    });
}

// Frees the driver's blocks while it is there, beside the closing of descriptors. Where nobody else
// has those, it takes as long: some 50 and some 60 ms of a PyTorch process (H100, 2026-11-25).
class Freeing {
  public:
    // This thread inherits the signal mask of our thread that begins it: it takes none of the
    // program's signals.
    Freeing() : begun_(pthread_create(&thread_, nullptr, run, nullptr) == 0) {}
    ~Freeing() {
        if (begun_)
            pthread_join(thread_, nullptr);
        else
            run(nullptr);
    }
    Freeing(const Freeing&) = delete;
    Freeing& operator=(const Freeing&) = delete;

  private:
    static void* run(void*) {
        heap::end_life(imports::sees_blocks());
        return nullptr;
    }
    pthread_t thread_;
    bool begun_;
};

bool strip_all(const Range* keep, size_t count, char* detail, size_t bytes, bool* lost,
               void (*at_end)(), Laps& laps) {
    for (size_t i = 0; i < count; i++)
        if ((keep[i].start | keep[i].bytes) % kPage != 0 || keep[i].bytes == 0) {
            snprintf(detail, bytes, "a range to keep is no whole pages");
            return false;
        }
    if (!threads::stop(detail, bytes))
        return false;
    if (!hold(keep, count)) {
        threads::let_go();
        snprintf(detail, bytes, "the addresses of device memory cannot be held");
        return false;
    }
    laps.add("stop threads");
    imports::delete_keys();
    keys::forget_values();
    if (!threads::end(detail, bytes)) {
        if (lost)
            *lost = true;
        return false;
    }
    imports::join_threads();
    laps.add("end threads");
    if (at_end)
        at_end();
    ranges::hold_placements(keep, count);
    unmap_driver(keep, count);
    laps.add("unmap");
    {
        Freeing freeing;
        device::close_descriptors();
        descriptors::end_life(imports::sees_closes());
        laps.add("close");
    }
    laps.add("free");
    library.put_back();
    keys::put_back();
    imports::end_life();
    laps.add("put back");
    return true;
}

} // namespace

bool remember(const void* symbol, Passage passage, char* detail, size_t bytes) {
    int error = errno;
    const char* wrong = library.open(symbol);
    if (!wrong)
        wrong = imports::watch(library, passage);
    if (!wrong && !library.copy_segments())
        wrong = "no memory for a copy of the driver's data";
    if (!wrong) {
        keys::remember(library.start(), library.end());
        proc::each_mapping([](const proc::Mapping& mapping) {
            if (inaccessible(mapping) && mapping.end - mapping.start >= kLarge &&
                before_count < kMaxBefore)
                before[before_count++] = {mapping.start, mapping.end - mapping.start};
        });
    }
    if (wrong)
        snprintf(detail, bytes, "%s", wrong);
    errno = error;
    return !wrong;
}

bool strip(const Range* keep, size_t count, char* detail, size_t bytes, bool* lost,
           void (*at_end)(), Laps* laps) {
    int error = errno;
    if (lost)
        *lost = false;
    Laps own;
    bool done = strip_all(keep, count, detail, bytes, lost, at_end, laps ? *laps : own);
    errno = error;
    return done;
}

void leave_parents() {
    descriptors::leave_parents();
}

void before_copy() {
    descriptors::forget_lost();
}

bool is_copy() {
    const bool copy = device::left_out();
    if (copy)
        descriptors::renew();
    return copy;
}

void keep_environment() {
    environment::keep();
}

bool see_devices(const char* visible) {
    return environment::see_devices(visible, imports::sees_variables());
}

bool make_way(const Range& kept, bool at_last) {
    return ranges::make_way(kept, at_last);
}

bool is_placed(const Range& range) {
    return ranges::is_placed(range);
}

void wish(Wish* wish) {
    ranges::wish(wish);
}

bool hold_data(const Range& range) {
    return ranges::hold_data(range);
}

void forget_data(const Range& range) {
    ranges::forget_data(range);
}

} // namespace flowgpu::rewind
