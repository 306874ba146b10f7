// Texture and surface objects: numbers, one row of them for each context, which kernels are given
// as they are.
//
// A driver gives the lowest number that is free, and takes some for itself, for arrays and copies
// of them. So when CUDA is made anew, all numbers up to the program's highest are taken first,
// before there is any array, and each of the program's is given back just before its object is
// made.
#ifndef FLOWGPU_INTERCEPT_REPLAY_TEXTURES_H
#define FLOWGPU_INTERCEPT_REPLAY_TEXTURES_H

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "record.h"

namespace flowgpu::replay {

struct Texture {
    bool surface = false;
    CUDA_RESOURCE_DESC resource = {}; // with the program's handles
    CUDA_TEXTURE_DESC texture = {};
    std::optional<CUDA_RESOURCE_VIEW_DESC> view;
    uint64_t array = 0; // of which it is: the object's serial, 0 for other memory
};
using Textures = std::map<std::pair<const Object*, unsigned long long>, Texture>; // by context

namespace textures {

// Around the driver's call: as soon as that has ended the object, another may have its number.
class Ending {
  public:
    Ending(bool surface, unsigned long long number);
    CUresult done(CUresult result);

  private:
    Textures::node_type ended_;
};
// Notes an object of the current context that the driver has made.
void made(unsigned long long number, Texture texture);

// The registry is locked for these.
void end_in(const Object* context);
void add_names(std::set<std::string>* names); // of what cannot be made again
// Takes the numbers in a context, which is current and has just been made.
CUresult take_numbers(const Object* context);
// Makes the current context's objects, and gives all other numbers back.
CUresult make_all(const Object* context);

} // namespace textures

} // namespace flowgpu::replay

#endif
