// Handlers by opcode. A null handler means that the combination does not exist here; the lowering
// turns that into an error that names it.
#pragma once

#include <optional>
#include <string>

#include "code.h"

namespace flowgpu::emu::ptx {

enum class Round : uint8_t { none, rn, rz, rm, rp, rni, rzi, rmi, rpi, rna };

struct Key {
    std::string op; // "mul"
    Type type = Type::b32;
    std::string variant; // "wide", "approx", "lt", "clamp", ...
    Round round = Round::none;
    bool ftz = false, sat = false, nan = false, relu = false, satfinite = false;
};

Handler find_integer(const Key& key);
Handler find_float(const Key& key);
Handler find_half(const Key& key);
Handler find_compare(const Key& key); // key.variant: the comparison; writes a predicate
Handler find_select(const std::string& op, Type type, Type selector); // selp, slct
Handler find_predicate(const std::string& op); // and, or, xor, not, mov and friends on .pred
Handler find_set(Type destination);            // predicate to all ones or 1.0
Handler find_set_pair(Type destination);       // two predicates to the halves of 32 bits
Handler find_convert(Type to, Type from, const Key& key);
Handler find_convert_pack(Type to);                          // cvt.pack.sat from s32
Handler find_move(uint32_t bytes);                           // register copy
Handler find_pack(uint32_t from_bytes, uint32_t to_bytes);   // mov.b64 d, {a, b}
Handler find_unpack(uint32_t from_bytes, uint32_t to_bytes); // mov.b64 {a, b}, s
Handler find_extend(Type from, uint32_t to_bytes);           // sign or zero extension of a register
Handler find_special(SpecialKind kind);
Handler find_load(Type type, uint32_t register_bytes);
Handler find_store(Type type, uint32_t register_bytes);
Handler find_atomic(const std::string& op, Type type, bool returns);
Handler find_async_copy(bool sized);
Handler find_warp(const std::string& op, const std::string& variant, Type type);
Handler find_load_matrix(uint32_t count, bool transposed);
Handler find_transpose_matrix();

// A product D = A * B + C of a warp, with the number of registers a lane.
struct Multiply {
    Handler fn;
    uint32_t d, a, b, c;
    bool wide;       // registers of 64 bits
    bool saturating; // .satfinite exists
};
// By shape and types: "m16n8k16.f32.f16.f16.f32"; null: no such product.
const Multiply* find_multiply_matrix(const std::string& name);
const Multiply* find_multiply_fragment(const std::string& name);

// A matrix of wmma, and the registers of a lane that hold its part.
struct FragmentShape {
    uint32_t rows, columns, registers;
};
// `role` is a, b, c or d; nothing: no such fragment.
std::optional<FragmentShape> find_fragment(const std::string& role, const std::string& size,
                                           Type type);
Handler find_load_fragment(Type type);
Handler find_store_fragment(Type type);

// op: a list in `aux` of the number, the coordinates and the data; `mode`: the geometry.
Handler find_texture(bool floats); // coordinates
Handler find_surface(uint32_t bytes, bool store);
Handler find_image_query(bool surfaces);

Handler find_mbarrier(const std::string& op); // "init", "arrive.noComplete", "cp.async", ...

} // namespace flowgpu::emu::ptx
