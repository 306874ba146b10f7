// Comparisons, selections and predicate logic.
#include <unordered_map>

#include "float_bits.h"
#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

struct Eq {
    template <class T> static bool of(T a, T b) { return a == b; }
};
struct Ne {
    template <class T> static bool of(T a, T b) { return a < b || a > b; }
};
struct NeInt {
    template <class T> static bool of(T a, T b) { return a != b; }
};
struct Lt {
    template <class T> static bool of(T a, T b) { return a < b; }
};
struct Le {
    template <class T> static bool of(T a, T b) { return a <= b; }
};
struct Gt {
    template <class T> static bool of(T a, T b) { return a > b; }
};
struct Ge {
    template <class T> static bool of(T a, T b) { return a >= b; }
};
// The unordered forms are true when an operand is NaN.
struct Equ {
    template <class T> static bool of(T a, T b) { return !(a < b || a > b); }
};
struct Neu {
    template <class T> static bool of(T a, T b) { return !(a == b); }
};
struct Ltu {
    template <class T> static bool of(T a, T b) { return !(a >= b); }
};
struct Leu {
    template <class T> static bool of(T a, T b) { return !(a > b); }
};
struct Gtu {
    template <class T> static bool of(T a, T b) { return !(a <= b); }
};
struct Geu {
    template <class T> static bool of(T a, T b) { return !(a < b); }
};
struct Num {
    template <class T> static bool of(T a, T b) { return a == a && b == b; }
};
struct Nan {
    template <class T> static bool of(T a, T b) { return a != a || b != b; }
};

template <class Op, class T> struct Plain {
    static uint8_t run(T a, T b) { return Op::of(a, b); }
};
template <class Op> struct Flushed {
    static uint8_t run(float a, float b) { return Op::of(flush(a), flush(b)); }
};
template <class Op, bool ftz> struct Narrowed {
    static float in(uint16_t bits) {
        return ftz && (bits & 0x7fff) < 1 << Half::mantissa ? 0.0f : to_float(Half{bits});
    }
    static uint8_t run(uint16_t a, uint16_t b) { return Op::of(in(a), in(b)); }
};

using Table = std::unordered_map<std::string, Handler>;

template <class T> Table integers() {
    return {{"eq", elementwise<Plain<Eq, T>>}, {"ne", elementwise<Plain<NeInt, T>>},
            {"lt", elementwise<Plain<Lt, T>>}, {"le", elementwise<Plain<Le, T>>},
            {"gt", elementwise<Plain<Gt, T>>}, {"ge", elementwise<Plain<Ge, T>>},
            {"lo", elementwise<Plain<Lt, T>>}, {"ls", elementwise<Plain<Le, T>>},
            {"hi", elementwise<Plain<Gt, T>>}, {"hs", elementwise<Plain<Ge, T>>}};
}

template <template <class> class Make> Table floats() {
    return {{"eq", elementwise<Make<Eq>>},   {"ne", elementwise<Make<Ne>>},
            {"lt", elementwise<Make<Lt>>},   {"le", elementwise<Make<Le>>},
            {"gt", elementwise<Make<Gt>>},   {"ge", elementwise<Make<Ge>>},
            {"equ", elementwise<Make<Equ>>}, {"neu", elementwise<Make<Neu>>},
            {"ltu", elementwise<Make<Ltu>>}, {"leu", elementwise<Make<Leu>>},
            {"gtu", elementwise<Make<Gtu>>}, {"geu", elementwise<Make<Geu>>},
            {"num", elementwise<Make<Num>>}, {"nan", elementwise<Make<Nan>>}};
}
template <class Op> using PlainF32 = Plain<Op, float>;
template <class Op> using PlainF64 = Plain<Op, double>;
template <class Op> using PlainHalf = Narrowed<Op, false>;
template <class Op> using FlushedHalf = Narrowed<Op, true>;

const Table* compare_table(Type type, bool ftz) {
    static const Table u16 = integers<uint16_t>(), s16 = integers<int16_t>(),
                       u32 = integers<uint32_t>(), s32 = integers<int32_t>(),
                       u64 = integers<uint64_t>(), s64 = integers<int64_t>(),
                       f32 = floats<PlainF32>(), f32_ftz = floats<Flushed>(),
                       f64 = floats<PlainF64>(), f16 = floats<PlainHalf>(),
                       f16_ftz = floats<FlushedHalf>();
    switch (type) {
    case Type::u16:
    case Type::b16:
        return &u16;
    case Type::s16:
        return &s16;
    case Type::u32:
    case Type::b32:
        return &u32;
    case Type::s32:
        return &s32;
    case Type::u64:
    case Type::b64:
        return &u64;
    case Type::s64:
        return &s64;
    case Type::f32:
        return ftz ? &f32_ftz : &f32;
    case Type::f64:
        return &f64;
    case Type::f16:
        return ftz ? &f16_ftz : &f16;
    default:
        return nullptr;
    }
}

template <class T> struct Selp {
    static T run(T a, T b, uint8_t p) { return p ? a : b; }
};
template <class T> struct SlctInt {
    static T run(T a, T b, int32_t c) { return c >= 0 ? a : b; }
};
template <class T> struct SlctFloat {
    static T run(T a, T b, float c) { return c >= 0 ? a : b; }
};

struct PredAnd {
    static uint8_t run(uint8_t a, uint8_t b) { return a & b; }
};
struct PredOr {
    static uint8_t run(uint8_t a, uint8_t b) { return a | b; }
};
struct PredXor {
    static uint8_t run(uint8_t a, uint8_t b) { return a ^ b; }
};
struct PredNot {
    static uint8_t run(uint8_t a) { return a ^ 1; }
};
struct PredMov {
    static uint8_t run(uint8_t a) { return a; }
};

constexpr uint32_t one_f32 = 0x3f800000u, one_f16 = 0x3c00;

template <class T, uint32_t yes> struct Set {
    static T run(uint8_t p) { return p ? static_cast<T>(yes) : 0; }
};
template <uint32_t yes> struct SetPair {
    static uint32_t run(uint8_t low, uint8_t high) {
        return (low ? yes : 0) | (high ? yes << 16 : 0);
    }
};

template <class B, class T, B exponent, B fraction> struct Test {
    static bool finite(B a) { return (a & exponent) != exponent; }
    static bool infinite(B a) { return (a & (exponent | fraction)) == exponent; }
    static bool nan(B a) { return !finite(a) && !infinite(a); }
    static bool normal(B a) { return finite(a) && (a & exponent) != 0; }
    static bool subnormal(B a) { return (a & exponent) == 0 && (a & fraction) != 0; }

    struct Finite {
        static uint8_t run(B a) { return finite(a); }
    };
    struct Infinite {
        static uint8_t run(B a) { return infinite(a); }
    };
    struct Number {
        static uint8_t run(B a) { return !nan(a); }
    };
    struct NotANumber {
        static uint8_t run(B a) { return nan(a); }
    };
    struct Normal {
        static uint8_t run(B a) { return normal(a); }
    };
    struct Subnormal {
        static uint8_t run(B a) { return subnormal(a); }
    };

    static Handler find(const std::string& name) {
        return name == "finite"       ? elementwise<Finite>
               : name == "infinite"   ? elementwise<Infinite>
               : name == "number"     ? elementwise<Number>
               : name == "notanumber" ? elementwise<NotANumber>
               : name == "normal"     ? elementwise<Normal>
               : name == "subnormal"  ? elementwise<Subnormal>
                                      : nullptr;
    }
};
using Test32 = Test<uint32_t, float, 0x7f800000u, 0x7fffffu>;
using Test64 = Test<uint64_t, double, 0x7ffull << 52, (1ull << 52) - 1>;

} // namespace

Handler find_compare(const Key& key) {
    if (key.op == "testp") {
        return key.type == Type::f32   ? Test32::find(key.variant)
               : key.type == Type::f64 ? Test64::find(key.variant)
                                       : nullptr;
    }
    const Table* table = compare_table(key.type, key.ftz);
    bool bits = key.type == Type::b16 || key.type == Type::b32 || key.type == Type::b64;
    if (!table || (bits && key.variant != "eq" && key.variant != "ne") ||
        (key.ftz && key.type != Type::f32 && key.type != Type::f16)) {
        return nullptr;
    }
    auto found = table->find(key.variant);
    return found == table->end() ? nullptr : found->second;
}

Handler find_select(const std::string& op, Type type, Type selector) {
    uint32_t bytes = slot_size(type);
    if (op == "selp") {
        return bytes == 2   ? elementwise<Selp<uint16_t>>
               : bytes == 4 ? elementwise<Selp<uint32_t>>
               : bytes == 8 ? elementwise<Selp<uint64_t>>
                            : nullptr;
    }
    bool by_float = selector == Type::f32;
    return bytes == 2 ? by_float ? elementwise<SlctFloat<uint16_t>> : elementwise<SlctInt<uint16_t>>
           : bytes == 4
               ? by_float ? elementwise<SlctFloat<uint32_t>> : elementwise<SlctInt<uint32_t>>
           : bytes == 8
               ? by_float ? elementwise<SlctFloat<uint64_t>> : elementwise<SlctInt<uint64_t>>
               : nullptr;
}

Handler find_predicate(const std::string& op) {
    return op == "and"   ? elementwise<PredAnd>
           : op == "or"  ? elementwise<PredOr>
           : op == "xor" ? elementwise<PredXor>
           : op == "not" ? elementwise<PredNot>
           : op == "mov" ? elementwise<PredMov>
                         : nullptr;
}

Handler find_set(Type destination) {
    switch (destination) {
    case Type::u32:
    case Type::s32:
    case Type::b32:
        return elementwise<Set<uint32_t, ~0u>>;
    case Type::u16:
    case Type::s16:
        return elementwise<Set<uint16_t, 0xffff>>;
    case Type::f32:
        return elementwise<Set<uint32_t, one_f32>>;
    case Type::f16:
        return elementwise<Set<uint16_t, one_f16>>;
    default:
        return nullptr;
    }
}

Handler find_set_pair(Type destination) {
    switch (destination) {
    case Type::u32:
    case Type::s32:
        return elementwise<SetPair<0xffff>>;
    case Type::f16x2:
        return elementwise<SetPair<one_f16>>;
    default:
        return nullptr;
    }
}

} // namespace flowgpu::emu::ptx
