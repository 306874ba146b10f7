// Objects that the engine cannot make again, and that have no handle of ours: while one lives, a
// checkpoint is refused by the name of the function that made it. They belong to no context.
#ifndef FLOWGPU_INTERCEPT_REPLAY_LIVING_H
#define FLOWGPU_INTERCEPT_REPLAY_LIVING_H

#include <set>
#include <string>
#include <type_traits>

#include "../driver.h"

namespace flowgpu::replay::living {

// Finds the argument that says where the driver puts the handle of the object that it makes.
template <class... T> const CUlinkState* made_at(T... arguments) {
    const CUlinkState* found = nullptr;
    const auto look = [&](auto argument) {
        if constexpr (std::is_same_v<decltype(argument), CUlinkState*>)
            found = argument;
    };
    (look(arguments), ...);
    return found;
}

// Gives the result that it is given, of the driver's call.
CUresult begun(CUresult result, unsigned symbol, const CUlinkState* place);
// Around the driver's call: as soon as that has ended the object, another may have its handle.
class Ending {
  public:
    explicit Ending(const void* handle);
    CUresult done(CUresult result);

  private:
    const void* handle_;
    bool known_;
    unsigned maker_;
};
void add_names(std::set<std::string>* names);

} // namespace flowgpu::replay::living

#endif
