// The two forms of code that an image holds, alone or in a fat binary.
#ifndef FLOWGPU_MODIMAGE_FORMS_H
#define FLOWGPU_MODIMAGE_FORMS_H

#include <string>
#include <string_view>
#include <vector>

namespace flowgpu {

// Adds the variables that PTX text defines. False with `*why` where it cannot be followed.
bool ptx_variables(std::string_view text, std::vector<std::string>* names, std::string* why);

// Adds the variables of a cubin that lies somewhere in `bytes` from their start on, and says how
// long it is. False with `*why` where it cannot be followed.
bool cubin_variables(std::string_view bytes, size_t* size, std::vector<std::string>* names,
                     std::string* why);

} // namespace flowgpu

#endif
