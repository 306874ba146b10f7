// The two forms of code that an image holds, alone or in a fat binary.
#ifndef FLOWGPU_MODIMAGE_FORMS_H
#define FLOWGPU_MODIMAGE_FORMS_H

#include <string>
#include <string_view>
#include <vector>

#include "modimage.h"

namespace flowgpu {

struct Variables {
    std::vector<std::string> names;
    std::vector<std::string> constants; // those of them in .const
    std::vector<AddressField> addresses;
    bool by_address_alone = true; // modimage.h
    bool heap = false;            // modimage.h
    bool managed = false;         // modimage.h
};

constexpr unsigned char kManaged = 0x4; // in the st_other of a cubin's symbol

// Adds the variables that PTX text defines. False with `*why` where it cannot be followed.
bool ptx_variables(std::string_view text, Variables* variables, std::string* why);

// Adds the variables of a cubin that lies somewhere in `bytes` from their start on, and says how
// long it is. False with `*why` where it cannot be followed.
bool cubin_variables(std::string_view bytes, size_t* size, Variables* variables, std::string* why);

} // namespace flowgpu

#endif
