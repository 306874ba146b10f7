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
    size_t library = 0;                 // that it lies in, by its name; 0: the program itself
    std::string why;                    // not empty: it cannot be kept

    // Reads the image that the program gave to cuModuleLoadData or its kin.
    static Image of_memory(const void* image);
    // Reads the file that the program named to cuModuleLoad or its kin.
    static Image of_file(const char* path);
    bool of_program() const { return data && !copy && !library; }
};

// The read-only part of the program or of one of its libraries: it stays as it is, and where it is,
// until the library is unloaded.
struct Part {
    uintptr_t start;
    uintptr_t end;
    size_t library; // by its name; 0: the program
};

// Which images can still be read.
class LoadedImages {
  public:
    LoadedImages();
    bool have(const Image& image) const;

  private:
    std::vector<Part> parts_;
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
