// Floating-point helpers shared by the handlers: bit casts, canonical NaNs, flushing, narrow
// formats.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace flowgpu::emu::ptx {

template <class To, class From> inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// f32 results that are NaN are this one NaN on the hardware, payloads are not kept.
inline float canonical(float value) {
    return value != value ? bit_cast<float>(0x7fffffffu) : value;
}
inline double canonical(double value) {
    return value;
}

inline float flush(float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    return bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

// [0, 1]; NaN becomes +0.
template <class T> inline T saturate(T value) {
    return value > T(0) ? (value < T(1) ? value : T(1)) : T(0);
}

struct Half { // IEEE binary16
    uint16_t bits;
    static constexpr int mantissa = 10, bias = 15;
    static constexpr uint16_t nan = 0x7fff;
};

struct Bfloat {
    uint16_t bits;
    static constexpr int mantissa = 7, bias = 127;
    static constexpr uint16_t nan = 0x7fff;
};

inline float to_float(Bfloat value) {
    return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline float to_float(Half value) {
    uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
    uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
    if (magnitude >= 0x7c00u << 13) {
        return bit_cast<float>(sign | 0x7f800000u | magnitude);
    }
    // The exponent is rebiased by a multiplication, which also normalises subnormals.
    float scaled = bit_cast<float>(magnitude) * bit_cast<float>(0x77800000u); // 2^112
    return bit_cast<float>(bit_cast<uint32_t>(scaled) | sign);
}

enum class Narrow : uint8_t { nearest_even, zero, down, up, nearest_away };

// `value` rounded once to `mantissa` bits with exponents down to 1 - bias; magnitudes that round
// past the largest number become infinite, or stay at the largest where the rounding says so.
inline double round_to(double value, int mantissa, int bias, Narrow mode) {
    if (!(std::fabs(value) < std::numeric_limits<double>::infinity()) || value == 0) {
        return value;
    }
    uint64_t bits = bit_cast<uint64_t>(value);
    int exponent = static_cast<int>((bits >> 52) & 0x7ff) - 1023;
    int lowest = 1 - bias;
    int unit = (exponent < lowest ? lowest : exponent) - mantissa; // exponent of the last place
    bool negative = bits >> 63 != 0;
    uint64_t significand = (bits & 0xfffffffffffffull) | (exponent == -1023 ? 0 : 1ull << 52);
    int drop = unit - ((exponent == -1023 ? -1022 : exponent) - 52);
    if (drop > 0) {
        uint64_t kept = drop > 63 ? 0 : significand >> drop;
        uint64_t rest = drop > 63 ? significand : significand & ((1ull << drop) - 1);
        uint64_t half = drop > 63 ? ~0ull : 1ull << (drop - 1);
        bool up = mode == Narrow::nearest_even   ? rest > half || (rest == half && (kept & 1))
                  : mode == Narrow::nearest_away ? rest >= half
                  : mode == Narrow::up           ? rest != 0 && !negative
                  : mode == Narrow::down         ? rest != 0 && negative
                                                 : false;
        double magnitude = std::ldexp(static_cast<double>(kept + up), unit);
        value = negative ? -magnitude : magnitude;
    }
    double largest = std::ldexp(2.0 - std::ldexp(1.0, -mantissa), bias);
    if (std::fabs(value) > largest) {
        bool to_infinity = mode == Narrow::nearest_even || mode == Narrow::nearest_away ||
                           (mode == Narrow::up && !negative) || (mode == Narrow::down && negative);
        double limit = to_infinity ? std::numeric_limits<double>::infinity() : largest;
        value = negative ? -limit : limit;
    }
    return value;
}

// Exact encoding of a value that round_to has made representable.
template <class F> inline F encode(double value) {
    if (value != value) {
        return F{F::nan};
    }
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    constexpr uint16_t infinity = static_cast<uint16_t>(0x7fffu >> F::mantissa << F::mantissa);
    double magnitude = std::fabs(value);
    if (magnitude == std::numeric_limits<double>::infinity()) {
        return F{static_cast<uint16_t>(sign | infinity)};
    }
    if (magnitude < std::ldexp(1.0, 1 - F::bias)) {
        double units = std::ldexp(magnitude, F::bias - 1 + F::mantissa);
        return F{static_cast<uint16_t>(sign | static_cast<uint16_t>(units))};
    }
    uint64_t bits = bit_cast<uint64_t>(magnitude);
    uint64_t exponent = (bits >> 52) - 1023 + F::bias;
    uint64_t fraction = (bits >> (52 - F::mantissa)) & ((1u << F::mantissa) - 1);
    return F{static_cast<uint16_t>(sign | exponent << F::mantissa | fraction)};
}

template <class F> inline F narrow(double value, Narrow mode = Narrow::nearest_even) {
    return encode<F>(round_to(value, F::mantissa, F::bias, mode));
}

// a * b + c rounded to odd: a second rounding to at most 51 bits is then a single correct one.
inline double fma_to_odd(double a, double b, double c) {
    double product = a * b; // exact: the factors have at most 11 bits
    double sum = product + c;
    if (!(std::fabs(sum) < std::numeric_limits<double>::infinity())) {
        return sum;
    }
    double part = sum - product;
    double error = (product - (sum - part)) + (c - part);
    uint64_t bits = bit_cast<uint64_t>(sum);
    if (error == 0 || (bits & 1) != 0) {
        return sum;
    }
    bool away = (error > 0) == (sum > 0);
    return bit_cast<double>(away ? bits | 1 : bits - 1);
}

} // namespace flowgpu::emu::ptx
