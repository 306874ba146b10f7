// mbarrier objects: 64 bits of shared memory whose layout PTX leaves open.
#include "memory.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

// Bits 0 to 19: arrivals a phase expects; 20 to 39: those still missing; 40 to 55: the number of
// the phase; above: a mark that neither zeros nor the poison of shared memory have. The state that
// an arrival returns is the object before it.
constexpr uint64_t most = (1u << 20) - 1;
constexpr uint64_t one_phase = 1ull << 40;
constexpr uint64_t mark = 0x5bull << 56;

bool is_live(uint64_t b) {
    return b >> 56 == mark >> 56;
}

uint64_t expected(uint64_t b) {
    return b & most;
}
uint64_t pending(uint64_t b) {
    return b >> 20 & most;
}
uint64_t phases(uint64_t b) {
    return b & 0xffffull << 40;
}
uint64_t join(uint64_t phase, uint64_t missing, uint64_t wanted) {
    return mark | (phase & 0xffffull << 40) | missing << 20 | wanted;
}

// What the ISA leaves undefined stops the kernel here: too many arrivals, or no such object.
bool arrive(uint64_t& b, uint64_t count, bool completes, bool drops) {
    if (!is_live(b) || count > pending(b) || (!completes && count == pending(b))) {
        return false;
    }
    uint64_t wanted = expected(b) - (drops ? count : 0), missing = pending(b) - count;
    b = missing == 0 ? join(phases(b) + one_phase, wanted, wanted)
                     : join(phases(b), missing, wanted);
    return true;
}

// f(lane, object) for each lane; false: illegal.
template <class F> void for_objects(Cta& c, const Ins& i, const Mask& m, F f) {
    for_lanes(c, m, [&](uint32_t l) {
        if (c.m.fault.code != Result::Code::ok) {
            return;
        }
        uint64_t b, addr = address_of(c, i, i.op[0], l);
        bool shared = i.space == Space::shared || addr - shared_window < window_bytes;
        uint8_t* host = shared ? locate(c, i.space, addr, sizeof b, sizeof b, l, true) : nullptr;
        if (!host) {
            c.raise(Result::Code::illegal_address, addr, l);
            return;
        }
        std::memcpy(&b, host, sizeof b);
        if (!f(l, b)) {
            c.raise(Result::Code::illegal_instruction, 0, l);
            return;
        }
        std::memcpy(host, &b, sizeof b);
    });
}

// op: address, count
void init(Cta& c, const Ins& i, const Mask& m) {
    for_objects(c, i, m, [&](uint32_t l, uint64_t& b) {
        uint64_t count = c.reg<uint32_t>(i.op[1])[l];
        b = join(0, count, count);
        return count >= 1 && count <= most;
    });
}

void invalidate(Cta& c, const Ins& i, const Mask& m) {
    for_objects(c, i, m, [&](uint32_t, uint64_t& b) {
        bool valid = is_live(b);
        b = 0;
        return valid;
    });
}

// op: address, count, state
template <bool completes, bool drops> void arrive_on(Cta& c, const Ins& i, const Mask& m) {
    for_objects(c, i, m, [&](uint32_t l, uint64_t& b) {
        c.reg<uint64_t>(i.op[2])[l] = b;
        return arrive(b, c.reg<uint32_t>(i.op[1])[l], completes, drops);
    });
}

// op: address, state or parity, predicate
template <bool parity> void test_wait(Cta& c, const Ins& i, const Mask& m) {
    for_objects(c, i, m, [&](uint32_t l, uint64_t& b) {
        bool done = parity ? (phases(b) / one_phase & 1) != (c.reg<uint32_t>(i.op[1])[l] & 1)
                           : phases(b) != phases(c.reg<uint64_t>(i.op[1])[l]);
        c.reg<uint8_t>(i.op[2])[l] = done;
        return is_live(b);
    });
}

// The copies before it are complete, so without .noinc one more arrival is both expected and there.
void nothing_pending(Cta& c, const Ins& i, const Mask& m) {
    for_objects(c, i, m, [](uint32_t, uint64_t& b) { return is_live(b) && pending(b) < most; });
}

struct PendingCount {
    static uint32_t run(uint64_t state) { return static_cast<uint32_t>(pending(state)); }
};

} // namespace

Handler find_mbarrier(const std::string& op) {
    return op == "init"                     ? init
           : op == "inval"                  ? invalidate
           : op == "arrive"                 ? arrive_on<true, false>
           : op == "arrive.noComplete"      ? arrive_on<false, false>
           : op == "arrive_drop"            ? arrive_on<true, true>
           : op == "arrive_drop.noComplete" ? arrive_on<false, true>
           : op == "test_wait"              ? test_wait<false>
           : op == "test_wait.parity"       ? test_wait<true>
           : op == "cp.async"               ? nothing_pending
           : op == "pending_count"          ? elementwise<PendingCount>
                                            : nullptr;
}

} // namespace flowgpu::emu::ptx
