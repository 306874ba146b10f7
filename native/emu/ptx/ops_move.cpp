// Register copies, packing, width changes and the special registers read when executed.
#include <ctime>
#include <type_traits>

#include "lanes.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

template <class T> struct Copy {
    static T run(T a) { return a; }
};
template <class D, class S> struct Extend {
    static D run(S a) { return static_cast<D>(a); }
};

// The register that an element of a vector is in.
template <class E> using Holder = std::conditional_t<sizeof(E) == 1, uint16_t, E>;

// op[0] = {op[1], op[2], ...}, the first element lowest.
template <class S, class D> void pack(Cta& c, const Ins& i, const Mask& m) {
    constexpr uint32_t count = sizeof(D) / sizeof(S);
    D* d = c.reg<D>(i.op[0]);
    const Holder<S>* s[count];
    for (uint32_t e = 0; e < count; ++e) {
        s[e] = c.reg<Holder<S>>(i.op[1 + e]);
    }
    for_lanes(c, m, [&](uint32_t l) {
        D value = 0;
        for (uint32_t e = 0; e < count; ++e) {
            D element = static_cast<S>(s[e][l]);
            value |= static_cast<D>(element << (e * sizeof(S) * 8));
        }
        d[l] = value;
    });
}

// {op[0], op[1], ...} = op[count]; the source may be one of the destinations' neighbours but never
// shares a lane with them, so it is read once before the first write.
template <class S, class D> void unpack(Cta& c, const Ins& i, const Mask& m) {
    constexpr uint32_t count = sizeof(S) / sizeof(D);
    const S* s = c.reg<S>(i.op[count]);
    Holder<D>* d[count];
    for (uint32_t e = 0; e < count; ++e) {
        d[e] = c.reg<Holder<D>>(i.op[e]);
    }
    for_lanes(c, m, [&](uint32_t l) {
        S value = s[l];
        for (uint32_t e = 0; e < count; ++e) {
            d[e][l] = static_cast<D>(value >> (e * sizeof(D) * 8));
        }
    });
}

uint64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// One issued instruction counts as this many cycles, about what a lone warp sees.
constexpr uint64_t cycles_a_step = 4;

template <class T, int shift, bool wall> void read_clock(Cta& c, const Ins& i, const Mask& m) {
    T* d = c.reg<T>(i.op[0]);
    T now = static_cast<T>((wall ? nanoseconds() : c.m.steps * cycles_a_step) >> shift);
    for_lanes(c, m, [=](uint32_t l) { d[l] = now; });
}

} // namespace

Handler find_move(uint32_t bytes) {
    return bytes == 1   ? elementwise<Copy<uint8_t>>
           : bytes == 2 ? elementwise<Copy<uint16_t>>
           : bytes == 4 ? elementwise<Copy<uint32_t>>
           : bytes == 8 ? elementwise<Copy<uint64_t>>
                        : nullptr;
}

Handler find_pack(uint32_t from, uint32_t to) {
    return from == 1 && to == 2   ? pack<uint8_t, uint16_t>
           : from == 1 && to == 4 ? pack<uint8_t, uint32_t>
           : from == 2 && to == 4 ? pack<uint16_t, uint32_t>
           : from == 2 && to == 8 ? pack<uint16_t, uint64_t>
           : from == 4 && to == 8 ? pack<uint32_t, uint64_t>
                                  : nullptr;
}

Handler find_unpack(uint32_t from, uint32_t to) {
    return from == 2 && to == 1   ? unpack<uint16_t, uint8_t>
           : from == 4 && to == 1 ? unpack<uint32_t, uint8_t>
           : from == 4 && to == 2 ? unpack<uint32_t, uint16_t>
           : from == 8 && to == 2 ? unpack<uint64_t, uint16_t>
           : from == 8 && to == 4 ? unpack<uint64_t, uint32_t>
                                  : nullptr;
}

Handler find_extend(Type from, uint32_t to) {
    uint32_t bytes = slot_size(from);
    if (to <= bytes) { // narrowing: the low bytes
        return bytes == 4 && to == 2   ? elementwise<Extend<uint16_t, uint32_t>>
               : bytes == 8 && to == 2 ? elementwise<Extend<uint16_t, uint64_t>>
               : bytes == 8 && to == 4 ? elementwise<Extend<uint32_t, uint64_t>>
                                       : find_move(bytes);
    }
    if (is_signed(from)) {
        return bytes == 2 && to == 4   ? elementwise<Extend<int32_t, int16_t>>
               : bytes == 2 && to == 8 ? elementwise<Extend<int64_t, int16_t>>
               : bytes == 4 && to == 8 ? elementwise<Extend<int64_t, int32_t>>
                                       : nullptr;
    }
    return bytes == 2 && to == 4   ? elementwise<Extend<uint32_t, uint16_t>>
           : bytes == 2 && to == 8 ? elementwise<Extend<uint64_t, uint16_t>>
           : bytes == 4 && to == 8 ? elementwise<Extend<uint64_t, uint32_t>>
                                   : nullptr;
}

Handler find_special(SpecialKind kind) {
    switch (kind) {
    case SpecialKind::clock:
        return read_clock<uint32_t, 0, false>;
    case SpecialKind::clock_hi:
        return read_clock<uint32_t, 32, false>;
    case SpecialKind::clock64:
        return read_clock<uint64_t, 0, false>;
    case SpecialKind::globaltimer:
        return read_clock<uint64_t, 0, true>;
    case SpecialKind::globaltimer_lo:
        return read_clock<uint32_t, 0, true>;
    case SpecialKind::globaltimer_hi:
        return read_clock<uint32_t, 32, true>;
    default:
        return nullptr;
    }
}

} // namespace flowgpu::emu::ptx
