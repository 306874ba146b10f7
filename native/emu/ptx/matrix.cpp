// ldmatrix and mma.sync with f32 accumulators. The order and width of the hardware's sums are not
// defined; here they are exact products summed in f64 and rounded once.
#include "float_bits.h"
#include "memory.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

// The whole warp takes part, or nobody knows what happens.
bool whole_warp(Cta& c, uint32_t k, uint32_t bits) {
    if (bits == ~0u) {
        return true;
    }
    c.raise(Result::Code::illegal_instruction, 0,
            k * warp_size + static_cast<uint32_t>(__builtin_ctz(bits)));
    return false;
}

// Lanes 8j to 8j + 7 hold the addresses of the rows of matrix j; lists[aux] are the destinations.
template <uint32_t count, bool transposed> void load_matrix(Cta& c, const Ins& i, const Mask& m) {
    const std::vector<uint32_t>& registers = c.m.code.lists[i.aux];
    for (uint32_t k = 0; k < c.warps; ++k) {
        if (m.w[k] == 0) {
            continue;
        }
        if (!whole_warp(c, k, m.w[k])) {
            return;
        }
        uint32_t base = k * warp_size;
        for (uint32_t j = 0; j < count; ++j) {
            uint16_t matrix[8][8];
            for (uint32_t row = 0; row < 8; ++row) {
                uint32_t lane = base + 8 * j + row;
                const uint8_t* host = locate(c, i.space, address_of(c, i, i.op[0], lane),
                                             sizeof matrix[row], sizeof matrix[row], lane, false);
                if (!host) {
                    return;
                }
                std::memcpy(matrix[row], host, sizeof matrix[row]);
            }
            uint32_t* d = c.reg<uint32_t>(registers[j]) + base;
            for (uint32_t l = 0; l < warp_size; ++l) {
                uint32_t major = l / 4, minor = l % 4 * 2;
                uint32_t low = transposed ? matrix[minor][major] : matrix[major][minor];
                uint32_t high = transposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
                d[l] = high << 16 | low;
            }
        }
    }
}

struct Tf32 {
    uint32_t bits;
};
float to_float(Tf32 value) {
    return bit_cast<float>(value.bits & ~0x1fffu);
}

template <class F> constexpr uint32_t per_register = std::is_same_v<F, Tf32> ? 1 : 2;

template <class F> double element(uint32_t bits, uint32_t h) {
    if constexpr (per_register<F> == 1) {
        return static_cast<double>(to_float(F{bits}));
    } else {
        return static_cast<double>(to_float(F{static_cast<uint16_t>(bits >> (16 * h))}));
    }
}

// lists[aux]: four of d, then a, then b, then four of c.
template <class F, uint32_t depth> void multiply(Cta& c, const Ins& i, const Mask& m) {
    constexpr uint32_t per = per_register<F>, b_count = depth / (4 * per), a_count = 2 * b_count;
    const uint32_t* d_slots = c.m.code.lists[i.aux].data();
    const uint32_t *a_slots = d_slots + 4, *b_slots = a_slots + a_count,
                   *c_slots = b_slots + b_count;
    for (uint32_t k = 0; k < c.warps; ++k) {
        if (m.w[k] == 0) {
            continue;
        }
        if (!whole_warp(c, k, m.w[k])) {
            return;
        }
        double a[16][depth], b[depth][8];
        uint32_t base = k * warp_size;
        for (uint32_t l = 0; l < warp_size; ++l) {
            uint32_t group = l / 4, place = l % 4 * per;
            for (uint32_t h = 0; h < per; ++h) {
                for (uint32_t r = 0; r < a_count; ++r) {
                    a[group + 8 * (r & 1)][place + h + 4 * per * (r >> 1)] =
                        element<F>(c.reg<uint32_t>(a_slots[r])[base + l], h);
                }
                for (uint32_t r = 0; r < b_count; ++r) {
                    b[place + h + 4 * per * r][group] =
                        element<F>(c.reg<uint32_t>(b_slots[r])[base + l], h);
                }
            }
        }
        float sums[4][warp_size]; // the destinations may be operands
        for (uint32_t l = 0; l < warp_size; ++l) {
            for (uint32_t r = 0; r < 4; ++r) {
                uint32_t row = l / 4 + 8 * (r >> 1), column = l % 4 * 2 + (r & 1);
                double sum = static_cast<double>(c.reg<float>(c_slots[r])[base + l]);
                for (uint32_t x = 0; x < depth; ++x) {
                    sum += a[row][x] * b[x][column];
                }
                sums[r][l] = canonical(static_cast<float>(sum));
            }
        }
        for (uint32_t r = 0; r < 4; ++r) {
            std::memcpy(c.reg<float>(d_slots[r]) + base, sums[r], sizeof sums[r]);
        }
    }
}

} // namespace

Handler find_load_matrix(uint32_t count, bool transposed) {
    switch (count) {
    case 1:
        return transposed ? load_matrix<1, true> : load_matrix<1, false>;
    case 2:
        return transposed ? load_matrix<2, true> : load_matrix<2, false>;
    case 4:
        return transposed ? load_matrix<4, true> : load_matrix<4, false>;
    default:
        return nullptr;
    }
}

Handler find_multiply_matrix(Type elements, uint32_t k) {
    switch (elements) {
    case Type::f16:
        return k == 16 ? multiply<Half, 16> : k == 8 ? multiply<Half, 8> : nullptr;
    case Type::bf16:
        return k == 16 ? multiply<Bfloat, 16> : k == 8 ? multiply<Bfloat, 8> : nullptr;
    case Type::tf32:
        return k == 8 ? multiply<Tf32, 8> : k == 4 ? multiply<Tf32, 4> : nullptr;
    default:
        return nullptr;
    }
}

} // namespace flowgpu::emu::ptx
