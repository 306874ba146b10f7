// The scheduler. Lanes with equal program counters form a fragment; the lowest fragment runs, so
// that the others are met and merged on the way. Lanes that have spun for long while others could
// run give way in turn, which is the forward progress that independent thread scheduling promises.
// Barriers and warp operations park lanes until everybody they wait for has come.
#include "schedule.h"

namespace flowgpu::emu::ptx {

namespace {

constexpr uint64_t slice_steps = 1u << 20;    // of a CTA that waits for others
constexpr uint64_t spin_reads_a_slice = 1024; // fewer: the CTA computes
constexpr uint64_t check_steps = 4096;        // between looks at cancel and epoch
constexpr uint32_t branches_a_turn = 4096;    // before another fragment may run

class Scheduler {
  public:
    explicit Scheduler(Cta& c) : c_(c), m_(c.m), ins_(c.m.code.ins.data()) {}

    Status run() {
        uint64_t end = m_.steps + slice_steps;
        c_.spin_reads = 0;
        while (true) {
            if (c_.fragments.empty()) {
                return c_.live.any() ? deadlock() : Status::done;
            }
            select();
            if (!segment()) {
                return Status::stopped;
            }
            if (m_.steps >= next_check_ && !check()) {
                return Status::stopped;
            }
            if (m_.steps >= end) {
                if (c_.spin_reads >= spin_reads_a_slice) {
                    return Status::yielded;
                }
                end = m_.steps + slice_steps;
                c_.spin_reads = 0;
            }
        }
    }

  private:
    bool check() {
        next_check_ = m_.steps + check_steps;
        m_.refresh();
        if (m_.launch.cancel && m_.launch.cancel->load(std::memory_order_relaxed)) {
            c_.raise(Result::Code::cancelled, 0, 0);
            return false;
        }
        return true;
    }

    Status deadlock() {
        pc_ = 0;
        for (const Cta::Barrier& barrier : c_.barriers) {
            for (const Parked& parked : barrier.waiting) {
                stop_at(parked);
            }
        }
        for (const Parked& parked : c_.at_warp) {
            stop_at(parked);
        }
        return Status::stopped;
    }

    void stop_at(const Parked& parked) {
        pc_ = parked.pc;
        for (uint32_t k = 0; k < c_.warps; ++k) {
            if (parked.mask.w[k] != 0) {
                m_.fault_pc = parked.pc;
                m_.deadlock = true;
                c_.raise(Result::Code::launch_failure, 0,
                         k * warp_size + static_cast<uint32_t>(__builtin_ctz(parked.mask.w[k])));
                return;
            }
        }
    }

    // Takes the next fragment out of the list, merged with all at the same place.
    void select() {
        std::vector<Fragment>& list = c_.fragments;
        uint32_t pick = 0;
        if (list.size() > 1) {
            std::sort(list.begin(), list.end(),
                      [](const Fragment& a, const Fragment& b) { return a.pc < b.pc; });
            size_t kept = 0;
            for (size_t k = 1; k < list.size(); ++k) {
                if (list[k].pc == list[kept].pc) {
                    list[kept].mask |= list[k].mask;
                } else {
                    list[++kept] = list[k];
                }
            }
            list.resize(kept + 1);
            pick = (turn_ / branches_a_turn) % static_cast<uint32_t>(list.size());
        }
        if (list.size() == 1) {
            turn_ = 0;
        }
        pc_ = list[pick].pc;
        mask_ = list[pick].mask;
        list.erase(list.begin() + pick);
        limit_ = pick < list.size() ? list[pick].pc : ~0u;
        count_ = mask_.count();
    }

    void put_back() {
        if (mask_.any()) {
            c_.fragments.push_back({pc_, mask_});
        }
    }

    Mask guard(const Ins& i) const {
        if (i.pred == no_slot) {
            return mask_;
        }
        const uint8_t* p = c_.reg<uint8_t>(i.pred);
        Mask g;
        for (uint32_t k = 0; k < c_.warps; ++k) {
            if (mask_.w[k] != 0) {
                uint32_t bits = pack_predicate(p + k * warp_size);
                g.w[k] = mask_.w[k] & (i.pred_negated ? ~bits : bits);
            }
        }
        return g;
    }

    // Runs the selected fragment until the choice has to be made again; false after a fault.
    bool segment() {
        while (true) {
            const Ins& i = ins_[pc_];
            ++m_.steps;
            m_.lane_instructions += count_;
            switch (i.flow) {
            case Flow::next:
                if (!execute(i)) {
                    return false;
                }
                if (++pc_ == limit_) {
                    put_back();
                    return true;
                }
                break;
            case Flow::branch:
                branch(i, guard(i));
                if (!c_.fragments.empty() || m_.steps >= next_check_) {
                    ++turn_;
                    put_back();
                    return true;
                }
                break;
            default:
                bool alive = control(i, guard(i));
                put_back();
                return alive;
            }
        }
    }

    bool execute(const Ins& i) {
        c_.spin_reads += i.spins;
        if (i.pred == no_slot) {
            i.fn(c_, i, mask_);
        } else {
            Mask g = guard(i);
            if (g.any()) {
                i.fn(c_, i, g);
            }
        }
        if (m_.fault.code != Result::Code::ok) {
            m_.fault_pc = pc_;
            return false;
        }
        return true;
    }

    void branch(const Ins& i, const Mask& taken) {
        if (taken == mask_) {
            pc_ = i.target;
            return;
        }
        if (taken.any()) {
            c_.fragments.push_back({i.target, taken});
            mask_ = mask_.without(taken);
        }
        ++pc_;
    }

    static uint32_t first_lane(const Mask& mask) {
        for (uint32_t k = 0; k < max_warps; ++k) {
            if (mask.w[k] != 0) {
                return k * warp_size + static_cast<uint32_t>(__builtin_ctz(mask.w[k]));
            }
        }
        return 0;
    }

    bool stop(const Mask& g, Result::Code code) {
        m_.fault_pc = pc_;
        c_.raise(code, 0, first_lane(g));
        return false;
    }

    bool control(const Ins& i, const Mask& g) {
        if (!g.any()) {
            ++pc_;
            return true;
        }
        switch (i.flow) {
        case Flow::exit:
            leave(g);
            return true;
        case Flow::trap:
            return stop(g, Result::Code::launch_failure);
        case Flow::assert_fail:
            return stop(g, Result::Code::assert_failed);
        case Flow::branch_index:
            branch_index(i, g);
            return true;
        case Flow::barrier:
            return barrier(i, g);
        default:
            return warp(i, g);
        }
    }

    void leave(const Mask& g) {
        c_.live = c_.live.without(g);
        mask_ = mask_.without(g);
        ++pc_;
        for (Cta::Barrier& barrier : c_.barriers) {
            release(barrier);
        }
        // Who waits for lanes of its warp looks again.
        for (const Parked& parked : c_.at_warp) {
            c_.fragments.push_back({parked.pc, parked.mask});
        }
        c_.at_warp.clear();
    }

    void branch_index(const Ins& i, const Mask& g) {
        const std::vector<uint32_t>& targets = m_.code.lists[i.aux];
        const uint32_t* index = c_.reg<uint32_t>(i.op[0]);
        for (uint32_t k = 0; k < c_.warps; ++k) {
            for (uint32_t bits = g.w[k]; bits != 0; bits &= bits - 1) {
                uint32_t bit = static_cast<uint32_t>(__builtin_ctz(bits));
                uint32_t at = index[k * warp_size + bit];
                // Out of range is undefined; the last target keeps the lane inside the kernel.
                Fragment fragment{targets[std::min<size_t>(at, targets.size() - 1)], {}};
                fragment.mask.w[k] = 1u << bit;
                c_.fragments.push_back(fragment);
            }
        }
        mask_ = mask_.without(g);
        ++pc_;
    }

    bool barrier(const Ins& i, const Mask& g) {
        const uint32_t* ids = c_.reg<uint32_t>(i.op[0]);
        const uint32_t* counts = i.op[1] == no_slot ? nullptr : c_.reg<uint32_t>(i.op[1]);
        bool waits = i.mode != static_cast<uint8_t>(BarrierKind::arrive);
        if (waits) {
            mask_ = mask_.without(g);
        }
        Mask rest = g;
        while (rest.any()) {
            uint32_t lead = first_lane(rest);
            uint32_t id = ids[lead], count = counts ? counts[lead] : 0;
            Mask group;
            for (uint32_t l = 0; l < c_.threads; ++l) {
                bool in = (rest.w[l / warp_size] >> (l % warp_size) & 1) != 0 && ids[l] == id &&
                          (!counts || counts[l] == count);
                group.w[l / warp_size] |= static_cast<uint32_t>(in) << (l % warp_size);
            }
            rest = rest.without(group);
            if (id >= 16 || count % warp_size != 0) {
                return stop(group, Result::Code::illegal_instruction);
            }
            Cta::Barrier& barrier = c_.barriers[id];
            barrier.expected = count;
            if (waits) {
                barrier.waiting.push_back({pc_, group});
            } else {
                barrier.arrivals += whole_warps(group);
            }
            release(barrier);
        }
        ++pc_;
        return true;
    }

    // Barriers count whole warps: a warp all of whose live lanes have come counts as 32 threads.
    uint32_t whole_warps(const Mask& mask) const {
        uint32_t threads = 0;
        for (uint32_t k = 0; k < c_.warps; ++k) {
            bool whole = mask.w[k] != 0 && (c_.live.w[k] & ~mask.w[k]) == 0;
            threads += whole ? warp_size : static_cast<uint32_t>(__builtin_popcount(mask.w[k]));
        }
        return threads;
    }

    void release(Cta::Barrier& barrier) {
        if (barrier.waiting.empty() && barrier.arrivals == 0) {
            return;
        }
        Mask come;
        for (const Parked& parked : barrier.waiting) {
            come |= parked.mask;
        }
        bool complete = barrier.expected == 0
                            ? come == c_.live
                            : whole_warps(come) + barrier.arrivals >= barrier.expected;
        if (!complete) {
            return;
        }
        std::vector<Parked> waiting = std::move(barrier.waiting);
        barrier = {};
        reduce(waiting);
        for (const Parked& parked : waiting) {
            c_.fragments.push_back({parked.pc + 1, parked.mask});
        }
    }

    template <class F> void each_lane(const Mask& mask, F f) const {
        for (uint32_t k = 0; k < c_.warps; ++k) {
            for (uint32_t bits = mask.w[k]; bits != 0; bits &= bits - 1) {
                f(k * warp_size + static_cast<uint32_t>(__builtin_ctz(bits)));
            }
        }
    }

    // bar.red: the result is over all threads of the barrier, whichever instruction they wait at.
    void reduce(const std::vector<Parked>& waiting) {
        uint32_t trues = 0, total = 0;
        for (const Parked& parked : waiting) {
            const Ins& i = ins_[parked.pc];
            if (i.mode >= static_cast<uint8_t>(BarrierKind::red_popc)) {
                const uint8_t* p = c_.reg<uint8_t>(i.op[3]);
                each_lane(parked.mask, [&](uint32_t l) {
                    trues += p[l];
                    ++total;
                });
            }
        }
        for (const Parked& parked : waiting) {
            const Ins& i = ins_[parked.pc];
            switch (static_cast<BarrierKind>(i.mode)) {
            case BarrierKind::red_popc: {
                uint32_t* d = c_.reg<uint32_t>(i.op[2]);
                each_lane(parked.mask, [&](uint32_t l) { d[l] = trues; });
                break;
            }
            case BarrierKind::red_and:
            case BarrierKind::red_or: {
                uint8_t* d = c_.reg<uint8_t>(i.op[2]);
                bool all = static_cast<BarrierKind>(i.mode) == BarrierKind::red_and;
                each_lane(parked.mask,
                          [&](uint32_t l) { d[l] = all ? trues == total : trues != 0; });
                break;
            }
            default:
                break;
            }
        }
    }

    uint32_t member_mask(const Ins& i, uint32_t lane) const {
        return c_.reg<uint32_t>(i.op[5])[lane];
    }

    // Lanes of warp k in `bits` that name the same members as `lead` does.
    uint32_t same_members(const Ins& i, uint32_t k, uint32_t bits, uint32_t members) const {
        uint32_t group = 0;
        for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
            uint32_t bit = static_cast<uint32_t>(__builtin_ctz(rest));
            if (member_mask(i, k * warp_size + bit) == members) {
                group |= 1u << bit;
            }
        }
        return group;
    }

    bool warp(const Ins& i, const Mask& g) {
        Mask ready;
        mask_ = mask_.without(g);
        for (uint32_t k = 0; k < c_.warps; ++k) {
            for (uint32_t rest = g.w[k]; rest != 0;) {
                uint32_t lead = k * warp_size + static_cast<uint32_t>(__builtin_ctz(rest));
                uint32_t members = member_mask(i, lead);
                uint32_t group = same_members(i, k, rest, members);
                rest &= ~group;
                if ((group & ~members) != 0) { // a lane must name itself
                    return stop(g, Result::Code::illegal_instruction);
                }
                gather(i, k, members, group, ready);
            }
        }
        if (ready.any()) {
            if (i.flow == Flow::warp) {
                i.fn(c_, i, ready);
                if (m_.fault.code != Result::Code::ok) {
                    m_.fault_pc = pc_;
                    return false;
                }
            }
            mask_ |= ready;
        }
        ++pc_;
        return true;
    }

    // Adds the group to `ready`, with those that waited for it, or parks it.
    void gather(const Ins& i, uint32_t k, uint32_t members, uint32_t group, Mask& ready) {
        uint32_t come = group, needed = members & c_.live.w[k];
        auto fits = [&](const Parked& parked) {
            const Ins& other = ins_[parked.pc];
            return i.flow == Flow::warp_sync ? other.flow == Flow::warp_sync : parked.pc == pc_;
        };
        for (const Parked& parked : c_.at_warp) {
            if (fits(parked)) {
                come |= same_members(ins_[parked.pc], k, parked.mask.w[k], members);
            }
        }
        if ((come & needed) != needed) {
            Parked parked{pc_, {}};
            parked.mask.w[k] = group;
            c_.at_warp.push_back(parked);
            return;
        }
        ready.w[k] |= group;
        for (size_t p = 0; p < c_.at_warp.size();) {
            Parked& parked = c_.at_warp[p];
            uint32_t lanes =
                fits(parked) ? same_members(ins_[parked.pc], k, parked.mask.w[k], members) : 0;
            parked.mask.w[k] &= ~lanes;
            if (parked.pc == pc_) {
                ready.w[k] |= lanes;
            } else if (lanes != 0) {
                Fragment released{parked.pc + 1, {}};
                released.mask.w[k] = lanes;
                c_.fragments.push_back(released);
            }
            if (parked.mask.any()) {
                ++p;
            } else {
                c_.at_warp.erase(c_.at_warp.begin() + static_cast<std::ptrdiff_t>(p));
            }
        }
    }

    Cta& c_;
    Machine& m_;
    const Ins* ins_;
    uint32_t pc_ = 0, limit_ = ~0u, count_ = 0, turn_ = 0;
    Mask mask_;
    uint64_t next_check_ = 0;
};

} // namespace

Status run_cta(Cta& c) {
    return Scheduler(c).run();
}

} // namespace flowgpu::emu::ptx
