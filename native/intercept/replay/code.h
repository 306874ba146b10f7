// What a module or library was loaded from, and its variables.
#ifndef FLOWGPU_INTERCEPT_REPLAY_CODE_H
#define FLOWGPU_INTERCEPT_REPLAY_CODE_H

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "image.h"

namespace flowgpu::replay {

struct Code {
    Image image;
    std::function<CUresult(void** made, const void* from)> load;
    Options<CUjit_option> options;
    // The image with its variables in `block`, memory of the program's (moved.cpp).
    std::string moved{};
    CUdeviceptr block = 0;
    bool looked_into = false; // to move them

    bool is_constant(const std::string& name) const {
        return std::binary_search(image.constants.begin(), image.constants.end(), name);
    }

    CUresult again(void** made) const { return load(made, block ? moved.data() : image.data); }
};

Object& root_of(Object& object); // the module or library that code belongs to

// Gives the variables of a module or library memory of the program's, where they stay, and makes it
// and its functions again, so that kernels find them there. Nothing happens if that is not
// possible: something of it may have been launched, or its code does not allow it. `handle`: the
// program's, of a module or library of which the address of a variable was asked.
void move_variables(const void* handle);

} // namespace flowgpu::replay

#endif
