// Address ranges of the driver's. Those that the system placed for it are held between its lives,
// so that the next one has the same.
#ifndef FLOWGPU_REWIND_RANGES_H
#define FLOWGPU_REWIND_RANGES_H

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include <sys/types.h>

#include "rewind.h"

namespace flowgpu::rewind::ranges {

// libc's functions, for the driver.
void* map(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
int unmap(void* at, size_t bytes);
FILE* open_file(const char* path, const char* mode);

// What the driver has reserved, inaccessible, and its memory of the host, shared and anonymous, as
// long as it has them.
struct Reserved {
    uintptr_t start, end;
};
const Reserved* reserved(size_t* count);
bool all_known(); // there was room to note each

// The ranges that the system placed for the driver become ours until its next life asks for them,
// with what the caller keeps within them.
void hold_placements(const Range* keep, size_t count);
// See rewind.h.
bool make_way(const Range& kept, bool at_last);
bool is_placed(const Range& range);
void wish(Wish* wish);
bool hold_data(const Range& range);
void forget_data(const Range& range);
// Those of the life that ends are forgotten.
void end_life();

} // namespace flowgpu::rewind::ranges

#endif
