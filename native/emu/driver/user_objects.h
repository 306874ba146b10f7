// References to user objects that graphs and executables have, by their handles.
#pragma once

#include <cstdint>

namespace flowgpu::emu {

// `to` is a copy of `from`, or has one in it.
void share_user_objects(uint64_t from, uint64_t to);
// The same, and what `to` had is let go.
void replace_user_objects(uint64_t from, uint64_t to);
// It has ended.
void drop_user_objects(uint64_t from);

} // namespace flowgpu::emu
