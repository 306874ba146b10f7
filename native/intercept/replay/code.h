// What a module or library was loaded from, and its variables.
#ifndef FLOWGPU_INTERCEPT_REPLAY_CODE_H
#define FLOWGPU_INTERCEPT_REPLAY_CODE_H

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "image.h"

namespace flowgpu::replay {

struct Code {
    using Load = std::function<CUresult(void** made, const void* from)>;
    Code(Image read, Load how, Options<CUjit_option> by)
        : image(std::move(read)), load(std::move(how)), options(std::move(by)) {}

    const Image image;
    const Load load;
    const Options<CUjit_option> options;
    // The image with its variables in `block`, memory of the program's (moved.cpp).
    std::string moved;
    CUdeviceptr block = 0;
    std::atomic<bool> looked_into{false}; // to move them

    // The variables may be asked for after the code has run: it is the program's own. Libraries'
    // have many that nobody ever asks for.
    bool moves_at_first_launch(Kind kind) const {
        return !looked_into.load() && (kind == Kind::module || image.of_program) &&
               image.variables.size() > image.constants.size();
    }
    bool is_constant(const std::string& name) const {
        return std::binary_search(image.constants.begin(), image.constants.end(), name);
    }

    CUresult again(void** made) const { return load(made, block ? moved.data() : image.data); }
};

Object& root_of(Object& object); // the module or library that code belongs to

// Gives the variables of a module or library memory of the program's, where they stay, and makes it
// and its functions again, so that kernels find them there. Nothing happens if that is not
// possible: something of it may have been launched, or its code does not allow it. Not during a
// capture, which it would break. `handle`: the program's, of anything in the module or library.
void move_variables(const void* handle);

} // namespace flowgpu::replay

#endif
