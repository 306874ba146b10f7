// f16, bf16 and their packed pairs: computed in f32 or f64, rounded once.
#include <unordered_map>

#include "float_bits.h"
#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

// f32 holds the exact product and enough of every sum that rounding it again is innocuous
// (24 bits >= 2 * 11 + 2).
struct AddOp {
    static double of(float a, float b) { return a + b; }
};
struct SubOp {
    static double of(float a, float b) { return a - b; }
};
struct MulOp {
    static double of(float a, float b) { return a * b; }
};
struct FmaOp {
    static double of(float a, float b, float c) { return fma_to_odd(a, b, c); }
};
struct Ex2Op {
    static double of(float a) { return std::exp2(double(a)); }
};
struct TanhOp {
    static double of(float a) { return std::tanh(double(a)); }
};
double pick(float a, float b, bool smaller) {
    if (a != a || b != b) {
        return a != a ? b : a;
    }
    if (a == b) {
        return std::signbit(a) == smaller ? a : b;
    }
    return (a < b) == smaller ? a : b;
}
struct MinOp {
    static double of(float a, float b) { return pick(a, b, true); }
};
struct MaxOp {
    static double of(float a, float b) { return pick(a, b, false); }
};
struct MinNanOp {
    static double of(float a, float b) { return a != a ? a : b != b ? b : pick(a, b, true); }
};
struct MaxNanOp {
    static double of(float a, float b) { return a != a ? a : b != b ? b : pick(a, b, false); }
};

enum Mode { plain, ftz, sat, ftz_sat, relu, ftz_relu };
constexpr bool flushes(Mode mode) {
    return mode == ftz || mode == ftz_sat || mode == ftz_relu;
}

template <class F>
constexpr uint16_t infinity = static_cast<uint16_t>(0x7fffu >> F::mantissa << F::mantissa);
template <class F> uint16_t flush(uint16_t bits) {
    return (bits & infinity<F>) == 0 ? bits & 0x8000 : bits;
}

template <class F, Mode mode> float read(uint16_t bits) {
    return to_float(F{flushes(mode) ? flush<F>(bits) : bits});
}
template <class F, Mode mode> uint16_t write(double value) {
    uint16_t bits = narrow<F>(value).bits;
    if constexpr (flushes(mode)) {
        bits = flush<F>(bits);
    }
    if constexpr (mode == sat || mode == ftz_sat) {
        bits = narrow<F>(saturate(static_cast<double>(to_float(F{bits})))).bits;
    }
    if constexpr (mode == relu || mode == ftz_relu) {
        bits = value == value && (bits & 0x8000) ? 0 : bits;
    }
    return bits;
}

template <class Op, class F, Mode mode, int arity> struct One;
template <class Op, class F, Mode mode> struct One<Op, F, mode, 1> {
    static uint16_t run(uint16_t a) { return write<F, mode>(Op::of(read<F, mode>(a))); }
};
template <class Op, class F, Mode mode> struct One<Op, F, mode, 2> {
    static uint16_t run(uint16_t a, uint16_t b) {
        return write<F, mode>(Op::of(read<F, mode>(a), read<F, mode>(b)));
    }
};
template <class Op, class F, Mode mode> struct One<Op, F, mode, 3> {
    static uint16_t run(uint16_t a, uint16_t b, uint16_t c) {
        return write<F, mode>(Op::of(read<F, mode>(a), read<F, mode>(b), read<F, mode>(c)));
    }
};

uint16_t low(uint32_t v) {
    return static_cast<uint16_t>(v);
}
uint16_t high(uint32_t v) {
    return static_cast<uint16_t>(v >> 16);
}
uint32_t join(uint16_t l, uint16_t h) {
    return static_cast<uint32_t>(h) << 16 | l;
}

template <class F, int arity> struct Two;
template <class F> struct Two<F, 1> {
    static uint32_t run(uint32_t a) { return join(F::run(low(a)), F::run(high(a))); }
};
template <class F> struct Two<F, 2> {
    static uint32_t run(uint32_t a, uint32_t b) {
        return join(F::run(low(a), low(b)), F::run(high(a), high(b)));
    }
};
template <class F> struct Two<F, 3> {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        return join(F::run(low(a), low(b), low(c)), F::run(high(a), high(b), high(c)));
    }
};

template <class Op, class F, Mode mode, int arity> Handler sized(bool pair) {
    using Single = One<Op, F, mode, arity>;
    return pair ? elementwise<Two<Single, arity>> : elementwise<Single>;
}

template <class Op, int arity, class F> Handler find_in(const Key& key, bool pair) {
    if (key.relu) {
        return key.sat || arity != 3 ? nullptr
               : key.ftz             ? sized<Op, F, ftz_relu, arity>(pair)
                                     : sized<Op, F, relu, arity>(pair);
    }
    if (key.ftz) {
        return key.sat ? sized<Op, F, ftz_sat, arity>(pair) : sized<Op, F, ftz, arity>(pair);
    }
    return key.sat ? sized<Op, F, sat, arity>(pair) : sized<Op, F, plain, arity>(pair);
}

template <class Op, int arity> Handler find_f16(const Key& key) {
    return key.type == Type::f16 || key.type == Type::f16x2
               ? find_in<Op, arity, Half>(key, key.type == Type::f16x2)
               : nullptr;
}
template <class Op, int arity> Handler find_any(const Key& key) {
    if (key.type == Type::f16 || key.type == Type::f16x2) {
        return find_f16<Op, arity>(key);
    }
    return key.ftz || key.sat ? nullptr : find_in<Op, arity, Bfloat>(key, key.type == Type::bf16x2);
}

struct Abs {
    static uint16_t run(uint16_t a) { return a & 0x7fff; }
};
struct Neg {
    static uint16_t run(uint16_t a) { return a ^ 0x8000; }
};
template <class F> struct AbsFtz {
    static uint16_t run(uint16_t a) { return flush<F>(a) & 0x7fff; }
};
template <class F> struct NegFtz {
    static uint16_t run(uint16_t a) { return flush<F>(a) ^ 0x8000; }
};
struct AbsPair {
    static uint32_t run(uint32_t a) { return a & 0x7fff7fff; }
};
struct NegPair {
    static uint32_t run(uint32_t a) { return a ^ 0x80008000; }
};

Handler find_sign(const Key& key) {
    bool pair = key.type == Type::f16x2 || key.type == Type::bf16x2, abs = key.op == "abs";
    if (key.sat || key.relu || key.nan || key.round != Round::none) {
        return nullptr;
    }
    if (!key.ftz) {
        return pair ? (abs ? elementwise<AbsPair> : elementwise<NegPair>)
                    : (abs ? elementwise<Abs> : elementwise<Neg>);
    }
    if (key.type == Type::bf16 || key.type == Type::bf16x2) {
        return nullptr;
    }
    return pair ? (abs ? elementwise<Two<AbsFtz<Half>, 1>> : elementwise<Two<NegFtz<Half>, 1>>)
                : (abs ? elementwise<AbsFtz<Half>> : elementwise<NegFtz<Half>>);
}

} // namespace

Handler find_half(const Key& key) {
    if (key.type != Type::f16 && key.type != Type::f16x2 && key.type != Type::bf16 &&
        key.type != Type::bf16x2) {
        return nullptr;
    }
    if (key.op == "abs" || key.op == "neg") {
        return find_sign(key);
    }
    bool sums = key.op == "add" || key.op == "sub" || key.op == "mul" || key.op == "fma";
    bool extremum = key.op == "min" || key.op == "max";
    if ((key.round != Round::none && (key.round != Round::rn || !sums)) ||
        (key.op == "fma" && key.round == Round::none) || (key.sat && !sums) ||
        (key.ftz && !sums && !extremum)) {
        return nullptr;
    }
    using Find = Handler (*)(const Key&);
    // Compute capability 8.0 has no other arithmetic of bf16.
    static const std::unordered_map<std::string, Find> table{
        {"add", find_f16<AddOp, 2>},        {"sub", find_f16<SubOp, 2>},
        {"mul", find_f16<MulOp, 2>},        {"fma", find_any<FmaOp, 3>},
        {"min", find_any<MinOp, 2>},        {"max", find_any<MaxOp, 2>},
        {"min.NaN", find_any<MinNanOp, 2>}, {"max.NaN", find_any<MaxNanOp, 2>},
        {"ex2.approx", find_f16<Ex2Op, 1>}, {"tanh.approx", find_f16<TanhOp, 1>}};
    std::string name =
        key.op + (key.variant.empty() ? "" : "." + key.variant) + (key.nan ? ".NaN" : "");
    auto found = table.find(name);
    return found == table.end() ? nullptr : found->second(key);
}

} // namespace flowgpu::emu::ptx
