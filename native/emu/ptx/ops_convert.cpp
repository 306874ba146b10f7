// cvt. Built with -frounding-math.
#include <cfenv>
#include <type_traits>

#include "float_bits.h"
#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

// Calls f with a value of the C type of an integer type.
template <class F> Handler with_integer(Type type, F f) {
    switch (type) {
    case Type::u8:
    case Type::b8:
        return f(uint8_t());
    case Type::s8:
        return f(int8_t());
    case Type::u16:
    case Type::b16:
        return f(uint16_t());
    case Type::s16:
        return f(int16_t());
    case Type::u32:
    case Type::b32:
        return f(uint32_t());
    case Type::s32:
        return f(int32_t());
    case Type::u64:
    case Type::b64:
        return f(uint64_t());
    case Type::s64:
        return f(int64_t());
    default:
        return nullptr;
    }
}

// 8-bit values live in 16-bit registers, extended the way their type says.
template <class T>
using Slot = std::conditional_t<sizeof(T) == 1,
                                std::conditional_t<std::is_signed_v<T>, int16_t, uint16_t>, T>;

template <class D, class S> struct IntToInt {
    static Slot<D> run(Slot<S> s) { return static_cast<D>(static_cast<S>(s)); }
};
template <class D, class S> struct IntToIntSat {
    static Slot<D> run(Slot<S> slot) {
        S s = static_cast<S>(slot);
        if (std::is_signed_v<S> && s < 0) {
            if (!std::is_signed_v<D>) {
                return 0;
            }
            int64_t low = static_cast<int64_t>(std::numeric_limits<D>::min());
            return static_cast<D>(static_cast<int64_t>(s) < low ? low : static_cast<int64_t>(s));
        }
        uint64_t high = static_cast<uint64_t>(std::numeric_limits<D>::max());
        return static_cast<D>(static_cast<uint64_t>(s) > high ? high : static_cast<uint64_t>(s));
    }
};

template <class F, int mode> void in_mode(Cta& c, const Ins& i, const Mask& m) {
    std::fesetround(mode);
    elementwise<F>(c, i, m);
    std::fesetround(FE_TONEAREST);
}

template <class F> Handler rounded(Round round) {
    switch (round) {
    case Round::none:
    case Round::rn:
    case Round::rni:
        return elementwise<F>;
    case Round::rz:
    case Round::rzi:
        return in_mode<F, FE_TOWARDZERO>;
    case Round::rm:
    case Round::rmi:
        return in_mode<F, FE_DOWNWARD>;
    case Round::rp:
    case Round::rpi:
        return in_mode<F, FE_UPWARD>;
    default:
        return nullptr;
    }
}

template <class D, class S, bool sat> struct IntToFloat {
    static D run(Slot<S> s) {
        D d = static_cast<D>(static_cast<S>(s));
        return sat ? saturate(d) : d;
    }
};
template <class S, Narrow mode, bool sat> struct IntToHalf {
    // f64 is exact where f16 is finite.
    static uint16_t run(Slot<S> slot) {
        double d = static_cast<double>(static_cast<S>(slot));
        return narrow<Half>(sat ? saturate(d) : d, mode).bits;
    }
};

// NaN gives zero, except that f64 sources and 64-bit results give the top bit alone.
template <class D, class S> D float_to_int(double whole, bool is_nan) {
    if (is_nan) {
        return sizeof(S) < 8 && sizeof(D) < 8
                   ? D(0)
                   : static_cast<D>(static_cast<std::make_unsigned_t<D>>(1) << (sizeof(D) * 8 - 1));
    }
    constexpr double low = static_cast<double>(std::numeric_limits<D>::min());
    // 2^bits, the first value that does not fit: exact, unlike max()
    constexpr double past = 2.0 * static_cast<double>(std::numeric_limits<D>::max() / 2 + 1);
    return whole < low     ? std::numeric_limits<D>::min()
           : whole >= past ? std::numeric_limits<D>::max()
                           : static_cast<D>(whole);
}
template <class D, class S, bool ftz> struct FloatToInt {
    static Slot<D> run(S s) {
        if constexpr (ftz) {
            s = flush(s);
        }
        return float_to_int<D, S>(std::nearbyint(static_cast<double>(s)), s != s);
    }
};
template <class D> struct HalfToInt {
    static Slot<D> run(uint16_t bits) {
        float s = to_float(Half{bits});
        return float_to_int<D, float>(std::nearbyint(static_cast<double>(s)), s != s);
    }
};

template <class D, class S, bool integral, bool ftz, bool sat> struct FloatToFloat {
    static D run(S s) {
        if constexpr (ftz && sizeof(S) == 4) {
            s = flush(s);
        }
        D d = static_cast<D>(integral ? std::nearbyint(s) : s);
        d = canonical(d);
        if constexpr (ftz && sizeof(D) == 4) {
            d = flush(d);
        }
        return sat ? saturate(d) : d;
    }
};
template <class D, class F, bool sat> struct NarrowToFloat {
    static D run(uint16_t bits) {
        D d = canonical(static_cast<D>(to_float(F{bits})));
        return sat ? saturate(d) : d;
    }
};
template <class F> uint16_t finite(uint16_t bits) {
    constexpr uint16_t infinity = static_cast<uint16_t>(0x7fffu >> F::mantissa << F::mantissa);
    return (bits & 0x7fff) == infinity ? static_cast<uint16_t>(bits - 1) : bits;
}
template <class F, class S, Narrow mode, bool relu, bool sat, bool ftz, bool satfinite = false>
struct FloatToNarrow {
    static uint16_t run(S s) {
        if constexpr (ftz && sizeof(S) == 4) {
            s = flush(s);
        }
        double value = static_cast<double>(s);
        value = sat ? saturate(value) : relu && value < 0 ? 0.0 : value;
        uint16_t bits = narrow<F>(relu && value == 0 ? 0.0 : value, mode).bits;
        return satfinite ? finite<F>(bits) : bits;
    }
};
template <bool integral, bool sat> struct HalfToHalf {
    static uint16_t run(uint16_t bits) {
        double value = static_cast<double>(to_float(Half{bits}));
        value = integral ? std::nearbyint(value) : value;
        return narrow<Half>(sat ? saturate(value) : value).bits;
    }
};
// cvt.rn.f16x2.f32 d, a, b: a is the upper half.
template <class F, Narrow mode, bool relu, bool satfinite> struct Pair {
    static uint32_t run(float a, float b) {
        using One = FloatToNarrow<F, float, mode, relu, false, false, satfinite>;
        return static_cast<uint32_t>(One::run(a)) << 16 | One::run(b);
    }
};
// tf32 is an f32 whose mantissa keeps 10 bits.
template <bool satfinite> struct ToTf32 {
    static uint32_t run(float a) {
        float r =
            static_cast<float>(round_to(static_cast<double>(a), 10, 127, Narrow::nearest_away));
        if (satfinite && std::isinf(r)) {
            r = std::copysign(bit_cast<float>(0x7f7fe000u), r);
        }
        return bit_cast<uint32_t>(canonical(r));
    }
};

template <class F, class S, bool relu, bool sat, bool ftz, bool satfinite = false>
Handler narrow_in(Round round) {
    switch (round) {
    case Round::rn:
        return elementwise<FloatToNarrow<F, S, Narrow::nearest_even, relu, sat, ftz, satfinite>>;
    case Round::rz:
        return elementwise<FloatToNarrow<F, S, Narrow::zero, relu, sat, ftz, satfinite>>;
    case Round::rm:
        return elementwise<FloatToNarrow<F, S, Narrow::down, relu, sat, ftz, satfinite>>;
    case Round::rp:
        return elementwise<FloatToNarrow<F, S, Narrow::up, relu, sat, ftz, satfinite>>;
    default:
        return nullptr;
    }
}
template <class F, class S> Handler float_to_narrow(const Key& key) {
    if (key.satfinite) {
        return key.relu ? narrow_in<F, S, true, false, false, true>(key.round)
                        : narrow_in<F, S, false, false, false, true>(key.round);
    }
    if (key.relu) {
        return narrow_in<F, S, true, false, false>(key.round);
    }
    if (key.ftz) {
        return key.sat ? narrow_in<F, S, false, true, true>(key.round)
                       : narrow_in<F, S, false, false, true>(key.round);
    }
    return key.sat ? narrow_in<F, S, false, true, false>(key.round)
                   : narrow_in<F, S, false, false, false>(key.round);
}

template <class D, class S, bool integral> Handler float_to_float(const Key& key) {
    if (key.ftz) {
        return key.sat ? rounded<FloatToFloat<D, S, integral, true, true>>(key.round)
                       : rounded<FloatToFloat<D, S, integral, true, false>>(key.round);
    }
    return key.sat ? rounded<FloatToFloat<D, S, integral, false, true>>(key.round)
                   : rounded<FloatToFloat<D, S, integral, false, false>>(key.round);
}

bool integral(Round round) {
    return round >= Round::rni && round <= Round::rpi;
}

template <class D> Handler to_float_type(Type from, const Key& key) {
    if (from == Type::f32) {
        return integral(key.round) ? float_to_float<D, float, true>(key)
                                   : float_to_float<D, float, false>(key);
    }
    if (from == Type::f64) {
        return integral(key.round) ? float_to_float<D, double, true>(key)
                                   : float_to_float<D, double, false>(key);
    }
    if (from == Type::f16) { // .ftz: no f16 becomes a subnormal f32
        return key.sat ? elementwise<NarrowToFloat<D, Half, true>>
                       : elementwise<NarrowToFloat<D, Half, false>>;
    }
    if (from == Type::bf16) {
        return elementwise<NarrowToFloat<D, Bfloat, false>>;
    }
    return with_integer(from, [&](auto s) -> Handler {
        using S = decltype(s);
        return key.sat ? rounded<IntToFloat<D, S, true>>(key.round)
                       : rounded<IntToFloat<D, S, false>>(key.round);
    });
}

Handler to_half(Type from, const Key& key) {
    if (from == Type::f32) {
        return float_to_narrow<Half, float>(key);
    }
    if (from == Type::f64) {
        return float_to_narrow<Half, double>(key);
    }
    if (from == Type::f16) {
        bool whole = integral(key.round);
        return key.sat ? whole ? rounded<HalfToHalf<true, true>>(key.round)
                               : elementwise<HalfToHalf<false, true>>
               : whole ? rounded<HalfToHalf<true, false>>(key.round)
                       : elementwise<HalfToHalf<false, false>>;
    }
    return with_integer(from, [&](auto s) -> Handler {
        using S = decltype(s);
        switch (key.round) {
        case Round::rn:
            return key.sat ? elementwise<IntToHalf<S, Narrow::nearest_even, true>>
                           : elementwise<IntToHalf<S, Narrow::nearest_even, false>>;
        case Round::rz:
            return key.sat ? elementwise<IntToHalf<S, Narrow::zero, true>>
                           : elementwise<IntToHalf<S, Narrow::zero, false>>;
        case Round::rm:
            return key.sat ? elementwise<IntToHalf<S, Narrow::down, true>>
                           : elementwise<IntToHalf<S, Narrow::down, false>>;
        case Round::rp:
            return key.sat ? elementwise<IntToHalf<S, Narrow::up, true>>
                           : elementwise<IntToHalf<S, Narrow::up, false>>;
        default:
            return nullptr;
        }
    });
}

Handler to_integer(Type to, Type from, const Key& key) {
    return with_integer(to, [&](auto d) -> Handler {
        using D = decltype(d);
        switch (from) {
        case Type::f32:
            return key.ftz ? rounded<FloatToInt<D, float, true>>(key.round)
                           : rounded<FloatToInt<D, float, false>>(key.round);
        case Type::f64:
            return rounded<FloatToInt<D, double, false>>(key.round);
        case Type::f16:
            return rounded<HalfToInt<D>>(key.round);
        default:
            return with_integer(from, [&](auto s) -> Handler {
                using S = decltype(s);
                constexpr bool fits = std::is_signed_v<D> == std::is_signed_v<S>
                                          ? sizeof(D) >= sizeof(S)
                                          : std::is_signed_v<D> && sizeof(D) > sizeof(S);
                return !key.sat ? elementwise<IntToInt<D, S>>
                       : fits   ? nullptr
                                : elementwise<IntToIntSat<D, S>>;
            });
        }
    });
}

template <class F, Narrow mode> Handler pair_in(const Key& key) {
    if (key.satfinite) {
        return key.relu ? elementwise<Pair<F, mode, true, true>>
                        : elementwise<Pair<F, mode, false, true>>;
    }
    return key.relu ? elementwise<Pair<F, mode, true, false>>
                    : elementwise<Pair<F, mode, false, false>>;
}
template <class F> Handler pair(const Key& key) {
    return key.round == Round::rn ? pair_in<F, Narrow::nearest_even>(key)
                                  : pair_in<F, Narrow::zero>(key);
}

// Two saturated values side by side, a above b; 8-bit ones leave the upper half to c.
template <class D> struct Packed {
    static uint32_t run(int32_t a, int32_t b, uint32_t c) {
        constexpr int bits = static_cast<int>(sizeof(D) * 8);
        using Unsigned = std::make_unsigned_t<D>;
        auto part = [](int32_t v) {
            return static_cast<uint32_t>(static_cast<Unsigned>(IntToIntSat<D, int32_t>::run(v)));
        };
        uint32_t low = part(a) << bits | part(b);
        return bits == 16 ? low : c << 16 | low;
    }
};

// The forms that compute capability 8.0 has, as its assembler judges them.
bool is_legal(Type to, Type from, const Key& key) {
    bool directed = key.round >= Round::rn && key.round <= Round::rp;
    bool nearest_or_zero = key.round == Round::rn || key.round == Round::rz;
    bool packed = to == Type::bf16x2 || to == Type::f16x2;
    if (to == Type::tf32) {
        return from == Type::f32 && key.round == Round::rna && !key.relu && !key.sat && !key.ftz;
    }
    if (key.relu || key.satfinite) {
        return from == Type::f32 && (packed || to == Type::f16 || to == Type::bf16) &&
               nearest_or_zero && !key.sat && !key.ftz;
    }
    if (key.ftz && to != Type::f32 && from != Type::f32) {
        return false;
    }
    if (packed || to == Type::bf16) {
        return from == Type::f32 && nearest_or_zero && !key.sat && !(key.ftz && packed);
    }
    if (from == Type::bf16) {
        return to == Type::f32 && (key.round == Round::none || nearest_or_zero) && !key.sat &&
               !key.ftz;
    }
    if (is_float(to) && is_float(from)) {
        return to == from                    ? key.round == Round::none || integral(key.round)
               : size_of(to) > size_of(from) ? key.round == Round::none
                                             : directed;
    }
    return is_float(to)     ? directed
           : is_float(from) ? integral(key.round)
                            : key.round == Round::none;
}

} // namespace

Handler find_convert(Type to, Type from, const Key& key) {
    if (!is_legal(to, from, key)) {
        return nullptr;
    }
    switch (to) {
    case Type::f32:
        return to_float_type<float>(from, key);
    case Type::f64:
        return to_float_type<double>(from, key);
    case Type::f16:
        return to_half(from, key);
    case Type::bf16:
        return float_to_narrow<Bfloat, float>(key);
    case Type::f16x2:
        return pair<Half>(key);
    case Type::bf16x2:
        return pair<Bfloat>(key);
    case Type::tf32:
        return key.satfinite ? elementwise<ToTf32<true>> : elementwise<ToTf32<false>>;
    default:
        return to_integer(to, from, key);
    }
}

Handler find_convert_pack(Type to) {
    switch (to) {
    case Type::u16:
        return elementwise<Packed<uint16_t>>;
    case Type::s16:
        return elementwise<Packed<int16_t>>;
    case Type::u8:
        return elementwise<Packed<uint8_t>>;
    case Type::s8:
        return elementwise<Packed<int8_t>>;
    default:
        return nullptr;
    }
}

} // namespace flowgpu::emu::ptx
