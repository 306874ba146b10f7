// The code that a module or library was loaded from, kept for loading it again.
#ifndef FLOWGPU_INTERCEPT_REPLAY_IMAGE_H
#define FLOWGPU_INTERCEPT_REPLAY_IMAGE_H

#include <memory>
#include <string>
#include <vector>

#include "modimage.h"
#include "record.h"

namespace flowgpu::replay {

struct Image {
    size_t bytes = 0;           // where there is no copy
    const void* data = nullptr; // the copy's, or in the read-only part of a file of the program's
    std::shared_ptr<ModuleImageCopy> copy;
    std::vector<Variable> variables;
    std::vector<std::string> constants; // names, sorted
    bool by_address_alone = false;      // modimage.h
    bool heap = false;                  // its kernels may allocate memory: modimage.h
    bool managed = false;               // modimage.h
    bool of_program = false;            // lies in the program itself, not in a library
    std::string why;                    // not empty: it cannot be kept

    // Of what cuModuleLoadData and its kin were given.
    static Image of_memory(const void* image);
    // Of what they read from a file.
    static Image of_file(const char* path);

    // Whether it can still be read: a library of the program's may have been unloaded.
    bool is_there() const;
};

// Options of the JIT compiler and of the library as the program gave them, without those by which
// it has something written back.
template <class Option> struct Options {
    std::vector<Option> names;
    std::vector<void*> values;
    std::vector<std::shared_ptr<void>> copies; // of what values point to
    Options(const Option* given, void* const* of, unsigned count);
};

} // namespace flowgpu::replay

#endif
