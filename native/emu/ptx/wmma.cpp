// wmma.load, wmma.store and wmma.mma. PTX leaves open which lane holds which elements of a
// fragment; here they follow each other, row by row, lane by lane.
#include "matrix.h"

#include <unordered_map>

namespace flowgpu::emu::ptx {

namespace {

// A and B of f16 always have eight registers, so smaller matrices are held more than once.
constexpr uint32_t f16_registers = 8;

template <uint32_t rows, uint32_t columns, uint32_t depth> struct WmmaLayout {
    static constexpr uint32_t m = rows, n = columns, k = depth;
    template <class E> static constexpr uint32_t count(uint32_t elements) {
        return std::is_same_v<E, NarrowElement<Half>> ? f16_registers
                                                      : elements / (warp_size * E::per);
    }
    template <class E> static constexpr uint32_t a_count = count<E>(m * k);
    template <class E> static constexpr uint32_t b_count = count<E>(n * k);

    static Position place(uint32_t index, uint32_t rows_of, uint32_t columns_of) {
        index %= rows_of * columns_of;
        return {index / columns_of, index % columns_of};
    }
    template <class E> static Position a(uint32_t lane, uint32_t e) {
        return place(lane * a_count<E> * E::per + e, m, k);
    }
    template <class E> static Position b(uint32_t lane, uint32_t e) {
        return place(lane * b_count<E> * E::per + e, k, n);
    }
    static Position sum(uint32_t lane, uint32_t e) {
        return place(lane * (m * n / warp_size) + e, m, n);
    }
};

using Table = std::unordered_map<std::string, Multiply>;

template <uint32_t m, uint32_t n> void add_products(Table& table) {
    using L = WmmaLayout<m, n, 16>;
    using F16 = NarrowElement<Half>;
    using Bf16 = NarrowElement<Bfloat>;
    using S8 = IntegerElement<8, true>;
    using U8 = IntegerElement<8, false>;
    std::string size = "m" + std::to_string(m) + "n" + std::to_string(n) + "k16";
    table[size + ".f32.f32"] = product<L, F16, F16, FloatSum>();
    table[size + ".f16.f16"] = product<L, F16, F16, HalfSum>();
    table[size + ".f32.f16"] = product<L, F16, F16, FloatSum, HalfSum>();
    table[size + ".f16.f32"] = product<L, F16, F16, HalfSum, FloatSum>();
    table[size + ".f32.bf16.bf16.f32"] = product<L, Bf16, Bf16, FloatSum>();
    table[size + ".s32.s8.s8.s32"] = product<L, S8, S8, IntegerSum>();
    table[size + ".s32.u8.u8.s32"] = product<L, U8, U8, IntegerSum>();
}

Table make_table() {
    Table table{{"m16n16k8.f32.tf32.tf32.f32",
                 product<WmmaLayout<16, 16, 8>, Tf32Element, Tf32Element, FloatSum>()},
                {"m8n8k4.f64.f64.f64.f64",
                 product<WmmaLayout<8, 8, 4>, DoubleElement, DoubleElement, DoubleSum>()}};
    add_products<16, 16>(table);
    add_products<32, 8>(table);
    add_products<8, 32>(table);
    return table;
}

// op: address, elements between rows (or columns); mode: column by column; count: bytes of an
// element; lists[aux]: rows, columns, then the registers. f(host, register, shift) for each.
template <class R, class F>
void for_elements(Cta& c, const Ins& i, const Mask& m, bool write, F f) {
    const std::vector<uint32_t>& list = c.m.code.lists[i.aux];
    const uint32_t rows = list[0], columns = list[1], bytes = i.count;
    const uint32_t registers = static_cast<uint32_t>(list.size()) - 2, per = sizeof(R) / bytes;
    for_whole_warps(c, m, [&](uint32_t base) {
        uint64_t start = address_of(c, i, i.op[0], base);
        uint64_t stride =
            i.op[1] == no_slot ? (i.mode ? rows : columns) : c.reg<uint32_t>(i.op[1])[base];
        // The start of each row (or column) must be aligned to what a lane takes from it.
        uint32_t align = std::min<uint32_t>(16, registers * static_cast<uint32_t>(sizeof(R)));
        for (uint32_t l = 0; l < warp_size; ++l) {
            for (uint32_t e = 0; e < registers * per; ++e) {
                uint32_t index = (l * registers * per + e) % (rows * columns);
                uint32_t row = index / columns, column = index % columns;
                uint64_t line = start + (i.mode ? column : row) * stride * bytes;
                uint64_t at = line + (i.mode ? row : column) * static_cast<uint64_t>(bytes);
                if ((line & (align - 1)) != 0) {
                    c.raise(Result::Code::misaligned_address, line, base + l);
                    return;
                }
                uint8_t* host = locate(c, i.space, at, bytes, bytes, base + l, write);
                if (!host) {
                    return;
                }
                f(host, c.reg<R>(list[2 + e / per])[base + l], e % per * bytes * 8);
                if (write && c.m.launch.log && is_device(i.space, at)) {
                    c.m.launch.log->add(at, bytes);
                }
            }
        }
    });
}

template <class R> void load_fragment(Cta& c, const Ins& i, const Mask& m) {
    for_elements<R>(c, i, m, false, [&](const uint8_t* host, R& word, uint32_t shift) {
        R value = 0;
        std::memcpy(&value, host, i.count);
        word = shift == 0 ? value : word | value << shift;
    });
}

template <class R> void store_fragment(Cta& c, const Ins& i, const Mask& m) {
    for_elements<R>(c, i, m, true, [&](uint8_t* host, R& word, uint32_t shift) {
        R value = word >> shift;
        std::memcpy(host, &value, i.count);
    });
}

} // namespace

const Multiply* find_multiply_fragment(const std::string& name) {
    static const Table table = make_table();
    auto found = table.find(name);
    return found == table.end() ? nullptr : &found->second;
}

std::optional<FragmentShape> find_fragment(const std::string& role, const std::string& size,
                                           Type type) {
    struct Size {
        const char* name;
        uint32_t m, n, k;
    };
    static constexpr Size sizes[] = {{"m16n16k16", 16, 16, 16},
                                     {"m32n8k16", 32, 8, 16},
                                     {"m8n32k16", 8, 32, 16},
                                     {"m16n16k8", 16, 16, 8},
                                     {"m8n8k4", 8, 8, 4}};
    bool factor = role == "a" || role == "b";
    for (const Size& s : sizes) {
        if (size != s.name) {
            continue;
        }
        bool narrow =
            type == Type::f16 || type == Type::bf16 || type == Type::s8 || type == Type::u8;
        bool fits = s.k == 4   ? type == Type::f64
                    : s.k == 8 ? type == (factor ? Type::tf32 : Type::f32)
                    : factor   ? narrow
                               : type == Type::f16 || type == Type::f32 || type == Type::s32;
        if (!fits) {
            return std::nullopt;
        }
        uint32_t rows = role == "b" ? s.k : s.m, columns = role == "a" ? s.k : s.n;
        uint32_t word = type == Type::f64 ? 8 : 4;
        uint32_t registers = factor && type == Type::f16
                                 ? f16_registers
                                 : rows * columns * size_of(type) / (warp_size * word);
        return FragmentShape{rows, columns, registers};
    }
    return std::nullopt;
}

Handler find_load_fragment(Type type) {
    return type == Type::f64 ? load_fragment<uint64_t> : load_fragment<uint32_t>;
}

Handler find_store_fragment(Type type) {
    return type == Type::f64 ? store_fragment<uint64_t> : store_fragment<uint32_t>;
}

} // namespace flowgpu::emu::ptx
