// Grids: one CTA after the other; CTAs that wait for others take turns.
#include <deque>

#include "schedule.h"

namespace flowgpu::emu::ptx {

namespace {

constexpr uint8_t poison = 0xa5; // of shared and local memory, which start undefined
constexpr uint32_t most_dynamic_shared = 227u << 10; // of any GPU so far
constexpr size_t most_resident = 1024;
constexpr size_t most_resident_bytes = size_t(1) << 30;

uint32_t pad(uint32_t threads) {
    return (threads + warp_size - 1) / warp_size * warp_size;
}

uint64_t special_value(const Cta& c, SpecialKind kind, uint32_t l) {
    const Launch& launch = c.m.launch;
    const uint32_t *block = launch.block, *grid = launch.grid;
    uint32_t lane = l % warp_size;
    switch (kind) {
    case SpecialKind::tid_x:
        return l % block[0];
    case SpecialKind::tid_y:
        return l / block[0] % block[1];
    case SpecialKind::tid_z:
        return l / (block[0] * block[1]);
    case SpecialKind::ntid_x:
        return block[0];
    case SpecialKind::ntid_y:
        return block[1];
    case SpecialKind::ntid_z:
        return block[2];
    case SpecialKind::ctaid_x:
        return c.index % grid[0];
    case SpecialKind::ctaid_y:
        return c.index / grid[0] % grid[1];
    case SpecialKind::ctaid_z:
        return c.index / grid[0] / grid[1];
    case SpecialKind::nctaid_x:
        return grid[0];
    case SpecialKind::nctaid_y:
        return grid[1];
    case SpecialKind::nctaid_z:
        return grid[2];
    case SpecialKind::laneid:
        return lane;
    case SpecialKind::warpid:
        return l / warp_size;
    case SpecialKind::nwarpid:
        return c.warps;
    case SpecialKind::mask_eq:
        return 1u << lane;
    case SpecialKind::mask_le:
        return ~0u >> (31 - lane);
    case SpecialKind::mask_lt:
        return (1u << lane) - 1;
    case SpecialKind::mask_ge:
        return ~0u << lane;
    case SpecialKind::mask_gt:
        return ~0u << lane << 1;
    case SpecialKind::nsmid:
        return 1;
    case SpecialKind::dynamic_smem:
        return launch.dynamic_shared;
    case SpecialKind::total_smem:
        return c.m.shared_bytes;
    default:
        return 0; // one multiprocessor, number 0; one grid
    }
}

bool changes_with_cta(SpecialKind kind) {
    return kind == SpecialKind::ctaid_x || kind == SpecialKind::ctaid_y ||
           kind == SpecialKind::ctaid_z;
}

void fill(Cta& c, uint32_t slot, uint32_t bytes, uint32_t l, uint64_t value) {
    std::memcpy(c.regs + static_cast<size_t>(slot) * c.lanes + static_cast<size_t>(l) * bytes,
                &value, bytes);
}

void fill_specials(Cta& c, bool per_cta) {
    for (const Special& special : c.m.code.specials) {
        if (changes_with_cta(special.kind) == per_cta) {
            for (uint32_t l = 0; l < c.lanes; ++l) {
                fill(c, special.slot, special.size, l, special_value(c, special.kind, l));
            }
        }
    }
}

} // namespace

Cta::Cta(Machine& machine) : m(machine) {
    const uint32_t* block = m.launch.block;
    threads = block[0] * block[1] * block[2];
    lanes = pad(threads);
    warps = lanes / warp_size;
    storage.resize(static_cast<size_t>(m.code.slot_bytes) * lanes + 64);
    uint64_t address = reinterpret_cast<uint64_t>(storage.data());
    regs = storage.data() + (64 - address % 64) % 64;
    shared.resize(m.shared_bytes);
    local.assign(static_cast<size_t>(m.function.local_bytes) * lanes, poison);
    for (const Constant& constant : m.code.constants) {
        uint64_t value = constant.value;
        if (constant.kind == Constant::Kind::variable) {
            value += m.launch.variables[constant.index];
        } else if (constant.kind == Constant::Kind::function) {
            value += m.launch.code + constant.index * function_bytes;
        } else if (constant.kind == Constant::Kind::dynamic_shared) {
            value += m.dynamic_shared_base;
        }
        for (uint32_t l = 0; l < lanes; ++l) {
            fill(*this, constant.slot, constant.size, l, value);
        }
    }
    fill_specials(*this, false);
}

void Cta::start(uint32_t linear_index) {
    index = linear_index;
    live = Mask();
    for (uint32_t l = 0; l < threads; ++l) {
        live.w[l / warp_size] |= 1u << (l % warp_size);
    }
    fragments.assign(1, {0, live});
    at_warp.clear();
    for (Barrier& barrier : barriers) {
        barrier = {};
    }
    std::fill(shared.begin(), shared.end(), poison);
    fill_specials(*this, true);
}

namespace {

std::string describe(const Machine& m, const Cta& c) {
    auto triple = [](uint64_t x, uint64_t y, uint64_t z) {
        return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
    };
    const Ins& ins = m.code.ins[m.fault_pc];
    uint32_t lane = m.fault.lane;
    auto value = [&](SpecialKind kind) { return special_value(c, kind, lane); };
    std::string text = m.deadlock ? "deadlock: threads wait for others that never come: " : "";
    text += m.function.name + ": ";
    text += ins.text < m.code.texts.size() ? m.code.texts[ins.text] : std::string("exit");
    text += " (PTX line " + std::to_string(ins.line) + "), CTA ";
    text += triple(value(SpecialKind::ctaid_x), value(SpecialKind::ctaid_y),
                   value(SpecialKind::ctaid_z));
    text += ", thread ";
    text += triple(value(SpecialKind::tid_x), value(SpecialKind::tid_y), value(SpecialKind::tid_z));
    return text;
}

const char* refusal(const Module& module, const Function& function, const Launch& launch) {
    uint64_t threads = static_cast<uint64_t>(launch.block[0]) * launch.block[1] * launch.block[2];
    uint64_t ctas = static_cast<uint64_t>(launch.grid[0]) * launch.grid[1];
    if (!function.entry || !function.code) {
        return "not a kernel";
    }
    if (threads == 0 || threads > function.max_threads || threads > max_threads) {
        return "block size out of range";
    }
    if (ctas == 0 || launch.grid[2] == 0 || ctas > ~0u / launch.grid[2]) {
        return "grid size out of range";
    }
    if (launch.dynamic_shared > most_dynamic_shared) {
        return "too much dynamic shared memory";
    }
    if (launch.variables.size() != module.variables().size()) {
        return "not every module variable has an address";
    }
    if (function.param_bytes != 0 && !launch.params) {
        return "no parameters";
    }
    return nullptr;
}

class Grid {
  public:
    explicit Grid(Machine& machine) : m_(machine) {
        const uint32_t* grid = m_.launch.grid;
        total_ = grid[0] * grid[1] * grid[2];
    }

    // Null, or the CTA that stopped the launch.
    const Cta* run() {
        while (next_ < total_ || !waiting_.empty()) {
            // New CTAs come first: the one that is waited for may not have started.
            bool resume = !waiting_.empty() && (next_ == total_ || full());
            if (!start(resume)) {
                return current_.get();
            }
        }
        return nullptr;
    }

  private:
    bool full() const {
        size_t bytes =
            waiting_.empty()
                ? 0
                : waiting_.size() * (waiting_[0]->storage.size() + waiting_[0]->local.size());
        return waiting_.size() >= most_resident || bytes >= most_resident_bytes;
    }

    bool start(bool resume) {
        if (resume) {
            spare_ = std::move(current_);
            current_ = std::move(waiting_.front());
            waiting_.pop_front();
        } else {
            if (!current_) {
                current_ = spare_ ? std::move(spare_) : std::make_unique<Cta>(m_);
            }
            current_->start(next_++);
        }
        Status status = run_cta(*current_);
        if (status == Status::yielded) {
            waiting_.push_back(std::move(current_));
        }
        return status != Status::stopped;
    }

    Machine& m_;
    uint32_t next_ = 0, total_ = 0;
    std::unique_ptr<Cta> current_, spare_;
    std::deque<std::unique_ptr<Cta>> waiting_;
};

} // namespace

Result launch(const Module& module, const Function& function, const Launch& launch,
              AddressSpace& memory) {
    Result result;
    if (const char* reason = refusal(module, function, launch)) {
        result.code = Result::Code::launch_failure;
        result.detail = function.name + ": " + reason;
        return result;
    }
    Machine machine(function, launch, memory);
    uint32_t align = machine.code.dynamic_shared_align;
    machine.dynamic_shared_base = (function.static_shared_bytes + align - 1) / align * align;
    machine.shared_bytes = launch.dynamic_shared
                               ? machine.dynamic_shared_base + launch.dynamic_shared
                               : function.static_shared_bytes;
    Grid grid(machine);
    const Cta* cta = nullptr;
    try {
        cta = grid.run();
    } catch (const std::bad_alloc&) {
        result.code = Result::Code::launch_failure;
        result.detail = function.name + ": out of host memory";
    }
    if (cta) {
        result.code = machine.fault.code;
        result.address = machine.fault.address;
        result.detail = describe(machine, *cta);
    }
    result.lane_instructions = machine.lane_instructions;
    return result;
}

} // namespace flowgpu::emu::ptx
