#include "ranges.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

#include "passage.h"
#include "proc.h"
#include "table.h"

namespace flowgpu::rewind::ranges {

namespace {

// Where the system put a range that the driver reserved anywhere.
struct Placement {
    uintptr_t start;
    size_t bytes;
    unsigned life; // the last one that had it
    bool held;     // by us, between two lives
};

std::mutex mutex;
Table<Reserved, 65536> all_reserved; // apart from each other
Table<Placement, 4096> placements;   // in the order in which they were first made
// The driver may give parts of a placement back, what it had for alignment. Nobody else gets them
// while it has the rest, or a new life could not have the whole again.
Table<Reserved, 16384> given_back; // apart from each other
Table<Reserved, 4096> kept;        // what the caller has held since the last life ended
Table<Reserved, 4096> data;        // of the program's, where the driver had memory
bool overflow = false;

__thread Wish* wished __attribute__((tls_model("initial-exec")));

using Lock = std::lock_guard<std::mutex>;

// False: the table is full.
template <size_t N> bool subtract(Table<Reserved, N>& from, uintptr_t start, uintptr_t end) {
    bool whole = true;
    for (size_t i = 0; i < from.count;) {
        Reserved old = from.rows[i];
        if (old.end <= start || old.start >= end) {
            i++;
            continue;
        }
        from.remove(&from.rows[i]);
        for (Reserved rest : {Reserved{old.start, start}, Reserved{end, old.end}})
            if (rest.start < rest.end) {
                Reserved* row = from.add();
                whole = whole && row;
                if (row)
                    *row = rest;
            }
    }
    return whole;
}

void forget_range(uintptr_t start, uintptr_t end) {
    if (!subtract(all_reserved, start, end))
        overflow = true;
}

constexpr int kHold = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

bool hold(uintptr_t start, size_t bytes) {
    return mmap(reinterpret_cast<void*>(start), bytes, PROT_NONE, kHold, -1, 0) != MAP_FAILED;
}

// A new life asks for what the last one asked for, in the same order, and is given the same
// addresses: what the driver places in its ranges by itself (the variables of modules) then lies
// where the program knows it. A range that was made for a reservation of the program's is as large
// as others; it comes last.
void* place_again(size_t bytes, int flags) {
    Placement* found = nullptr;
    for (Placement& row : placements) {
        if (row.bytes != bytes || !row.held)
            continue;
        const bool has_kept = std::any_of(kept.begin(), kept.end(), [&](const Reserved& range) {
            return range.start < row.start + row.bytes && row.start < range.end;
        });
        if (!found || !has_kept)
            found = &row;
        if (!has_kept)
            break;
    }
    if (!found)
        return MAP_FAILED;
    void* at = reinterpret_cast<void*>(found->start);
    void* result = mmap(at, bytes, PROT_NONE, flags | MAP_FIXED, -1, 0);
    found->held = result == MAP_FAILED;
    found->life = life;
    return result;
}

void remove_placement(Placement* row) {
    for (; row + 1 < placements.end(); row++) // keeps the order
        row[0] = row[1];
    placements.count--;
}

// True if it was a part of a placement, and has been dealt with.
bool give_back(uintptr_t start, size_t bytes) {
    for (Placement& row : placements) {
        const uintptr_t end = row.start + row.bytes;
        if (row.life != life || row.held || start < row.start || start + bytes > end)
            continue;
        subtract(given_back, start, start + bytes);
        Reserved* part = given_back.add();
        if (part)
            *part = {start, start + bytes};
        if (!part || !hold(start, bytes)) {
            subtract(given_back, row.start, end);
            remove_placement(&row);
            return false;
        }
        size_t all = 0;
        for (const Reserved& one : given_back)
            all += one.start >= row.start && one.end <= end ? one.end - one.start : 0;
        if (all == row.bytes) {
            subtract(given_back, row.start, end);
            munmap(reinterpret_cast<void*>(row.start), row.bytes);
            remove_placement(&row);
        }
        return true;
    }
    return false;
}

// The parts of start to end in which no data of the program lie, from the first on.
template <class Visit> bool each_without_data(uintptr_t start, uintptr_t end, Visit visit) {
    bool whole = true;
    while (start < end) {
        Reserved first = {end, end};
        for (const Reserved& range : data)
            if (range.end > start && range.start < first.start)
                first = range;
        if (start < first.start)
            whole = visit(start, std::min(first.start, end) - start) && whole;
        start = first.end;
    }
    return whole;
}

bool has_data(uintptr_t start, size_t bytes) {
    return std::any_of(data.begin(), data.end(), [&](const Reserved& range) {
        return range.start < start + bytes && start < range.end;
    });
}

// Nothing is mapped over what is there.
void* reserve_at(uintptr_t start, size_t bytes, int flags) {
    void* at = reinterpret_cast<void*>(start);
    void* result = mmap(at, bytes, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    if (result == at || result == MAP_FAILED)
        return result;
    munmap(result, bytes); // a kernel older than the flag
    return MAP_FAILED;
}

// The addresses of the thread's wish, as far as no data lie there.
void* reserve_as_wished(size_t bytes, int flags) {
    const uintptr_t start = wished->range.start;
    Reserved done = {start, start};
    const bool all = each_without_data(start, start + bytes, [&](uintptr_t at, size_t part) {
        if (done.end != start || reserve_at(at, part, flags) == MAP_FAILED)
            return false;
        done = {at, at + part};
        return true;
    });
    if (!all) {
        if (done.start < done.end)
            munmap(reinterpret_cast<void*>(done.start), done.end - done.start);
        return MAP_FAILED;
    }
    wished->reserved = true;
    Reserved* row = done.start < done.end ? all_reserved.add() : nullptr;
    if (row)
        *row = done;
    overflow |= done.start < done.end && !row;
    return reinterpret_cast<void*>(start);
}

// What the driver maps where it has reserved by a wish.
void* map_as_wished(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    wished->mapped = bytes == wished->range.bytes;
    wished->fd = fd;
    if (!wished->mapped && wished->take_place)
        return MAP_FAILED;
    void* result = wished->take_place ? wished->take_place(at, bytes, protection, flags, fd, offset)
                                      : mmap(at, bytes, protection, flags, fd, offset);
    if (result == at) {
        Lock lock(mutex);
        forget_range(wished->range.start, wished->range.start + bytes);
    }
    return result;
}

} // namespace

void* map(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    const bool reserves = protection == PROT_NONE && (flags & MAP_ANONYMOUS);
    const bool shares = (flags & MAP_SHARED) && (flags & MAP_ANONYMOUS); // its memory of the host
    const bool anywhere = !at && !(flags & (MAP_FIXED | MAP_FIXED_NOREPLACE | MAP_32BIT));
    if (wished && wished->reserved && !wished->mapped && fd >= 0 && (flags & MAP_FIXED) &&
        reinterpret_cast<uintptr_t>(at) == wished->range.start)
        return map_as_wished(at, bytes, protection, flags, fd, offset);
    void* result = MAP_FAILED;
    if (reserves && anywhere) {
        Lock lock(mutex);
        if (wished && !wished->reserved && bytes >= wished->range.bytes) {
            result = reserve_as_wished(bytes, flags);
            if (result != MAP_FAILED)
                return result;
        }
        result = place_again(bytes, flags);
    } else if (flags & MAP_FIXED) {
        Lock lock(mutex);
        // It would go back to a reservation, or is about to take what is not its own.
        if (has_data(reinterpret_cast<uintptr_t>(at), bytes))
            return reserves ? at : MAP_FAILED;
    }
    const bool again = result != MAP_FAILED;
    if (!again)
        result = mmap(at, bytes, protection, flags, fd, offset);
    if (result == MAP_FAILED)
        return result;
    auto start = reinterpret_cast<uintptr_t>(result);
    Lock lock(mutex);
    if (reserves && anywhere && !again)
        if (Placement* row = placements.add())
            *row = {start, bytes, life, false};
    forget_range(start, start + bytes);
    subtract(given_back, start, start + bytes);
    if (reserves || shares) {
        if (Reserved* row = all_reserved.add())
            *row = {start, start + bytes};
        else
            overflow = true;
    }
    return result;
}

int unmap(void* at, size_t bytes) {
    auto start = reinterpret_cast<uintptr_t>(at);
    {
        Lock lock(mutex); // before: once it is free, it may be somebody else's
        forget_range(start, start + bytes);
        if (give_back(start, bytes))
            return 0;
        if (has_data(start, bytes))
            return each_without_data(start, start + bytes,
                                     [](uintptr_t from, size_t part) {
                                         return munmap(reinterpret_cast<void*>(from), part) == 0;
                                     })
                       ? 0
                       : -1;
    }
    return munmap(at, bytes);
}

namespace {

// The first part of start to end that is held for the new life; empty where there is none.
Reserved held_in(uintptr_t start, uintptr_t end) {
    Reserved first = {end, end};
    auto look = [&](uintptr_t from, uintptr_t to) {
        from = from > start ? from : start;
        to = to < end ? to : end;
        if (from < to && from < first.start)
            first = {from, to};
    };
    for (const Reserved& range : kept)
        look(range.start, range.end);
    for (const Placement& row : placements)
        if (row.held)
            look(row.start, row.start + row.bytes);
    for (const Reserved& range : data)
        look(range.start, range.end);
    return first;
}

// This process's mappings, without what is held for the new life.
FILE* open_maps(const char* mode) {
    const int fd = memfd_create("maps", MFD_CLOEXEC);
    if (fd < 0)
        return nullptr;
    bool whole = proc::each_line("/proc/self/maps", [&](const char* line) {
        uintptr_t start = 0, end = 0;
        int range = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR "%n", &start, &end, &range) != 2)
            return;
        while (start < end) {
            const Reserved hidden = held_in(start, end);
            if (start < hidden.start)
                dprintf(fd, "%" PRIxPTR "-%" PRIxPTR "%s\n", start, hidden.start, line + range);
            start = hidden.end;
        }
    });
    FILE* file = whole && lseek(fd, 0, SEEK_SET) == 0 ? fdopen(fd, mode) : nullptr;
    if (!file)
        close(fd);
    return file;
}

} // namespace

// When it begins, the driver reads which addresses are taken, and those it never reserves: what is
// held for it must not seem so.
FILE* open_file(const char* path, const char* mode) {
    if (life > 1 && path && strcmp(path, "/proc/self/maps") == 0) {
        Lock lock(mutex);
        if (FILE* file = open_maps(mode))
            return file;
    }
    return fopen(path, mode);
}

bool all_known() {
    return !overflow;
}

const Reserved* reserved(size_t* count) {
    *count = all_reserved.count;
    return all_reserved.rows;
}

void hold_placements(const Range* keep, size_t count) {
    kept.count = 0;
    for (size_t i = 0; i < count; i++)
        if (Reserved* row = kept.add())
            *row = {keep[i].start, keep[i].start + keep[i].bytes};
    for (size_t i = 0; i < placements.count;) {
        Placement& row = placements.rows[i];
        const uintptr_t end = row.start + row.bytes;
        bool whole = true; // what is kept lies in it, or beside it
        for (const Reserved& range : kept)
            whole = whole && (range.end <= row.start || end <= range.start ||
                              (row.start <= range.start && range.end <= end));
        if (row.life != life || row.held || (whole && hold(row.start, row.bytes))) {
            if (row.life == life && !row.held) {
                forget_range(row.start, end);
                row.held = true;
            }
            i++;
            continue;
        }
        // Its parts go with the rest of the driver's ranges.
        for (const Reserved& part : given_back)
            if (part.start >= row.start && part.end <= end)
                if (Reserved* range = all_reserved.add())
                    *range = part;
        remove_placement(&row);
    }
    given_back.count = 0;
}

bool is_placed(const Range& range) {
    Lock lock(mutex);
    for (const Placement& row : placements)
        if (row.start <= range.start && range.start + range.bytes <= row.start + row.bytes)
            return true;
    return false;
}

void wish(Wish* wish) {
    wished = wish;
}

bool hold_data(const Range& range) {
    Lock lock(mutex);
    Reserved* row = data.add();
    if (row)
        *row = {range.start, range.start + range.bytes};
    return row != nullptr;
}

void forget_data(const Range& range) {
    Lock lock(mutex);
    subtract(data, range.start, range.start + range.bytes);
}

bool make_way(const Range& range, bool at_last) {
    const uintptr_t start = range.start, end = start + range.bytes;
    Lock lock(mutex);
    for (Placement& row : placements) {
        const Placement around = row;
        const uintptr_t around_end = around.start + around.bytes;
        if (start < around.start || end > around_end)
            continue;
        if (around.held && !at_last)
            return false;
        subtract(kept, start, end);
        if (!around.held)
            return true; // it is the driver's, which has it from us with the rest
        remove_placement(&row);
        for (uintptr_t at = around.start; at < around_end;) {
            const Reserved still_kept = held_in(at, around_end);
            if (at < still_kept.start)
                munmap(reinterpret_cast<void*>(at), still_kept.start - at);
            at = still_kept.end;
        }
        return true;
    }
    subtract(kept, start, end);
    munmap(reinterpret_cast<void*>(start), range.bytes);
    return true;
}

void end_life() {
    all_reserved.count = 0;
    overflow = false;
}

} // namespace flowgpu::rewind::ranges
