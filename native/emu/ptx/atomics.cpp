// atom and red. Lanes go in order; other launches and the host may touch the same memory meanwhile.
#include <unordered_map>

#include "float_bits.h"
#include "memory.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

template <class T> struct Exchange {
    static T of(T, T b) { return b; }
};
template <class T> struct Plus {
    static T of(T a, T b) { return a + b; }
};
template <class T> struct Least {
    static T of(T a, T b) { return b < a ? b : a; }
};
template <class T> struct Greatest {
    static T of(T a, T b) { return b > a ? b : a; }
};
template <class T> struct And {
    static T of(T a, T b) { return a & b; }
};
template <class T> struct Or {
    static T of(T a, T b) { return a | b; }
};
template <class T> struct Xor {
    static T of(T a, T b) { return a ^ b; }
};
template <class T> struct Increment {
    static T of(T a, T b) { return a >= b ? 0 : a + 1; }
};
template <class T> struct Decrement {
    static T of(T a, T b) { return a == 0 || a > b ? b : a - 1; }
};

uint32_t add_f32(uint32_t a, uint32_t b) {
    return bit_cast<uint32_t>(canonical(bit_cast<float>(a) + bit_cast<float>(b)));
}
// On device memory the f32 sum is flushed, in shared memory it is not.
struct AddFloat {
    static uint32_t of(uint32_t a, uint32_t b) { return add_f32(a, b); }
};
struct AddFloatFlushed {
    static uint32_t of(uint32_t a, uint32_t b) {
        auto flushed = [](uint32_t bits) {
            return bit_cast<uint32_t>(flush(bit_cast<float>(bits)));
        };
        return flushed(add_f32(flushed(a), flushed(b)));
    }
};
struct AddDouble {
    static uint64_t of(uint64_t a, uint64_t b) {
        return bit_cast<uint64_t>(bit_cast<double>(a) + bit_cast<double>(b));
    }
};
struct AddHalf {
    static uint16_t of(uint16_t a, uint16_t b) {
        return narrow<Half>(static_cast<double>(to_float(Half{a}) + to_float(Half{b}))).bits;
    }
};
struct AddPair {
    static uint32_t of(uint32_t a, uint32_t b) {
        auto half = [&](int shift) {
            return static_cast<uint32_t>(
                AddHalf::of(static_cast<uint16_t>(a >> shift), static_cast<uint16_t>(b >> shift)));
        };
        return half(0) | half(16) << 16;
    }
};

// op: address, destination, value. Op on shared memory, Device on device memory.
template <class T, class Op, class Device, bool returns>
void update(Cta& c, const Ins& i, const Mask& m) {
    WriteLog* log = c.m.launch.log;
    for (uint32_t k = 0; k < c.warps; ++k) {
        for (uint32_t bits = m.w[k]; bits != 0; bits &= bits - 1) {
            uint32_t l = k * warp_size + static_cast<uint32_t>(__builtin_ctz(bits));
            uint64_t addr = address_of(c, i, i.op[0], l);
            uint8_t* host = locate(c, i.space, addr, sizeof(T), sizeof(T), l, true);
            if (!host) {
                return;
            }
            T* cell = reinterpret_cast<T*>(host);
            T value = c.reg<T>(i.op[2])[l];
            T old = __atomic_load_n(cell, __ATOMIC_SEQ_CST), fresh;
            bool device = is_device(i.space, addr);
            do {
                fresh = device ? Device::of(old, value) : Op::of(old, value);
            } while (!__atomic_compare_exchange_n(cell, &old, fresh, false, __ATOMIC_SEQ_CST,
                                                  __ATOMIC_SEQ_CST));
            if (returns) {
                c.reg<T>(i.op[1])[l] = old;
            }
            if (log && device) {
                log->add(addr, sizeof(T));
            }
        }
    }
}

template <class T, bool returns> void compare_and_swap(Cta& c, const Ins& i, const Mask& m) {
    WriteLog* log = c.m.launch.log;
    for (uint32_t k = 0; k < c.warps; ++k) {
        for (uint32_t bits = m.w[k]; bits != 0; bits &= bits - 1) {
            uint32_t l = k * warp_size + static_cast<uint32_t>(__builtin_ctz(bits));
            uint64_t addr = address_of(c, i, i.op[0], l);
            uint8_t* host = locate(c, i.space, addr, sizeof(T), sizeof(T), l, true);
            if (!host) {
                return;
            }
            T old = c.reg<T>(i.op[2])[l];
            bool stored =
                __atomic_compare_exchange_n(reinterpret_cast<T*>(host), &old, c.reg<T>(i.op[3])[l],
                                            false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
            if (returns) {
                c.reg<T>(i.op[1])[l] = old;
            }
            if (log && stored && is_device(i.space, addr)) {
                log->add(addr, sizeof(T));
            }
        }
    }
}

template <class T, class Op, class Device = Op> Handler make(bool returns) {
    return returns ? update<T, Op, Device, true> : update<T, Op, Device, false>;
}
template <class T> Handler make_cas(bool returns) {
    return returns ? compare_and_swap<T, true> : nullptr;
}

template <class T> Handler find_signed(const std::string& op, bool returns) {
    return op == "min"   ? make<T, Least<T>>(returns)
           : op == "max" ? make<T, Greatest<T>>(returns)
                         : nullptr;
}

template <class T> Handler find_bits(const std::string& op, bool returns) {
    return op == "and"    ? make<T, And<T>>(returns)
           : op == "or"   ? make<T, Or<T>>(returns)
           : op == "xor"  ? make<T, Xor<T>>(returns)
           : op == "exch" ? returns ? make<T, Exchange<T>>(true) : nullptr
           : op == "cas"  ? make_cas<T>(returns)
                          : nullptr;
}

} // namespace

Handler find_atomic(const std::string& op, Type type, bool returns) {
    bool add = op == "add";
    switch (type) {
    case Type::u32:
        return op == "inc"   ? make<uint32_t, Increment<uint32_t>>(returns)
               : op == "dec" ? make<uint32_t, Decrement<uint32_t>>(returns)
               : add         ? make<uint32_t, Plus<uint32_t>>(returns)
                             : find_signed<uint32_t>(op, returns);
    case Type::s32:
        return add ? make<uint32_t, Plus<uint32_t>>(returns) : find_signed<int32_t>(op, returns);
    case Type::u64:
        return add ? make<uint64_t, Plus<uint64_t>>(returns) : find_signed<uint64_t>(op, returns);
    case Type::s64:
        return find_signed<int64_t>(op, returns);
    case Type::b16:
        return op == "cas" ? make_cas<uint16_t>(returns) : nullptr;
    case Type::b32:
        return find_bits<uint32_t>(op, returns);
    case Type::b64:
        return find_bits<uint64_t>(op, returns);
    case Type::f32:
        return add ? make<uint32_t, AddFloat, AddFloatFlushed>(returns) : nullptr;
    case Type::f64:
        return add ? make<uint64_t, AddDouble>(returns) : nullptr;
    case Type::f16:
        return add ? make<uint16_t, AddHalf>(returns) : nullptr;
    case Type::f16x2:
        return add ? make<uint32_t, AddPair>(returns) : nullptr;
    default:
        return nullptr;
    }
}

} // namespace flowgpu::emu::ptx
