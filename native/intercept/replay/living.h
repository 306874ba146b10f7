// Objects that the engine cannot make again, and that have no handle of ours: while one lives, a
// checkpoint is refused by the name of the function that made it.
#ifndef FLOWGPU_INTERCEPT_REPLAY_LIVING_H
#define FLOWGPU_INTERCEPT_REPLAY_LIVING_H

#include <cstdint>
#include <set>
#include <string>
#include <type_traits>

#include "../driver.h"

namespace flowgpu::replay::living {

template <class H> uint64_t bits(H handle) {
    if constexpr (std::is_pointer_v<H>)
        return reinterpret_cast<uintptr_t>(handle);
    else
        return handle;
}

// Of the arguments of a function that makes one, the place of its handle (CUsurfObject is the type
// of CUtexObject).
template <class T> const void* place_of(T argument) {
    constexpr bool is_it = std::is_same_v<T, CUarray*> || std::is_same_v<T, CUmipmappedArray*> ||
                           std::is_same_v<T, CUtexObject*> || std::is_same_v<T, CUlinkState*>;
    if constexpr (is_it)
        return argument;
    else
        return nullptr;
}
template <class... T> const void* made_at(T... arguments) {
    const void* found = nullptr;
    ((found = found ? found : place_of(arguments)), ...);
    return found;
}

// Gives the result that it is given, of the driver's call. `place` holds 64 bits.
CUresult begun(CUresult result, unsigned symbol, const void* place);
// Around the driver's call: as soon as that has ended the object, another may have its handle.
class Ending {
  public:
    Ending(unsigned symbol, uint64_t handle);
    CUresult done(CUresult result);

  private:
    unsigned symbol_;
    uint64_t handle_;
    bool known_;
    unsigned maker_;
};
void end_in_contexts(); // the last context has ended; a linker belongs to none
void add_names(std::set<std::string>* names);

} // namespace flowgpu::replay::living

#endif
