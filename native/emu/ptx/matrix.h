// Products of small matrices whose elements lie spread over the registers of a warp.
#pragma once

#include "float_bits.h"
#include "memory.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

// The whole warp takes part, or nobody knows what happens.
inline bool whole_warp(Cta& c, uint32_t k, uint32_t bits) {
    if (bits == ~0u) {
        return true;
    }
    c.raise(Result::Code::illegal_instruction, 0,
            k * warp_size + static_cast<uint32_t>(__builtin_ctz(bits)));
    return false;
}

// f(first lane of the warp) for every warp of the mask, until one raises a fault.
template <class F> void for_whole_warps(Cta& c, const Mask& m, F f) {
    for (uint32_t k = 0; k < c.warps && c.m.fault.code == Result::Code::ok; ++k) {
        if (m.w[k] != 0 && whole_warp(c, k, m.w[k])) {
            f(k * warp_size);
        }
    }
}

// Elements of the factors: how many a register holds, the h-th of them, and one more product.
// The order and width of the hardware's floating-point sums are not defined; here they are exact
// products summed in f64 and rounded once.
template <class F> struct NarrowElement {
    using Register = uint32_t;
    using Value = double;
    static constexpr uint32_t per = 2;
    static Value at(uint32_t word, uint32_t h) {
        return static_cast<double>(to_float(F{static_cast<uint16_t>(word >> (16 * h))}));
    }
    static double add(double sum, double a, double b) { return sum + a * b; }
};
struct Tf32Element {
    using Register = uint32_t;
    using Value = double;
    static constexpr uint32_t per = 1;
    static Value at(uint32_t word, uint32_t) {
        return static_cast<double>(bit_cast<float>(word & ~0x1fffu));
    }
    static double add(double sum, double a, double b) { return sum + a * b; }
};
struct DoubleElement {
    using Register = uint64_t;
    using Value = double;
    static constexpr uint32_t per = 1;
    static Value at(uint64_t word, uint32_t) { return bit_cast<double>(word); }
    static double add(double sum, double a, double b) { return std::fma(a, b, sum); }
};
template <uint32_t bits, bool is_signed> struct IntegerElement {
    using Register = uint32_t;
    using Value = int32_t;
    static constexpr uint32_t per = 32 / bits;
    static Value at(uint32_t word, uint32_t h) {
        uint32_t top = word << (32 - bits - bits * h);
        return is_signed ? static_cast<int32_t>(top) >> (32 - bits)
                         : static_cast<int32_t>(top >> (32 - bits));
    }
    static int64_t add(int64_t sum, int32_t a, int32_t b) { return sum + a * b; }
};
// One element is a word of 32 bits.
template <bool exclusive> struct BitElement {
    using Register = uint32_t;
    using Value = uint32_t;
    static constexpr uint32_t per = 1;
    static Value at(uint32_t word, uint32_t) { return word; }
    static int64_t add(int64_t sum, uint32_t a, uint32_t b) {
        return sum + __builtin_popcount(exclusive ? a ^ b : a & b);
    }
};

// Accumulators: what a register holds, and the value that sums are made in.
struct FloatSum {
    using Register = uint32_t;
    using Value = double;
    static constexpr uint32_t per = 1;
    static Value at(uint32_t word, uint32_t) { return static_cast<double>(bit_cast<float>(word)); }
    static uint32_t bits(double sum, bool) {
        return bit_cast<uint32_t>(canonical(static_cast<float>(sum)));
    }
};
struct HalfSum {
    using Register = uint32_t;
    using Value = double;
    static constexpr uint32_t per = 2;
    static Value at(uint32_t word, uint32_t h) { return NarrowElement<Half>::at(word, h); }
    static uint32_t bits(double sum, bool) { return narrow<Half>(sum).bits; }
};
struct DoubleSum {
    using Register = uint64_t;
    using Value = double;
    static constexpr uint32_t per = 1;
    static Value at(uint64_t word, uint32_t) { return bit_cast<double>(word); }
    static uint64_t bits(double sum, bool) { return bit_cast<uint64_t>(sum); }
};
struct IntegerSum {
    using Register = uint32_t;
    using Value = int64_t;
    static constexpr uint32_t per = 1;
    static Value at(uint32_t word, uint32_t) { return static_cast<int32_t>(word); }
    static uint32_t bits(int64_t sum, bool saturates) {
        constexpr int64_t low = INT32_MIN, high = INT32_MAX;
        return static_cast<uint32_t>(saturates ? sum < low ? low : sum > high ? high : sum : sum);
    }
};

struct Position {
    uint32_t row, column;
};

// Spreads the registers of a warp over a matrix; place(lane, element) says where each belongs.
template <class E, uint32_t count, class M, class P>
inline __attribute__((always_inline)) void gather(const Cta& c, const uint32_t* slots,
                                                  uint32_t base, M& matrix, P place) {
    for (uint32_t r = 0; r < count; ++r) {
        const auto* words = c.reg<typename E::Register>(slots[r]) + base;
        for (uint32_t h = 0; h < E::per; ++h) {
            typename E::Value values[warp_size]; // a loop of its own is vectorised
            for (uint32_t l = 0; l < warp_size; ++l) {
                values[l] = E::at(words[l], h);
            }
            for (uint32_t l = 0; l < warp_size; ++l) {
                Position at = place(l, r * E::per + h);
                matrix[at.row][at.column] = values[l];
            }
        }
    }
}

// D = A * B + C. Layout L: sizes m, n, k, registers a lane of A and B, and where element e of a
// lane lies. lists[aux]: slots of D, A, B and C; mode: whether integers saturate.
template <class L, class A, class B, class D, class C>
void multiply(Cta& c, const Ins& i, const Mask& m) {
    constexpr uint32_t a_count = L::template a_count<A>, b_count = L::template b_count<B>;
    constexpr uint32_t sums = L::m * L::n / warp_size;
    const uint32_t* d_slots = c.m.code.lists[i.aux].data();
    const uint32_t *a_slots = d_slots + sums / D::per, *b_slots = a_slots + a_count,
                   *c_slots = b_slots + b_count;
    for_whole_warps(c, m, [&](uint32_t base) {
        typename A::Value a[L::m][L::k];
        typename B::Value b[L::k][L::n];
        typename D::Value sum[L::m][L::n];
        gather<A, a_count>(c, a_slots, base, a,
                           [](auto l, auto e) { return L::template a<A>(l, e); });
        gather<B, b_count>(c, b_slots, base, b,
                           [](auto l, auto e) { return L::template b<B>(l, e); });
        gather<C, sums / C::per>(c, c_slots, base, sum,
                                 [](auto l, auto e) { return L::sum(l, e); });
        for (uint32_t row = 0; row < L::m; ++row) {
            for (uint32_t x = 0; x < L::k; ++x) {
                for (uint32_t column = 0; column < L::n; ++column) {
                    sum[row][column] = A::add(sum[row][column], a[row][x], b[x][column]);
                }
            }
        }
        for (uint32_t r = 0; r < sums / D::per; ++r) {
            auto* words = c.reg<typename D::Register>(d_slots[r]) + base;
            for (uint32_t l = 0; l < warp_size; ++l) {
                words[l] = 0;
                for (uint32_t h = 0; h < D::per; ++h) {
                    Position at = L::sum(l, r * D::per + h);
                    words[l] |= D::bits(sum[at.row][at.column], i.mode != 0) << (16 * h);
                }
            }
        }
    });
}

// What the lowering must know of a product: registers a lane, and whether they have 64 bits.
template <class L, class A, class B, class D, class C = D> constexpr Multiply product() {
    constexpr uint32_t sums = L::m * L::n / warp_size;
    return {multiply<L, A, B, D, C>,      sums / D::per, L::template a_count<A>,
            L::template b_count<B>,       sums / C::per, sizeof(typename A::Register) == 8,
            std::is_same_v<D, IntegerSum>};
}

} // namespace flowgpu::emu::ptx
