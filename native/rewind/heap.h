// What the driver has from malloc: its blocks, so that they can be freed when a life of the driver
// ends. They are libc's own blocks, and others come from libc itself. Should one be given back past
// these functions, so that its address may have become somebody else's, nothing is freed any more.
#ifndef FLOWGPU_REWIND_HEAP_H
#define FLOWGPU_REWIND_HEAP_H

#include <cstddef>

namespace flowgpu::rewind::heap {

// libc's functions, for the driver.
void* allocate(size_t bytes);
void* allocate_zeroed(size_t count, size_t bytes);
void* allocate_aligned(size_t alignment, size_t bytes);
int allocate_aligned_at(void** to, size_t alignment, size_t bytes);
void* reallocate(void* block, size_t bytes);
void release(void* block);

// Frees the blocks of the life that ends, when none of its threads is left, and gives their pages
// back to the system. `sees_all`: every block comes and goes through these functions.
void end_life(bool sees_all);

} // namespace flowgpu::rewind::heap

#endif
