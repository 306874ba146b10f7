// Decoded form and machine state. Registers are arrays over the lanes of the CTA (lane = thread):
// register r starts at slot(r) * lanes bytes of the register file, so one handler call executes one
// instruction for the whole CTA.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>

#include "ptx.h"
#include "types.h"

namespace flowgpu::emu::ptx {

constexpr uint32_t warp_size = 32;
constexpr uint32_t max_warps = 32;
constexpr uint32_t max_threads = max_warps * warp_size;

struct Mask {
    uint32_t w[max_warps] = {}; // bit l of word k: lane 32k + l

    bool any() const {
        uint32_t sum = 0;
        for (uint32_t word : w) {
            sum |= word;
        }
        return sum != 0;
    }
    uint32_t count() const {
        uint32_t sum = 0;
        for (uint32_t word : w) {
            sum += static_cast<uint32_t>(__builtin_popcount(word));
        }
        return sum;
    }
    Mask& operator|=(const Mask& other) {
        for (uint32_t k = 0; k < max_warps; ++k) {
            w[k] |= other.w[k];
        }
        return *this;
    }
    Mask without(const Mask& other) const {
        Mask rest;
        for (uint32_t k = 0; k < max_warps; ++k) {
            rest.w[k] = w[k] & ~other.w[k];
        }
        return rest;
    }
    bool operator==(const Mask& other) const { return std::memcmp(w, other.w, sizeof w) == 0; }
};

struct Cta;
struct Ins;
using Handler = void (*)(Cta&, const Ins&, const Mask&);

// What the scheduler does with an instruction.
enum class Flow : uint8_t {
    next,         // run fn, go on
    branch,       // to target
    branch_index, // to lists[aux][op[0]]
    exit,
    barrier,   // bar.*: see BarrierKind in `mode`
    warp,      // run fn once all live lanes that the mask in op[5] names have come here
    warp_sync, // the same without fn and without being at the same instruction
    trap,
    assert_fail,
};

enum class BarrierKind : uint8_t { sync, arrive, red_popc, red_and, red_or };

// A texture or a surface has one of these; `a1d` and `a2d` have layers.
enum class Geometry : uint8_t { d1, d2, d3, a1d, a2d };

enum class Space : uint8_t { generic, global, shared, local, param };

struct Ins {
    Handler fn = nullptr;
    Flow flow = Flow::next;
    uint8_t mode = 0;  // BarrierKind, shuffle mode, ...
    uint8_t count = 1; // elements of a vector access
    bool pred_negated = false;
    bool wide_address = true; // address register has 64 bits
    bool spins = false;       // reads that other CTAs may be waited for with
    Space space = Space::generic;
    uint32_t pred = 0;   // slot of the guard, no_slot for none
    uint32_t op[6] = {}; // slots
    uint32_t target = 0;
    uint32_t aux = 0; // index into Code::lists
    int64_t imm = 0;  // address offset
    uint32_t line = 0, text = 0;
};

constexpr uint32_t no_slot = ~0u;

struct Constant {
    enum class Kind : uint8_t { value, variable, function, dynamic_shared };
    Kind kind = Kind::value;
    uint8_t size = 8;
    uint32_t slot = 0;
    uint64_t value =
        0; // plus the address of the variable or function `index`, or of dynamic shared memory
    uint32_t index = 0;
};

enum class SpecialKind : uint8_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    laneid,
    warpid,
    nwarpid,
    mask_eq,
    mask_le,
    mask_lt,
    mask_ge,
    mask_gt,
    smid,
    nsmid,
    gridid,
    dynamic_smem,
    total_smem,
    zero,
    clock,
    clock_hi,
    clock64,
    globaltimer,
    globaltimer_lo,
    globaltimer_hi, // read when executed
};

struct Special {
    SpecialKind kind;
    uint8_t size = 4;
    uint32_t slot = 0;
};

struct Code {
    std::vector<Ins> ins;
    std::vector<Constant> constants;
    std::vector<Special> specials;
    std::vector<std::vector<uint32_t>> lists;
    std::vector<std::string> texts; // "ld.global.f32"
    uint32_t slot_bytes = 0;        // a lane
    uint32_t dynamic_shared_align = 16;
};

struct Fault {
    Result::Code code = Result::Code::ok;
    uint64_t address = 0;
    uint32_t lane = 0;
};

// State of one launch, shared by its CTAs.
struct Machine {
    Machine(const Function& f, const Launch& l, AddressSpace& space)
        : code(*f.code), function(f), launch(l), memory(space), epoch(space.epoch()) {}

    const Code& code;
    const Function& function;
    const Launch& launch;
    AddressSpace& memory;
    uint64_t epoch = 0;
    uint32_t dynamic_shared_base = 0;
    uint32_t shared_bytes = 0;
    Fault fault;
    uint32_t fault_pc = 0;
    bool deadlock = false;
    uint64_t steps = 0; // instructions issued by the launch so far: the clock
    uint64_t lane_instructions = 0;

    static constexpr uint32_t cached = 4;
    AddressSpace::Range ranges[cached] = {};
    uint32_t next_victim = 0;
    std::pair<uint64_t, const Image*> images[cached] = {}; // by number; null: none
    uint32_t next_image = 0;

    void refresh() {
        uint64_t now = memory.epoch();
        if (now != epoch) {
            epoch = now;
            std::fill(std::begin(ranges), std::end(ranges), AddressSpace::Range());
            std::fill(std::begin(images), std::end(images), std::pair<uint64_t, const Image*>());
        }
    }
    // What a number means, or null.
    const Image* image(uint64_t number) {
        for (const auto& [known, image] : images) {
            if (image && known == number) {
                return image;
            }
        }
        return image_miss(number);
    }
    const Image* image_miss(uint64_t number);
    // Host address of [addr, addr + size) in device memory, or null.
    uint8_t* device(uint64_t addr, uint64_t size, bool write) {
        for (uint32_t k = 0; k < cached; ++k) {
            const AddressSpace::Range& range = ranges[k];
            if (addr >= range.begin && addr < range.end) {
                return size <= range.end - addr && (range.writable || !write)
                           ? range.host + (addr - range.begin)
                           : nullptr;
            }
        }
        return device_miss(addr, size, write);
    }
    uint8_t* device_miss(uint64_t addr, uint64_t size, bool write);
};

struct Fragment {
    uint32_t pc = 0;
    Mask mask;
};

struct Parked {
    uint32_t pc = 0; // of the instruction that waits
    Mask mask;
};

struct Cta {
    explicit Cta(Machine& machine);

    Machine& m;
    uint32_t threads = 0, warps = 0, lanes = 0; // lanes: threads rounded up to whole warps
    uint32_t index = 0;                         // linear CTA number
    std::vector<uint8_t> storage;
    uint8_t* regs = nullptr;
    std::vector<uint8_t> shared, local;

    Mask live;
    std::vector<Fragment> fragments; // runnable; disjoint masks
    std::vector<Parked> at_warp;     // waiting for lanes of their warp
    struct Barrier {
        std::vector<Parked> waiting;
        uint32_t expected = 0; // threads, 0: all live
        uint32_t arrivals = 0; // threads of bar.arrive
    } barriers[16];
    uint64_t spin_reads = 0;

    template <class T> T* reg(uint32_t slot) const {
        return reinterpret_cast<T*>(regs + static_cast<size_t>(slot) * lanes);
    }
    void start(uint32_t linear_index);
    void raise(Result::Code code, uint64_t address, uint32_t lane) {
        if (m.fault.code == Result::Code::ok) {
            m.fault = {code, address, lane};
        }
    }
};

// Bits of 32 predicate bytes (0 or 1).
inline uint32_t pack_predicate(const uint8_t* bytes) {
    uint32_t bits = 0;
    for (int k = 0; k < 4; ++k) {
        uint64_t eight;
        std::memcpy(&eight, bytes + 8 * k, 8);
        bits |= static_cast<uint32_t>((eight * 0x0102040810204080ull) >> 56) << (8 * k);
    }
    return bits;
}

} // namespace flowgpu::emu::ptx
