// What a driver call does to memory of the program's, from the column of api.def.
#ifndef FLOWGPU_INTERCEPT_EFFECTS_H
#define FLOWGPU_INTERCEPT_EFFECTS_H

#include <array>
#include <cstdint>

#include "page.h"

namespace flowgpu {

enum class Does : uint8_t { nothing, launches, writes, frees };

// How a call's arguments say which memory that is. Effect::places has the places of the arguments,
// in the order that stands here.
enum class Form : uint8_t {
    none,
    address,    // address
    line,       // address, number of elements
    rows,       // address, pitch, elements of a row, rows
    list,       // addresses, bytes of each, count
    array,      // CUarray, which has no address
    copy_2d_v1, // CUDA_MEMCPY2D_v1*, and so on
    copy_2d,    //
    copy_3d_v1, //
    copy_3d,    //
    copy_3d_peer,
    copies_3d,  // CUDA_MEMCPY3D_BATCH_OP*, count
    operations, // CUstreamBatchMemOpParams*, count
    unknown,    // the arguments do not say how much
};

constexpr uint8_t kNoArgument = 255; // in the place of a number of elements: one

struct Effect {
    Does does = Does::nothing;
    Form form = Form::none;
    uint8_t unit = 1; // bytes of an element
    uint8_t places[4] = {};
};

constexpr std::array<Effect, kSymbols> effects = [] {
    std::array<Effect, kSymbols> all = {};
#define FG_EFFECT(symbol, does, form, unit, ...)                                                   \
    all[I_##symbol] = {Does::does, Form::form, unit, {__VA_ARGS__}};
#include "generated/effects.inc"
#undef FG_EFFECT
    return all;
}();

constexpr Does does(unsigned symbol) {
    return symbol < kSymbols ? effects[symbol].does : Does::nothing;
}

} // namespace flowgpu

#endif
