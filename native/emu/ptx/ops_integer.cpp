// Integer, logic and bit-field instructions.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <unordered_map>

#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

template <class T> using U = std::make_unsigned_t<T>;
template <class T> constexpr int bits_of = static_cast<int>(sizeof(T) * 8);

template <class T> struct Wider;
template <> struct Wider<uint16_t> {
    using type = uint32_t;
};
template <> struct Wider<int16_t> {
    using type = int32_t;
};
template <> struct Wider<uint32_t> {
    using type = uint64_t;
};
template <> struct Wider<int32_t> {
    using type = int64_t;
};
__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;
template <> struct Wider<uint64_t> {
    using type = Uint128;
};
template <> struct Wider<int64_t> {
    using type = Int128;
};
template <class T> using W = typename Wider<T>::type;

template <class T> T wrap(U<T> value) {
    return static_cast<T>(value);
}
// 16-bit operands would be promoted to int, whose product can overflow.
template <class T> using Calc = std::conditional_t<sizeof(T) == 2, uint32_t, U<T>>;
template <class T> Calc<T> calc(T value) {
    return static_cast<Calc<T>>(value);
}

template <class T> struct Add {
    static T run(T a, T b) { return static_cast<T>(calc(a) + calc(b)); }
};
template <class T> struct Sub {
    static T run(T a, T b) { return static_cast<T>(calc(a) - calc(b)); }
};
template <class T> T clamp_to(W<T> value) {
    constexpr W<T> low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
    return static_cast<T>(value < low ? low : value > high ? high : value);
}
template <class T> struct AddSat {
    static T run(T a, T b) { return clamp_to<T>(W<T>(a) + b); }
};
template <class T> struct SubSat {
    static T run(T a, T b) { return clamp_to<T>(W<T>(a) - b); }
};
template <class T> struct MulLo {
    static T run(T a, T b) { return static_cast<T>(calc(a) * calc(b)); }
};
template <class T> struct MulHi {
    static T run(T a, T b) { return static_cast<T>((W<T>(a) * b) >> bits_of<T>); }
};
template <class T> struct MulWide {
    static W<T> run(T a, T b) { return W<T>(a) * b; }
};
template <class T> struct MadLo {
    static T run(T a, T b, T c) { return static_cast<T>(calc(a) * calc(b) + calc(c)); }
};
template <class T> struct MadHi {
    static T run(T a, T b, T c) { return Add<T>::run(MulHi<T>::run(a, b), c); }
};
template <class High> struct MadHiSat {
    static int32_t run(int32_t a, int32_t b, int32_t c) {
        return clamp_to<int32_t>(static_cast<int64_t>(High::run(a, b)) + c);
    }
};
template <class T> struct MadWide {
    static W<T> run(T a, T b, W<T> c) {
        return static_cast<W<T>>(static_cast<U<W<T>>>(W<T>(a) * b) + static_cast<U<W<T>>>(c));
    }
};
template <class T> int64_t low24(T a) {
    if constexpr (std::is_signed_v<T>) {
        return static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8;
    } else {
        return a & 0xffffff;
    }
}
template <class T> struct Mul24Lo {
    static T run(T a, T b) { return static_cast<T>(low24(a) * low24(b)); }
};
template <class T> struct Mul24Hi {
    static T run(T a, T b) { return static_cast<T>((low24(a) * low24(b)) >> 16); }
};
template <class T> struct Mad24Lo {
    static T run(T a, T b, T c) { return Add<T>::run(Mul24Lo<T>::run(a, b), c); }
};
template <class T> struct Mad24Hi {
    static T run(T a, T b, T c) { return Add<T>::run(Mul24Hi<T>::run(a, b), c); }
};
template <class T> struct Sad {
    static T run(T a, T b, T c) {
        return static_cast<T>(calc(c) + (a < b ? calc(b) - calc(a) : calc(a) - calc(b)));
    }
};
// The ISA leaves division by zero open. Compiled code gives all ones and, for the remainder, the
// dividend; the host must not trap.
template <class T> struct Div {
    static T run(T a, T b) {
        if (b == 0) {
            return static_cast<T>(-1);
        }
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) {
            return static_cast<T>(0 - calc(a));
        }
        return static_cast<T>(a / b);
    }
};
template <class T> struct Rem {
    static T run(T a, T b) {
        if (b == 0) {
            return a;
        }
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) {
            return 0;
        }
        return static_cast<T>(a % b);
    }
};
template <class T> struct Min {
    static T run(T a, T b) { return a < b ? a : b; }
};
template <class T> struct Max {
    static T run(T a, T b) { return a < b ? b : a; }
};
template <class T> struct Abs {
    static T run(T a) { return a < 0 ? static_cast<T>(0 - calc(a)) : a; }
};
template <class T> struct Neg {
    static T run(T a) { return static_cast<T>(0 - calc(a)); }
};
template <class T> struct And {
    static T run(T a, T b) { return a & b; }
};
template <class T> struct Or {
    static T run(T a, T b) { return a | b; }
};
template <class T> struct Xor {
    static T run(T a, T b) { return a ^ b; }
};
template <class T> struct Not {
    static T run(T a) { return static_cast<T>(~a); }
};
template <class T> struct Cnot {
    static T run(T a) { return a == 0; }
};
template <class T> struct Shl {
    static T run(T a, uint32_t n) { return static_cast<T>(n >= bits_of<T> ? 0 : calc(a) << n); }
};
template <class T> struct Shr {
    static T run(T a, uint32_t n) {
        if constexpr (std::is_signed_v<T>) {
            return static_cast<T>(a >> (n >= bits_of<T> ? bits_of<T> - 1 : n));
        } else {
            return static_cast<T>(n >= bits_of<T> ? 0 : a >> n);
        }
    }
};
template <class T> struct Popc {
    static uint32_t run(T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
};
template <class T> struct Clz {
    static uint32_t run(T a) {
        return a == 0 ? bits_of<T> : static_cast<uint32_t>(__builtin_clzll(a)) - (64 - bits_of<T>);
    }
};
template <class T, bool shift> struct Bfind {
    static uint32_t run(T a) {
        U<T> v = static_cast<U<T>>(std::is_signed_v<T> && a < 0 ? ~a : a);
        if (v == 0) {
            return ~0u;
        }
        uint32_t leading = Clz<U<T>>::run(v);
        return shift ? leading : bits_of<T> - 1 - leading;
    }
};
template <class T> struct Brev {
    static T run(T a) {
        T r = 0;
        for (int k = 0; k < bits_of<T>; ++k) {
            r = static_cast<T>((r << 1) | ((a >> k) & 1));
        }
        return r;
    }
};
template <class T> struct Bfe {
    static T run(T a, uint32_t b, uint32_t c) {
        uint32_t pos = b & 0xff, len = c & 0xff;
        constexpr uint32_t msb = bits_of<T> - 1;
        if (len == 0) {
            return 0;
        }
        bool sign = std::is_signed_v<T> && ((a >> std::min(pos + len - 1, msb)) & 1) != 0;
        U<T> field = pos > msb ? 0 : static_cast<U<T>>(a) >> pos;
        uint32_t have = pos > msb ? 0 : std::min(len, bits_of<T> - pos);
        U<T> keep = have >= bits_of<T> ? static_cast<U<T>>(~U<T>(0))
                                       : static_cast<U<T>>((U<T>(1) << have) - 1);
        return static_cast<T>((field & keep) | (sign ? static_cast<U<T>>(~keep) : 0));
    }
};
template <class T> struct Bfi {
    static T run(T a, T b, uint32_t c, uint32_t d) {
        uint32_t pos = c & 0xff, len = d & 0xff;
        if (pos >= bits_of<T> || len == 0) {
            return b;
        }
        T ones = len >= bits_of<T> ? static_cast<T>(~T(0)) : static_cast<T>((T(1) << len) - 1);
        T keep = static_cast<T>(ones << pos);
        return static_cast<T>((b & ~keep) | ((a << pos) & keep));
    }
};
struct Lop3 {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c, uint32_t lut) {
        uint32_t r = 0;
        for (uint32_t k = 0; k < 8; ++k) {
            uint32_t term = (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
            r |= term & (0 - ((lut >> k) & 1));
        }
        return r;
    }
};
template <bool left, bool clamp> struct Shf {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t n = clamp ? std::min(c, 32u) : c & 31;
        uint64_t pair = (static_cast<uint64_t>(b) << 32) | a;
        return static_cast<uint32_t>(left ? (pair << n) >> 32 : pair >> n);
    }
};
uint32_t byte_of(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t pair = (static_cast<uint64_t>(b) << 32) | a;
    uint32_t byte = static_cast<uint32_t>(pair >> (8 * (selector & 7))) & 0xff;
    return selector & 8 ? (byte & 0x80 ? 0xff : 0) : byte;
}
struct Prmt {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        return byte_of(a, b, c & 15) | byte_of(a, b, (c >> 4) & 15) << 8 |
               byte_of(a, b, (c >> 8) & 15) << 16 | byte_of(a, b, (c >> 12) & 15) << 24;
    }
};
enum class Permute { f4e, b4e, rc8, ecl, ecr, rc16 };
template <Permute mode> struct PrmtMode {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        constexpr uint32_t table[6][4] = {
            {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
            {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
            {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
        return Prmt::run(a, b, table[static_cast<int>(mode)][c & 3]);
    }
};
template <class A, class B> struct Dp4a {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        for (int k = 0; k < 32; k += 8) {
            c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> k)) *
                                       static_cast<int32_t>(static_cast<B>(b >> k)));
        }
        return c;
    }
};

// Two 16-bit halves times two of the four bytes.
template <class A, class B, bool high> struct Dp2a {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        for (int k = 0; k < 2; ++k) {
            c += static_cast<uint32_t>(
                static_cast<int32_t>(static_cast<A>(a >> (16 * k))) *
                static_cast<int32_t>(static_cast<B>(b >> (8 * k + 16 * high))));
        }
        return c;
    }
};
// Position of the n-th set bit from `base` on, upwards or downwards.
struct Fns {
    static uint32_t run(uint32_t mask, uint32_t base, int32_t n) {
        auto set = [&](int64_t at) { return at >= 0 && at < 32 && (mask >> at & 1) != 0; };
        if (n == 0) {
            return set(base) ? base : ~0u;
        }
        int64_t left = n > 0 ? n : -static_cast<int64_t>(n);
        for (int64_t at = base; at >= 0 && at < 32; at += n > 0 ? 1 : -1) {
            left -= set(at);
            if (left == 0) {
                return static_cast<uint32_t>(at);
            }
        }
        return ~0u;
    }
};
template <bool clamp> struct Bmsk {
    static uint32_t run(uint32_t a, uint32_t b) {
        uint64_t from = clamp ? std::min(a, 32u) : a & 31,
                 width = clamp ? std::min(b, 32u) : b & 31;
        return static_cast<uint32_t>(((1ull << width) - 1) << from);
    }
};
template <class T, bool clamp> struct Szext {
    static T run(T a, uint32_t b) {
        uint32_t width = clamp ? std::min(b, 32u) : b & 31;
        return width == 0 ? 0
                          : static_cast<T>(static_cast<T>(calc(a) << (32 - width)) >> (32 - width));
    }
};
// |a - b| of each 8-bit or 16-bit part; with `sums`, the sum of all parts and c.
template <class T, bool sums> struct AbsoluteDifferences {
    static uint32_t run(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t sum = c, packed = 0;
        for (int at = 0; at < 32; at += bits_of<T>) {
            int32_t x = static_cast<T>(a >> at), y = static_cast<T>(b >> at);
            uint32_t difference = static_cast<uint32_t>(x > y ? x - y : y - x);
            sum += difference;
            packed |= difference << at;
        }
        return sums ? sum : packed;
    }
};

// Extended precision: the carry lives in a hidden register, op[5].
template <class T, bool minus, bool in, bool out>
void carry_add(Cta& c, const Ins& i, const Mask& m) {
    T* d = c.reg<T>(i.op[0]);
    const T *a = c.reg<T>(i.op[1]), *b = c.reg<T>(i.op[2]);
    uint32_t* carry = c.reg<uint32_t>(i.op[5]);
    for_lanes(c, m, [=](uint32_t l) {
        // Subtraction is addition of the complement; the flag then counts as "no borrow", inverted.
        W<T> extra = in ? (minus ? 1 - carry[l] : carry[l]) : (minus ? 1 : 0);
        W<T> sum = static_cast<W<T>>(a[l]) + static_cast<T>(minus ? ~b[l] : b[l]) + extra;
        if (out) {
            uint32_t high = static_cast<uint32_t>(sum >> bits_of<T>) & 1;
            carry[l] = minus ? 1 - high : high;
        }
        d[l] = static_cast<T>(sum);
    });
}
template <class T, class S, bool high, bool in, bool out>
void carry_mad(Cta& c, const Ins& i, const Mask& m) {
    T* d = c.reg<T>(i.op[0]);
    const T *a = c.reg<T>(i.op[1]), *b = c.reg<T>(i.op[2]), *e = c.reg<T>(i.op[3]);
    uint32_t* carry = c.reg<uint32_t>(i.op[5]);
    for_lanes(c, m, [=](uint32_t l) {
        W<S> product = static_cast<W<S>>(static_cast<S>(a[l])) * static_cast<S>(b[l]);
        T half = static_cast<T>(high ? product >> bits_of<T> : product);
        W<T> sum = static_cast<W<T>>(half) + e[l] + (in ? carry[l] : 0);
        if (out) {
            carry[l] = static_cast<uint32_t>(sum >> bits_of<T>) & 1;
        }
        d[l] = static_cast<T>(sum);
    });
}

using Table = std::unordered_map<std::string, Handler>;

template <class T, class S> void add_carries(Table& t) {
    t["add.cc"] = carry_add<T, false, false, true>;
    t["addc"] = carry_add<T, false, true, false>;
    t["addc.cc"] = carry_add<T, false, true, true>;
    t["sub.cc"] = carry_add<T, true, false, true>;
    t["subc"] = carry_add<T, true, true, false>;
    t["subc.cc"] = carry_add<T, true, true, true>;
    t["mad.lo.cc"] = carry_mad<T, S, false, false, true>;
    t["mad.hi.cc"] = carry_mad<T, S, true, false, true>;
    t["madc.lo"] = carry_mad<T, S, false, true, false>;
    t["madc.hi"] = carry_mad<T, S, true, true, false>;
    t["madc.lo.cc"] = carry_mad<T, S, false, true, true>;
    t["madc.hi.cc"] = carry_mad<T, S, true, true, true>;
}

template <class T> Table numbers() {
    Table t{{"add", elementwise<Add<T>>},      {"sub", elementwise<Sub<T>>},
            {"mul.lo", elementwise<MulLo<T>>}, {"mul.hi", elementwise<MulHi<T>>},
            {"mad.lo", elementwise<MadLo<T>>}, {"mad.hi", elementwise<MadHi<T>>},
            {"sad", elementwise<Sad<T>>},      {"div", elementwise<Div<T>>},
            {"rem", elementwise<Rem<T>>},      {"min", elementwise<Min<T>>},
            {"max", elementwise<Max<T>>},      {"shr", elementwise<Shr<T>>}};
    if constexpr (sizeof(T) < 8) {
        t["mul.wide"] = elementwise<MulWide<T>>;
        t["mad.wide"] = elementwise<MadWide<T>>;
    }
    if constexpr (sizeof(T) >= 4) {
        t["bfind"] = elementwise<Bfind<T, false>>;
        t["bfind.shiftamt"] = elementwise<Bfind<T, true>>;
        t["bfe"] = elementwise<Bfe<T>>;
        add_carries<U<T>, T>(t);
    }
    if constexpr (sizeof(T) == 4) {
        t["mul24.lo"] = elementwise<Mul24Lo<T>>;
        t["mul24.hi"] = elementwise<Mul24Hi<T>>;
        t["mad24.lo"] = elementwise<Mad24Lo<T>>;
        t["mad24.hi"] = elementwise<Mad24Hi<T>>;
        t["szext.clamp"] = elementwise<Szext<T, true>>;
        t["szext.wrap"] = elementwise<Szext<T, false>>;
    }
    if constexpr (std::is_signed_v<T>) {
        t["abs"] = elementwise<Abs<T>>;
        t["neg"] = elementwise<Neg<T>>;
    }
    return t;
}

template <class A, class B> void add_dots(Table& t, const std::string& types) {
    t["dp2a.lo." + types] = elementwise<Dp2a<A, B, false>>;
    t["dp2a.hi." + types] = elementwise<Dp2a<A, B, true>>;
}
template <class Byte, class Word> void add_differences(Table& t, const std::string& types) {
    t["vabsdiff4." + types] = elementwise<AbsoluteDifferences<Byte, false>>;
    t["vabsdiff4." + types + ".add"] = elementwise<AbsoluteDifferences<Byte, true>>;
    t["vabsdiff2." + types] = elementwise<AbsoluteDifferences<Word, false>>;
    t["vabsdiff2." + types + ".add"] = elementwise<AbsoluteDifferences<Word, true>>;
}

template <class T> Table bits() {
    Table t{{"and", elementwise<And<T>>},   {"or", elementwise<Or<T>>},
            {"xor", elementwise<Xor<T>>},   {"not", elementwise<Not<T>>},
            {"cnot", elementwise<Cnot<T>>}, {"shl", elementwise<Shl<T>>},
            {"shr", elementwise<Shr<T>>}};
    if constexpr (sizeof(T) >= 4) {
        t["popc"] = elementwise<Popc<T>>;
        t["clz"] = elementwise<Clz<T>>;
        t["brev"] = elementwise<Brev<T>>;
        t["bfi"] = elementwise<Bfi<T>>;
    }
    if constexpr (sizeof(T) == 4) {
        t["lop3"] = elementwise<Lop3>;
        t["shf.l.clamp"] = elementwise<Shf<true, true>>;
        t["shf.l.wrap"] = elementwise<Shf<true, false>>;
        t["shf.r.clamp"] = elementwise<Shf<false, true>>;
        t["shf.r.wrap"] = elementwise<Shf<false, false>>;
        t["prmt"] = elementwise<Prmt>;
        t["prmt.f4e"] = elementwise<PrmtMode<Permute::f4e>>;
        t["prmt.b4e"] = elementwise<PrmtMode<Permute::b4e>>;
        t["prmt.rc8"] = elementwise<PrmtMode<Permute::rc8>>;
        t["prmt.ecl"] = elementwise<PrmtMode<Permute::ecl>>;
        t["prmt.ecr"] = elementwise<PrmtMode<Permute::ecr>>;
        t["prmt.rc16"] = elementwise<PrmtMode<Permute::rc16>>;
        t["fns"] = elementwise<Fns>;
        t["bmsk.clamp"] = elementwise<Bmsk<true>>;
        t["bmsk.wrap"] = elementwise<Bmsk<false>>;
        add_dots<uint16_t, uint8_t>(t, "u32.u32");
        add_dots<uint16_t, int8_t>(t, "u32.s32");
        add_dots<int16_t, uint8_t>(t, "s32.u32");
        add_dots<int16_t, int8_t>(t, "s32.s32");
        add_differences<uint8_t, uint16_t>(t, "u32.u32.u32");
        add_differences<int8_t, int16_t>(t, "u32.s32.s32");
        t["dp4a.u32.u32"] = elementwise<Dp4a<uint8_t, uint8_t>>;
        t["dp4a.u32.s32"] = elementwise<Dp4a<uint8_t, int8_t>>;
        t["dp4a.s32.u32"] = elementwise<Dp4a<int8_t, uint8_t>>;
        t["dp4a.s32.s32"] = elementwise<Dp4a<int8_t, int8_t>>;
    }
    return t;
}

const Table* table_of(Type type) {
    static const Table u16 = numbers<uint16_t>(), s16 = numbers<int16_t>(),
                       u32 = numbers<uint32_t>(), s32 = numbers<int32_t>(),
                       u64 = numbers<uint64_t>(), s64 = numbers<int64_t>(), b16 = bits<uint16_t>(),
                       b32 = bits<uint32_t>(), b64 = bits<uint64_t>();
    switch (type) {
    case Type::u16:
        return &u16;
    case Type::s16:
        return &s16;
    case Type::u32:
        return &u32;
    case Type::s32:
        return &s32;
    case Type::u64:
        return &u64;
    case Type::s64:
        return &s64;
    case Type::b16:
        return &b16;
    case Type::b32:
        return &b32;
    case Type::b64:
        return &b64;
    default:
        return nullptr;
    }
}

} // namespace

Handler find_integer(const Key& key) {
    const Table* table = table_of(key.type);
    if (!table || key.round != Round::none || key.ftz || key.nan || key.relu) {
        return nullptr;
    }
    std::string name = key.variant.empty() ? key.op : key.op + "." + key.variant;
    if (key.sat) {
        if (key.type != Type::s32) {
            return nullptr;
        }
        return name == "add"        ? elementwise<AddSat<int32_t>>
               : name == "sub"      ? elementwise<SubSat<int32_t>>
               : name == "mad.hi"   ? elementwise<MadHiSat<MulHi<int32_t>>>
               : name == "mad24.hi" ? elementwise<MadHiSat<Mul24Hi<int32_t>>>
                                    : nullptr;
    }
    auto found = table->find(name);
    return found == table->end() ? nullptr : found->second;
}

} // namespace flowgpu::emu::ptx
