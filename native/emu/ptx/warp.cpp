// Operations across the lanes of a warp. The scheduler calls them once every lane that the member
// mask (op[5]) names has come; lanes of one warp with different masks are separate groups.
#include <algorithm>
#include <unordered_map>

#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

// f(base lane of the warp, lanes of the group)
template <class F> void for_groups(Cta& c, const Ins& i, const Mask& m, F f) {
    const uint32_t* members = c.reg<uint32_t>(i.op[5]);
    for (uint32_t k = 0; k < c.warps; ++k) {
        uint32_t base = k * warp_size;
        for (uint32_t rest = m.w[k]; rest != 0;) {
            uint32_t named = members[base + static_cast<uint32_t>(__builtin_ctz(rest))], group = 0;
            for (uint32_t bits = rest; bits != 0; bits &= bits - 1) {
                uint32_t l = static_cast<uint32_t>(__builtin_ctz(bits));
                group |= static_cast<uint32_t>(members[base + l] == named) << l;
            }
            rest &= ~group;
            f(base, group);
        }
    }
}

template <class F> void for_bits(uint32_t bits, F f) {
    for (; bits != 0; bits &= bits - 1) {
        f(static_cast<uint32_t>(__builtin_ctz(bits)));
    }
}

enum class Shuffle { up, down, bfly, idx };

// op: d, p, a, b, c
template <Shuffle mode> void shuffle(Cta& c, const Ins& i, const Mask& m) {
    uint32_t* d = c.reg<uint32_t>(i.op[0]);
    uint8_t* p = c.reg<uint8_t>(i.op[1]);
    const uint32_t *a = c.reg<uint32_t>(i.op[2]), *b = c.reg<uint32_t>(i.op[3]),
                   *clamp = c.reg<uint32_t>(i.op[4]);
    for (uint32_t k = 0; k < c.warps; ++k) {
        if (m.w[k] == 0) {
            continue;
        }
        uint32_t base = k * warp_size, values[warp_size];
        std::memcpy(values, a + base, sizeof values);
        for_bits(m.w[k], [&](uint32_t lane) {
            uint32_t bval = b[base + lane] & 31, cval = clamp[base + lane] & 31;
            uint32_t segment = (clamp[base + lane] >> 8) & 31;
            int most = static_cast<int>((lane & segment) | (cval & ~segment));
            int from = 0;
            bool inside = false;
            switch (mode) {
            case Shuffle::up:
                from = static_cast<int>(lane) - static_cast<int>(bval);
                inside = from >= most;
                break;
            case Shuffle::down:
                from = static_cast<int>(lane + bval);
                inside = from <= most;
                break;
            case Shuffle::bfly:
                from = static_cast<int>(lane ^ bval);
                inside = from <= most;
                break;
            case Shuffle::idx:
                from = static_cast<int>((lane & segment) | (bval & ~segment));
                inside = from <= most;
                break;
            }
            d[base + lane] = values[inside ? from : static_cast<int>(lane)];
            p[base + lane] = inside;
        });
    }
}

enum class Vote { all, any, uni, ballot };

template <Vote mode> void vote(Cta& c, const Ins& i, const Mask& m) {
    const uint8_t* a = c.reg<uint8_t>(i.op[1]);
    for_groups(c, i, m, [&](uint32_t base, uint32_t group) {
        uint32_t trues = pack_predicate(a + base) & group;
        bool all = trues == group;
        bool result = mode == Vote::all ? all : mode == Vote::any ? trues != 0 : all || trues == 0;
        for_bits(group, [&](uint32_t l) {
            if (mode == Vote::ballot) {
                c.reg<uint32_t>(i.op[0])[base + l] = trues;
            } else {
                c.reg<uint8_t>(i.op[0])[base + l] = result;
            }
        });
    });
}

template <class T> void match_any(Cta& c, const Ins& i, const Mask& m) {
    uint32_t* d = c.reg<uint32_t>(i.op[0]);
    const T* a = c.reg<T>(i.op[2]);
    for_groups(c, i, m, [&](uint32_t base, uint32_t group) {
        uint32_t found[warp_size] = {};
        for_bits(group, [&](uint32_t l) {
            for_bits(group, [&](uint32_t other) {
                found[l] |= static_cast<uint32_t>(a[base + other] == a[base + l]) << other;
            });
        });
        for_bits(group, [&](uint32_t l) { d[base + l] = found[l]; });
    });
}

template <class T> void match_all(Cta& c, const Ins& i, const Mask& m) {
    uint32_t* d = c.reg<uint32_t>(i.op[0]);
    uint8_t* p = c.reg<uint8_t>(i.op[1]);
    const T* a = c.reg<T>(i.op[2]);
    for_groups(c, i, m, [&](uint32_t base, uint32_t group) {
        T first = a[base + static_cast<uint32_t>(__builtin_ctz(group))];
        bool same = true;
        for_bits(group, [&](uint32_t l) { same = same && a[base + l] == first; });
        for_bits(group, [&](uint32_t l) {
            d[base + l] = same ? group : 0;
            p[base + l] = same;
        });
    });
}

template <class T, T (*combine)(T, T)> void reduce(Cta& c, const Ins& i, const Mask& m) {
    T* d = c.reg<T>(i.op[0]);
    const T* a = c.reg<T>(i.op[2]);
    for_groups(c, i, m, [&](uint32_t base, uint32_t group) {
        uint32_t lead = static_cast<uint32_t>(__builtin_ctz(group));
        T sum = a[base + lead];
        for_bits(group & (group - 1), [&](uint32_t l) { sum = combine(sum, a[base + l]); });
        for_bits(group, [&](uint32_t l) { d[base + l] = sum; });
    });
}
template <class T> T least(T a, T b) {
    return std::min(a, b);
}
template <class T> T greatest(T a, T b) {
    return std::max(a, b);
}
uint32_t plus(uint32_t a, uint32_t b) {
    return a + b;
}
uint32_t both(uint32_t a, uint32_t b) {
    return a & b;
}
uint32_t either(uint32_t a, uint32_t b) {
    return a | b;
}
uint32_t differ(uint32_t a, uint32_t b) {
    return a ^ b;
}

void active_mask(Cta& c, const Ins& i, const Mask& m) {
    uint32_t* d = c.reg<uint32_t>(i.op[0]);
    for (uint32_t k = 0; k < c.warps; ++k) {
        for_bits(m.w[k], [&](uint32_t l) { d[k * warp_size + l] = m.w[k]; });
    }
}

Handler find_redux(const std::string& mode, Type type) {
    if (mode == "min" || mode == "max") {
        bool min = mode == "min";
        return type == Type::u32   ? min ? reduce<uint32_t, least> : reduce<uint32_t, greatest>
               : type == Type::s32 ? min ? reduce<int32_t, least> : reduce<int32_t, greatest>
                                   : nullptr;
    }
    if (mode == "add") {
        return type == Type::u32 || type == Type::s32 ? reduce<uint32_t, plus> : nullptr;
    }
    return type != Type::b32 ? nullptr
           : mode == "and"   ? reduce<uint32_t, both>
           : mode == "or"    ? reduce<uint32_t, either>
           : mode == "xor"   ? reduce<uint32_t, differ>
                             : nullptr;
}

} // namespace

Handler find_warp(const std::string& op, const std::string& variant, Type type) {
    static const std::unordered_map<std::string, Handler> table{
        {"shfl.up", shuffle<Shuffle::up>},     {"shfl.down", shuffle<Shuffle::down>},
        {"shfl.bfly", shuffle<Shuffle::bfly>}, {"shfl.idx", shuffle<Shuffle::idx>},
        {"vote.all", vote<Vote::all>},         {"vote.any", vote<Vote::any>},
        {"vote.uni", vote<Vote::uni>},         {"vote.ballot", vote<Vote::ballot>},
        {"activemask.", active_mask}};
    if (op == "redux") {
        return find_redux(variant, type);
    }
    if (op == "match") {
        bool wide = slot_size(type) == 8, any = variant == "any";
        if (!any && variant != "all") {
            return nullptr;
        }
        return any    ? wide ? match_any<uint64_t> : match_any<uint32_t>
               : wide ? match_all<uint64_t>
                      : match_all<uint32_t>;
    }
    auto found = table.find(op + "." + variant);
    return found == table.end() ? nullptr : found->second;
}

} // namespace flowgpu::emu::ptx
