#include "fault.h"

#include <cstdlib>
#include <cstring>

namespace flowgpu {

namespace {

const char* const kNames[] = {
#define FLOWGPU_FAULT_POINT(name, what) #name,
#include "flowgpu/fault.def"
#undef FLOWGPU_FAULT_POINT
};

} // namespace

bool fires(Fault point) {
    // Read once: the program may change its environment meanwhile.
    static const char* const chosen = getenv("FLOWGPU_FAULT");
    static unsigned long passes; // of the one point that was chosen
    if (!chosen)
        return false;
    const char* name = kNames[static_cast<int>(point)];
    size_t length = strlen(name);
    if (strncmp(chosen, name, length) != 0 || (chosen[length] && chosen[length] != ':'))
        return false;
    unsigned long nth = chosen[length] ? strtoul(chosen + length + 1, nullptr, 10) : 1;
    return ++passes == nth;
}

} // namespace flowgpu
