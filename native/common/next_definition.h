// Preloaded libraries: the function that a hook calls on.
#ifndef FLOWGPU_COMMON_NEXT_DEFINITION_H
#define FLOWGPU_COMMON_NEXT_DEFINITION_H

namespace flowgpu {

// The dlsym that comes behind the library's own. Each library that uses this file has one.
using Dlsym = void* (*)(void*, const char*);
Dlsym next_dlsym();

// The definition of `symbol` that the program would use without us; null when there is none.
void* next_definition(const char* symbol, const void* ours);

} // namespace flowgpu

#endif
