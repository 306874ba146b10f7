// What a module's image is: how long, and which variables are in it.
//
// Rules for the caller:
// - Only an image that the driver has accepted. Neither a text nor a cubin says where the memory
// ends
//   that it lies in: a text ends at its NUL, a cubin where its own tables end, a container where
//   its header says. The driver has read these bytes by the same numbers; an image that it refuses
//   may name any. Inside a container, nothing beyond its stated end is read, whatever its entries
//   say.
// - Not under a lock of ours: packed entries open a library (dlopen), and the time is that of
//   reading, for packed ones of unpacking, every entry of every architecture.
#ifndef FLOWGPU_MODIMAGE_H
#define FLOWGPU_MODIMAGE_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "fatbin.h"

namespace flowgpu {

// Where a variable's first value has an address. The driver writes it there when it loads the code,
// and loaded again a function or variable may lie elsewhere.
struct AddressField {
    std::string variable;
    uint64_t offset; // in the variable; the address has 8 bytes
    bool code;       // of a function

    bool operator<(const AddressField& other) const { return all() < other.all(); }
    bool operator==(const AddressField& other) const { return all() == other.all(); }

  private:
    std::tuple<const std::string&, uint64_t, bool> all() const { return {variable, offset, code}; }
};

struct ModuleImage {
    // False: a form that is not known, or storage that no name leads to; `why` says so.
    bool known = false;
    std::string why;
    // The text with its NUL, the cubin, or the container: behind the wrapper, where there is one.
    std::string_view bytes;
    // Further containers that a wrapper of version 2 names (fatbin.h).
    std::vector<std::string_view> linked_from;
    // Linker names, sorted, of the variables (.global, .const; managed ones too) that a kernel or
    // the program may write. One that the driver does not find (CUDA_ERROR_NOT_FOUND) is not in the
    // code that it chose: of a fat binary all entries are named here, since any may be chosen.
    std::vector<std::string> variables;
    // Those of them that are in .const, in any entry of a fat binary.
    std::vector<std::string> constants;
    // Sorted, those of every cubin.
    std::vector<AddressField> addresses;
    // There is no code, in any entry, and no variable is made with an address in it: whoever has
    // not asked the driver for a variable's address can neither read nor write it.
    bool by_address_alone = false;
    // Code, in any entry, calls malloc of the device's.
    bool heap = false;
    // A variable, in any entry, is managed (__managed__).
    bool managed = false;
};

// `image`: what cuModuleLoadData, cuModuleLoadFatBinary or cuLibraryLoadData was given: PTX text,
// cubin (ELF), or fat binary (bare or behind the wrapper). Throws nothing.
ModuleImage read_module_image(const void* image);

// The same for an image of which at most `limit` bytes may be read.
ModuleImage read_module_image(const void* image, size_t limit);

// A copy of an image that is known, which the driver takes for the image. Its memory is the
// object's.
class ModuleImageCopy {
  public:
    explicit ModuleImageCopy(const ModuleImage& image);
    ModuleImageCopy(const ModuleImageCopy&) = delete;
    ModuleImageCopy& operator=(const ModuleImageCopy&) = delete;
    const void* image() const { return image_; }

  private:
    std::vector<std::string> parts_;
    std::vector<const void*> linked_from_; // ended by null
    fatbin::Wrapper wrapper_{};
    const void* image_ = nullptr;
};

} // namespace flowgpu

#endif
