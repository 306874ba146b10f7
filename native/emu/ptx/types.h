// Fundamental PTX types.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace flowgpu::emu::ptx {

enum class Type : uint8_t {
    b8,
    b16,
    b32,
    b64,
    u8,
    u16,
    u32,
    u64,
    s8,
    s16,
    s32,
    s64,
    f16,
    f16x2,
    bf16,
    bf16x2,
    tf32,
    f32,
    f64,
    u16x2,
    s16x2,
    pred,
};

inline std::optional<Type> type_from(std::string_view name) {
    constexpr std::string_view names[] = {
        "b8",  "b16", "b32",   "b64",  "u8",     "u16",  "u32", "u64", "s8",    "s16",   "s32",
        "s64", "f16", "f16x2", "bf16", "bf16x2", "tf32", "f32", "f64", "u16x2", "s16x2", "pred"};
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
        if (names[i] == name) {
            return static_cast<Type>(i);
        }
    }
    return std::nullopt;
}

// Bytes in memory.
inline uint32_t size_of(Type type) {
    switch (type) {
    case Type::b8:
    case Type::u8:
    case Type::s8:
    case Type::pred:
        return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
        return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64:
        return 8;
    default:
        return 4;
    }
}

// Bytes a lane in the register file: 8-bit values live in 16-bit registers, predicates in a byte.
inline uint32_t slot_size(Type type) {
    return type == Type::pred ? 1 : size_of(type) == 1 ? 2 : size_of(type);
}

inline bool is_signed(Type type) {
    return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64 ||
           type == Type::s16x2;
}

inline bool is_float(Type type) {
    return type >= Type::f16 && type <= Type::f64;
}

} // namespace flowgpu::emu::ptx
