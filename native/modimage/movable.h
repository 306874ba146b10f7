// A module's code with its variables in memory of the caller's.
//
// Where the driver puts a module's variables is its own choice, and another one in its next life.
// In a cubin every reference to a variable (.nv.global, .nv.global.init) is a relocation, which the
// driver resolves when it loads the cubin. Resolved here instead, to an address of the caller's,
// and taken out of the cubin, it leads the kernels there: the driver still makes its own variables,
// but nothing uses them. Constants (.nv.constant3) lie in a bank, which has no such references:
// they stay the driver's. Addresses of functions are known to the driver alone: it writes them into
// its own copy of a variable, from where the caller copies them.
//
// Seen on an H200 with driver 580: an entry of such a table that says nothing (type 0) makes the
// driver refuse the cubin (CUDA_ERROR_INVALID_IMAGE), a shorter table does not; nor does it take
// absolute symbols.
//
// Managed variables (__managed__) are moved by themselves, to memory that is managed as well: the
// program has their addresses. Code whose other variables cannot be moved may have such all the
// same.
#ifndef FLOWGPU_MODIMAGE_MOVABLE_H
#define FLOWGPU_MODIMAGE_MOVABLE_H

#include <cstdint>
#include <string>
#include <vector>

#include "modimage.h"

namespace flowgpu {

// The code in an image that the driver chooses for a GPU of compute capability major.minor.
struct ChosenCode {
    enum class Form { none, ptx, cubin } form = Form::none;
    std::string bytes; // PTX: with its NUL
    std::string why;   // of `none`
};
// `image`: one that is known (read_module_image). Where more than one entry of a fat binary is as
// good (sm_90 beside sm_90a), `none`: which of them the driver takes is not known.
ChosenCode choose_code(const ModuleImage& image, unsigned major, unsigned minor);

class MovableCubin {
  public:
    struct Place {
        std::string name;
        uint64_t offset; // in the block
        uint64_t bytes;
    };

    struct Value {
        uint64_t offset;
        std::string bytes;
    };

    // Which variables are to be moved. The others stay where they are.
    enum class Which { plain, managed };

    // Reads a whole cubin, of which the driver has accepted the contents; any other one harms
    // nothing. Throws nothing but std::bad_alloc.
    MovableCubin(std::string cubin, Which which);

    // Why its variables cannot be elsewhere: a kind of relocation that is not known, plain ones of
    // code that prints or asserts, not a cubin.
    // Empty: they can. Else there are no places, and nothing below is of use.
    const std::string& why() const { return why_; }
    // What is to be had for all variables together: 0 where no section has any. No alignment is
    // above 512, else why() says so.
    uint64_t bytes() const { return bytes_; }
    const std::vector<Place>& places() const { return places_; }

    // The cubin for a block at `base`, a multiple of 512, and what is in the block at first where
    // that is not zero.
    std::string cubin_at(uint64_t base) const;
    std::vector<Value> values_at(uint64_t base) const;
    // Where addresses of functions are in them, which the values lack.
    const std::vector<AddressField>& code_addresses() const { return code_addresses_; }

  private:
    class Reader;

    // What of an address a place in the cubin holds.
    enum class Part { whole, low, high };
    struct Field {
        uint64_t at; // in the cubin
        Part part;
        uint64_t offset; // of the address, from the start of the block
    };
    // A section with first values.
    struct Stored {
        uint64_t at; // in the cubin
        uint64_t offset;
        uint64_t bytes;
    };

    std::string cubin_; // without the relocations that the fields are for
    std::string why_;
    uint64_t bytes_ = 0;
    std::vector<Place> places_;
    std::vector<Field> fields_;
    std::vector<Stored> stored_;
    std::vector<AddressField> code_addresses_;
};

} // namespace flowgpu

#endif
