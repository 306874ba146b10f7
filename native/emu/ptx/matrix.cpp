// ldmatrix, movmatrix and mma.sync.
#include "matrix.h"

#include <unordered_map>

namespace flowgpu::emu::ptx {

namespace {

// Lanes 8j to 8j + 7 hold the addresses of the rows of matrix j; lists[aux] are the destinations.
template <uint32_t count, bool transposed> void load_matrix(Cta& c, const Ins& i, const Mask& m) {
    const std::vector<uint32_t>& registers = c.m.code.lists[i.aux];
    for_whole_warps(c, m, [&](uint32_t base) {
        uint16_t matrix[count][8][8];
        for (uint32_t j = 0; j < count; ++j) {
            for (uint32_t row = 0; row < 8; ++row) {
                constexpr uint32_t bytes = sizeof matrix[j][row];
                uint32_t lane = base + 8 * j + row;
                const uint8_t* host =
                    locate(c, i.space, address_of(c, i, i.op[0], lane), bytes, bytes, lane, false);
                if (!host) {
                    return;
                }
                std::memcpy(matrix[j][row], host, bytes);
            }
        }
        for (uint32_t j = 0; j < count; ++j) {
            uint32_t* d = c.reg<uint32_t>(registers[j]) + base;
            for (uint32_t l = 0; l < warp_size; ++l) {
                uint32_t major = l / 4, minor = l % 4 * 2;
                uint32_t low = transposed ? matrix[j][minor][major] : matrix[j][major][minor];
                uint32_t high =
                    transposed ? matrix[j][minor + 1][major] : matrix[j][major][minor + 1];
                d[l] = high << 16 | low;
            }
        }
    });
}

// op: d, a. Each lane holds two neighbours of a row of an 8 by 8 matrix of 16 bits.
void transpose_matrix(Cta& c, const Ins& i, const Mask& m) {
    for_whole_warps(c, m, [&](uint32_t base) {
        const uint32_t* a = c.reg<uint32_t>(i.op[1]) + base;
        uint16_t matrix[8][8];
        for (uint32_t l = 0; l < warp_size; ++l) {
            matrix[l / 4][l % 4 * 2] = static_cast<uint16_t>(a[l]);
            matrix[l / 4][l % 4 * 2 + 1] = static_cast<uint16_t>(a[l] >> 16);
        }
        uint32_t* d = c.reg<uint32_t>(i.op[0]) + base;
        for (uint32_t l = 0; l < warp_size; ++l) {
            uint32_t low = matrix[l % 4 * 2][l / 4], high = matrix[l % 4 * 2 + 1][l / 4];
            d[l] = high << 16 | low;
        }
    });
}

// The fragments of mma.sync: groups of four lanes hold a row of A and of the sums, a column of B.
template <uint32_t rows, uint32_t depth> struct MmaLayout {
    static constexpr uint32_t m = rows, n = 8, k = depth;
    template <class E> static constexpr uint32_t a_count = m * k / (warp_size * E::per);
    template <class E> static constexpr uint32_t b_count = n * k / (warp_size * E::per);

    template <class E> static Position a(uint32_t lane, uint32_t e) {
        uint32_t r = e / E::per, half = m == 16 ? r & 1 : 0, chunk = m == 16 ? r >> 1 : r;
        return {lane / 4 + 8 * half, (lane % 4 + 4 * chunk) * E::per + e % E::per};
    }
    template <class E> static Position b(uint32_t lane, uint32_t e) {
        return {(lane % 4 + 4 * (e / E::per)) * E::per + e % E::per, lane / 4};
    }
    static Position sum(uint32_t lane, uint32_t e) {
        return {lane / 4 + 8 * (e >> 1), lane % 4 * 2 + (e & 1)};
    }
};

using Table = std::unordered_map<std::string, Multiply>;

template <uint32_t m, uint32_t k, uint32_t bits>
void add_integers(Table& table, const std::string& size) {
    using S = IntegerElement<bits, true>;
    using U = IntegerElement<bits, false>;
    using L = MmaLayout<m, k>;
    std::string s = "s" + std::to_string(bits), u = "u" + std::to_string(bits);
    table[size + ".s32." + s + "." + s + ".s32"] = product<L, S, S, IntegerSum>();
    table[size + ".s32." + s + "." + u + ".s32"] = product<L, S, U, IntegerSum>();
    table[size + ".s32." + u + "." + s + ".s32"] = product<L, U, S, IntegerSum>();
    table[size + ".s32." + u + "." + u + ".s32"] = product<L, U, U, IntegerSum>();
}

template <uint32_t m, uint32_t k> void add_bits(Table& table, const std::string& size) {
    using L = MmaLayout<m, k / 32>; // in words
    using Xor = BitElement<true>;
    using And = BitElement<false>;
    table[size + ".s32.b1.b1.s32.xor.popc"] = product<L, Xor, Xor, IntegerSum>();
    table[size + ".s32.b1.b1.s32.and.popc"] = product<L, And, And, IntegerSum>();
}

Table make_table() {
    using F16 = NarrowElement<Half>;
    using Bf16 = NarrowElement<Bfloat>;
    using Tf32 = Tf32Element;
    Table table{{"m16n8k16.f32.f16.f16.f32", product<MmaLayout<16, 16>, F16, F16, FloatSum>()},
                {"m16n8k16.f16.f16.f16.f16", product<MmaLayout<16, 16>, F16, F16, HalfSum>()},
                {"m16n8k16.f32.bf16.bf16.f32", product<MmaLayout<16, 16>, Bf16, Bf16, FloatSum>()},
                {"m16n8k8.f32.f16.f16.f32", product<MmaLayout<16, 8>, F16, F16, FloatSum>()},
                {"m16n8k8.f16.f16.f16.f16", product<MmaLayout<16, 8>, F16, F16, HalfSum>()},
                {"m16n8k8.f32.bf16.bf16.f32", product<MmaLayout<16, 8>, Bf16, Bf16, FloatSum>()},
                {"m16n8k8.f32.tf32.tf32.f32", product<MmaLayout<16, 8>, Tf32, Tf32, FloatSum>()},
                {"m16n8k4.f32.tf32.tf32.f32", product<MmaLayout<16, 4>, Tf32, Tf32, FloatSum>()},
                {"m8n8k4.f64.f64.f64.f64",
                 product<MmaLayout<8, 4>, DoubleElement, DoubleElement, DoubleSum>()}};
    add_integers<8, 16, 8>(table, "m8n8k16");
    add_integers<16, 16, 8>(table, "m16n8k16");
    add_integers<16, 32, 8>(table, "m16n8k32");
    add_integers<8, 32, 4>(table, "m8n8k32");
    add_integers<16, 32, 4>(table, "m16n8k32");
    add_integers<16, 64, 4>(table, "m16n8k64");
    add_bits<8, 128>(table, "m8n8k128");
    add_bits<16, 128>(table, "m16n8k128");
    add_bits<16, 256>(table, "m16n8k256");
    return table;
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

Handler find_transpose_matrix() {
    return transpose_matrix;
}

const Multiply* find_multiply_matrix(const std::string& name) {
    static const Table table = make_table();
    auto found = table.find(name);
    return found == table.end() ? nullptr : &found->second;
}

} // namespace flowgpu::emu::ptx
