// f32 and f64 arithmetic. Built with -frounding-math: directed roundings change the rounding mode
// around the loop.
#include <cfenv>
#include <unordered_map>

#include "float_bits.h"
#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

struct AddOp {
    template <class T> static T of(T a, T b) { return a + b; }
};
struct SubOp {
    template <class T> static T of(T a, T b) { return a - b; }
};
struct MulOp {
    template <class T> static T of(T a, T b) { return a * b; }
};
struct DivOp {
    template <class T> static T of(T a, T b) { return a / b; }
};
struct FmaOp {
    template <class T> static T of(T a, T b, T c) { return std::fma(a, b, c); }
};
struct RcpOp {
    template <class T> static T of(T a) { return T(1) / a; }
};
struct SqrtOp {
    template <class T> static T of(T a) { return std::sqrt(a); }
};
template <class T> bool takes_first(T a, T b, bool smaller) {
    if (a == b) { // orders -0 below +0
        return std::signbit(a) == smaller;
    }
    return smaller ? a < b : a > b;
}
template <class T> T extremum(T a, T b, bool smaller) {
    if (a != a) {
        return b;
    }
    return b != b || takes_first(a, b, smaller) ? a : b;
}
struct MinOp {
    template <class T> static T of(T a, T b) { return extremum(a, b, true); }
};
struct MaxOp {
    template <class T> static T of(T a, T b) { return extremum(a, b, false); }
};
template <class T> T quiet() {
    return std::numeric_limits<T>::quiet_NaN();
}
struct MinNanOp {
    template <class T> static T of(T a, T b) {
        return a != a || b != b ? quiet<T>() : MinOp::of(a, b);
    }
};
struct MaxNanOp {
    template <class T> static T of(T a, T b) {
        return a != a || b != b ? quiet<T>() : MaxOp::of(a, b);
    }
};

// Approximations have no defined bits: computed in double, rounded once.
struct RsqrtOp {
    template <class T> static T of(T a) { return T(1.0 / std::sqrt(double(a))); }
};
struct SinOp {
    template <class T> static T of(T a) { return T(std::sin(double(a))); }
};
struct CosOp {
    template <class T> static T of(T a) { return T(std::cos(double(a))); }
};
struct Lg2Op {
    template <class T> static T of(T a) { return T(std::log2(double(a))); }
};
struct Ex2Op {
    template <class T> static T of(T a) { return T(std::exp2(double(a))); }
};
struct TanhOp {
    template <class T> static T of(T a) { return T(std::tanh(double(a))); }
};
// The f64 approximations work on the upper half of the operand and return zeros in the lower half.
double upper(double a) {
    return bit_cast<double>(bit_cast<uint64_t>(a) & ~0xffffffffull);
}
double flush_double(double a) {
    return std::fabs(a) < 0x1p-1022 ? std::copysign(0.0, a) : a;
}
struct RcpUpper {
    static double run(double a) { return flush_double(upper(1.0 / flush_double(upper(a)))); }
};
struct RsqrtUpper {
    static double run(double a) {
        return flush_double(upper(1.0 / std::sqrt(flush_double(upper(a)))));
    }
};

template <class Op, class T, bool ftz, bool sat, int arity> struct Wrapped;
template <class T, bool ftz> T in(T a) {
    if constexpr (ftz) {
        return flush(a);
    } else {
        return a;
    }
}
template <class T, bool ftz, bool sat> T out(T r) {
    r = canonical(r);
    if constexpr (ftz) {
        r = flush(r);
    }
    if constexpr (sat) {
        r = saturate(r);
    }
    return r;
}
template <class Op, class T, bool ftz, bool sat> struct Wrapped<Op, T, ftz, sat, 1> {
    static T run(T a) { return out<T, ftz, sat>(Op::of(in<T, ftz>(a))); }
};
template <class Op, class T, bool ftz, bool sat> struct Wrapped<Op, T, ftz, sat, 2> {
    static T run(T a, T b) { return out<T, ftz, sat>(Op::of(in<T, ftz>(a), in<T, ftz>(b))); }
};
template <class Op, class T, bool ftz, bool sat> struct Wrapped<Op, T, ftz, sat, 3> {
    static T run(T a, T b, T c) {
        return out<T, ftz, sat>(Op::of(in<T, ftz>(a), in<T, ftz>(b), in<T, ftz>(c)));
    }
};

template <class F, int mode> void directed(Cta& c, const Ins& i, const Mask& m) {
    std::fesetround(mode);
    elementwise<F>(c, i, m);
    std::fesetround(FE_TONEAREST);
}

template <class F> Handler rounded(Round round) {
    switch (round) {
    case Round::none:
    case Round::rn:
        return elementwise<F>;
    case Round::rz:
        return directed<F, FE_TOWARDZERO>;
    case Round::rm:
        return directed<F, FE_DOWNWARD>;
    case Round::rp:
        return directed<F, FE_UPWARD>;
    default:
        return nullptr;
    }
}

template <class Op, int arity> Handler f32(const Key& key) {
    if (key.ftz) {
        return key.sat ? rounded<Wrapped<Op, float, true, true, arity>>(key.round)
                       : rounded<Wrapped<Op, float, true, false, arity>>(key.round);
    }
    return key.sat ? rounded<Wrapped<Op, float, false, true, arity>>(key.round)
                   : rounded<Wrapped<Op, float, false, false, arity>>(key.round);
}
template <class Op, int arity> Handler f32_plain(const Key& key) {
    if (key.round != Round::none || key.sat) {
        return nullptr;
    }
    return key.ftz ? elementwise<Wrapped<Op, float, true, false, arity>>
                   : elementwise<Wrapped<Op, float, false, false, arity>>;
}
template <class Op, int arity> Handler f64(const Key& key) {
    return rounded<Wrapped<Op, double, false, false, arity>>(key.round);
}

template <class Op, int arity> Handler f64_plain(const Key& key) {
    return key.round == Round::none ? elementwise<Wrapped<Op, double, false, false, arity>>
                                    : nullptr;
}

template <bool ftz> struct Abs32 {
    static uint32_t run(uint32_t a) {
        return bit_cast<uint32_t>(in<float, ftz>(bit_cast<float>(a))) & 0x7fffffffu;
    }
};
template <bool ftz> struct Neg32 {
    static uint32_t run(uint32_t a) {
        return bit_cast<uint32_t>(in<float, ftz>(bit_cast<float>(a))) ^ 0x80000000u;
    }
};
struct Abs64 {
    static uint64_t run(uint64_t a) { return a & ~(1ull << 63); }
};
struct Neg64 {
    static uint64_t run(uint64_t a) { return a ^ 1ull << 63; }
};
struct Copysign32 {
    static uint32_t run(uint32_t a, uint32_t b) { return (a & 0x80000000u) | (b & 0x7fffffffu); }
};
struct Copysign64 {
    static uint64_t run(uint64_t a, uint64_t b) { return (a & 1ull << 63) | (b & ~(1ull << 63)); }
};

using Find = Handler (*)(const Key&);
using Table = std::unordered_map<std::string, Find>;

const Table& table32() {
    static const Table table{{"add", f32<AddOp, 2>},
                             {"sub", f32<SubOp, 2>},
                             {"mul", f32<MulOp, 2>},
                             {"fma", f32<FmaOp, 3>},
                             {"mad", f32<FmaOp, 3>},
                             {"div", f32<DivOp, 2>},
                             {"rcp", f32<RcpOp, 1>},
                             {"sqrt", f32<SqrtOp, 1>},
                             {"div.approx", f32_plain<DivOp, 2>},
                             {"div.full", f32_plain<DivOp, 2>},
                             {"rcp.approx", f32_plain<RcpOp, 1>},
                             {"sqrt.approx", f32_plain<SqrtOp, 1>},
                             {"rsqrt.approx", f32_plain<RsqrtOp, 1>},
                             {"sin.approx", f32_plain<SinOp, 1>},
                             {"cos.approx", f32_plain<CosOp, 1>},
                             {"lg2.approx", f32_plain<Lg2Op, 1>},
                             {"ex2.approx", f32_plain<Ex2Op, 1>},
                             {"tanh.approx", f32_plain<TanhOp, 1>},
                             {"min", f32_plain<MinOp, 2>},
                             {"max", f32_plain<MaxOp, 2>},
                             {"min.NaN", f32_plain<MinNanOp, 2>},
                             {"max.NaN", f32_plain<MaxNanOp, 2>}};
    return table;
}

const Table& table64() {
    static const Table table{{"add", f64<AddOp, 2>},
                             {"sub", f64<SubOp, 2>},
                             {"mul", f64<MulOp, 2>},
                             {"fma", f64<FmaOp, 3>},
                             {"mad", f64<FmaOp, 3>},
                             {"div", f64<DivOp, 2>},
                             {"rcp", f64<RcpOp, 1>},
                             {"sqrt", f64<SqrtOp, 1>},
                             {"min", f64_plain<MinOp, 2>},
                             {"max", f64_plain<MaxOp, 2>},
                             {"rsqrt.approx", f64_plain<RsqrtOp, 1>}};
    return table;
}

Handler find_bits(const Key& key) {
    if (key.round != Round::none || key.sat || key.nan || (key.type == Type::f64 && key.ftz)) {
        return nullptr;
    }
    if (key.type == Type::f32) {
        return key.op == "abs"   ? key.ftz ? elementwise<Abs32<true>> : elementwise<Abs32<false>>
               : key.op == "neg" ? key.ftz ? elementwise<Neg32<true>> : elementwise<Neg32<false>>
               : key.op == "copysign" ? elementwise<Copysign32>
                                      : nullptr;
    }
    return key.op == "abs"        ? elementwise<Abs64>
           : key.op == "neg"      ? elementwise<Neg64>
           : key.op == "copysign" ? elementwise<Copysign64>
                                  : nullptr;
}

} // namespace

Handler find_float(const Key& key) {
    if ((key.type != Type::f32 && key.type != Type::f64) || key.relu) {
        return nullptr;
    }
    if (key.op == "abs" || key.op == "neg" || key.op == "copysign") {
        return find_bits(key);
    }
    if (key.type == Type::f64 && key.variant == "approx" && key.ftz && key.round == Round::none) {
        return key.op == "rcp"     ? elementwise<RcpUpper>
               : key.op == "rsqrt" ? elementwise<RsqrtUpper>
                                   : nullptr;
    }
    if (key.type == Type::f64 && (key.ftz || key.sat)) {
        return nullptr;
    }
    bool divides = key.op == "div" || key.op == "rcp" || key.op == "sqrt";
    bool rounds = divides || key.op == "fma" || key.op == "mad";
    if (key.op == "tanh" && key.ftz) {
        return nullptr;
    }
    if (key.variant.empty() && ((rounds && key.round == Round::none) || (divides && key.sat))) {
        return nullptr;
    }
    std::string name =
        key.op + (key.variant.empty() ? "" : "." + key.variant) + (key.nan ? ".NaN" : "");
    const Table& table = key.type == Type::f32 ? table32() : table64();
    auto found = table.find(name);
    return found == table.end() ? nullptr : found->second(key);
}

} // namespace flowgpu::emu::ptx
