// Rows of a fixed number, so that nothing is allocated.
#ifndef FLOWGPU_REWIND_TABLE_H
#define FLOWGPU_REWIND_TABLE_H

#include <cstddef>

namespace flowgpu::rewind {

template <class T, size_t N> struct Table {
    T rows[N];
    size_t count;

    T* add() { return count < N ? &rows[count++] : nullptr; }
    void remove(T* row) { *row = rows[--count]; }
    T* begin() { return rows; }
    T* end() { return rows + count; }
};

} // namespace flowgpu::rewind

#endif
