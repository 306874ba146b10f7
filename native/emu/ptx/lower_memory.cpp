// Loads, stores, atomics, asynchronous copies and fences.
#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_map>

#include "lower.h"

namespace flowgpu::emu::ptx {

namespace {

constexpr uint32_t most_vector = 16; // bytes of one access

// Cache operators and hints change no value.
void take_hints(Mods& mods, bool* hint_operand) {
    mods.take_any({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
    mods.take_any({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
                   "L1::no_allocate"});
    mods.take_any({"L2::evict_last", "L2::evict_normal", "L2::evict_first"});
    mods.take_any({"L2::64B", "L2::128B", "L2::256B"});
    *hint_operand = mods.take("L2::cache_hint");
}

void take_scope(Mods& mods) {
    mods.take_any({"cta", "cluster", "gpu", "sys"});
}

} // namespace

void Lowering::access(const Statement& s, bool load) {
    Mods mods(s);
    std::string order =
        mods.take_any({"mmio", "volatile", "relaxed", "acquire", "release", "weak"});
    if (order == "mmio") {
        mods.take("relaxed");
    }
    take_scope(mods);
    std::string space = mods.take_any({"global", "const", "shared", "shared::cta", "local", "param",
                                       "param::entry", "param::func"});
    bool hint = false;
    mods.take("nc");
    take_hints(mods, &hint);
    std::string vector = mods.take_any({"v2", "v4", "v8"});
    Type type = copied(mods);
    mods.finish();
    want(s, 2, hint ? 3 : 2);
    Space where = space.empty()                           ? Space::generic
                  : space == "global" || space == "const" ? Space::global
                  : space == "local"                      ? Space::local
                  : space.rfind("param", 0) == 0          ? Space::param
                                                          : Space::shared;
    uint32_t count = vector.empty() ? 1 : static_cast<uint32_t>(vector[1] - '0');
    Address at = address(s.operands[load ? 1 : 0], where);
    const Operand& data = s.operands[load ? 0 : 1];
    std::vector<Operand> elems =
        data.kind == Operand::Kind::vector ? data.elems : std::vector<Operand>{data};
    if (elems.size() != count || count * size_of(type) > most_vector) {
        bad("wrong number of vector elements");
    }
    if (type == Type::pred) {
        bad("not supported");
    }
    uint32_t slots[6] = {at.slot}, register_bytes = 0;
    for (uint32_t e = 0; e < count; ++e) {
        uint32_t bytes = slot_size(type);
        if (elems[e].kind == Operand::Kind::reg && !elems[e].negated) {
            want_type(elems[e], type);
            slots[1 + e] = register_slot(elems[e], &bytes);
        } else if (load && elems[e].kind == Operand::Kind::sink) {
            bytes = register_bytes ? register_bytes : bytes;
            slots[1 + e] = new_slot(bytes);
        } else if (load) {
            bad("the destination is not a register");
        } else {
            slots[1 + e] = wide_source(elems[e], type, &bytes);
        }
        if (bytes < slot_size(type) || (register_bytes != 0 && bytes != register_bytes)) {
            bad("operand and type differ in size");
        }
        register_bytes = bytes;
    }
    Handler fn = load ? find_load(type, register_bytes) : find_store(type, register_bytes);
    Ins& ins = emit(fn, {slots[0], slots[1], slots[2], slots[3], slots[4]});
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
    ins.count = static_cast<uint8_t>(count);
    ins.spins = load && (where == Space::global || where == Space::generic) && !order.empty() &&
                order != "weak";
}

void Lowering::atomic(const Statement& s, bool returns) {
    Mods mods(s);
    mods.take_any({"relaxed", "acquire", "release", "acq_rel"});
    take_scope(mods);
    std::string space = mods.take_any({"global", "shared", "shared::cta"});
    bool hint = false;
    take_hints(mods, &hint);
    bool noftz = mods.take("noftz");
    std::string op =
        mods.take_any({"add", "min", "max", "exch", "cas", "and", "or", "xor", "inc", "dec"});
    Type type = mods.type();
    mods.finish();
    if (noftz != (type == Type::f16 || type == Type::f16x2)) {
        bad("not supported");
    }
    Space where = space.empty()       ? Space::generic
                  : space == "global" ? Space::global
                                      : Space::shared;
    size_t first = returns ? 1 : 0, values = op == "cas" ? 2 : 1;
    want(s, first + 1 + values, first + 1 + values + hint);
    Address at = address(s.operands[first], where);
    uint32_t a = source(s.operands[first + 1], type);
    uint32_t b = values == 2 ? source(s.operands[first + 2], type) : no_slot;
    uint32_t d = returns ? destination(s.operands[0], type) : no_slot;
    Ins& ins = emit(find_atomic(op, type, returns), {at.slot, d, a, b});
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
    ins.spins = true;
}

void Lowering::async_copy(const Statement& s) {
    Mods mods(s);
    mods.take("async");
    if (mods.take("commit_group") || mods.take("wait_all") || mods.take("wait_group")) {
        mods.finish(); // the copies are complete already
        return;
    }
    if (mods.take("mbarrier")) {
        async_arrive(s);
        return;
    }
    mods.take_any({"ca", "cg"});
    bool shared = mods.take("shared") || mods.take("shared::cta");
    bool global = mods.take("global");
    bool hint = false;
    take_hints(mods, &hint);
    mods.finish();
    want(s, 3, hint ? 5 : 4);
    const Operand& size = s.operands[2];
    if (!shared || !global || size.kind != Operand::Kind::imm ||
        (size.bits != 4 && size.bits != 8 && size.bits != 16)) {
        bad("not supported");
    }
    Address to = address(s.operands[0], Space::shared),
            from = address(s.operands[1], Space::global);
    bool sized = s.operands.size() > 3u + hint;
    uint32_t valid = no_slot;
    if (sized && s.operands[3].kind == Operand::Kind::reg &&
        frame_->body->registers[s.operands[3].index] == Type::pred) { // ignores the source
        valid = new_slot(4);
        uint32_t ignored = source(s.operands[3], Type::pred);
        emit(find_select("selp", Type::b32, Type::pred),
             {valid, constant(4, 0), constant(4, size.bits), ignored});
    } else if (sized) {
        valid = source(s.operands[3], Type::u32);
    }
    if (!from.wide || from.offset < 0) {
        bad("not supported");
    }
    Ins& ins = emit(find_async_copy(sized), {to.slot, from.slot, valid});
    ins.wide_address = to.wide;
    ins.imm = to.offset;
    ins.aux = static_cast<uint32_t>(from.offset);
    ins.count = static_cast<uint8_t>(size.bits);
}

// cp.async.mbarrier.arrive{.noinc}{.shared}.b64 [addr]
void Lowering::async_arrive(const Statement& s) {
    want(s, 1, 1);
    Mods mods(s);
    bool form = mods.take("async") && mods.take("mbarrier") && mods.take("arrive");
    bool counted = mods.take("noinc");
    bool shared = mods.take("shared") || mods.take("shared::cta");
    Type type = mods.type();
    mods.finish();
    if (!form || type != Type::b64) {
        bad("not supported");
    }
    Address at = address(s.operands[0], shared ? Space::shared : Space::generic);
    Ins& ins = emit(find_mbarrier(counted ? "arrive" : "cp.async"),
                    {at.slot, constant(4, 1), counted ? new_slot(8) : no_slot});
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
}

void Lowering::mbarrier(const Statement& s) {
    Mods mods(s);
    std::string op =
        mods.take_any({"init", "inval", "arrive", "arrive_drop", "test_wait", "pending_count"});
    bool arrives = op == "arrive" || op == "arrive_drop", waits = op == "test_wait";
    bool incomplete = arrives && mods.take("noComplete"), parity = waits && mods.take("parity");
    bool shared = mods.take("shared") || mods.take("shared::cta");
    Type type = mods.type();
    mods.finish();
    if (type != Type::b64) {
        bad("not supported");
    }
    Handler fn = find_mbarrier(op + (incomplete ? ".noComplete" : parity ? ".parity" : ""));
    if (op == "pending_count") {
        want(s, 2, 2);
        uint32_t state = source(s.operands[1], Type::b64);
        emit(fn, {destination(s.operands[0], Type::u32), state});
        return;
    }
    bool returns = arrives || waits, valued = op == "init" || waits || incomplete;
    size_t least = 1u + returns + valued; // an arrival's count is one if none is given
    want(s, least, arrives ? 3 : least);
    Address at = address(s.operands[returns], shared ? Space::shared : Space::generic);
    uint32_t value = no_slot, result = no_slot;
    if (s.operands.size() > 1u + returns) {
        value = source(s.operands[1 + returns], waits && !parity ? Type::b64 : Type::u32);
    } else if (arrives) {
        value = constant(4, 1);
    }
    if (returns) {
        result = destination(s.operands[0], waits ? Type::pred : Type::b64);
    }
    Ins& ins = emit(fn, {at.slot, value, result});
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
}

namespace {

// A block that is alone in its grid lets the host's processor go: what it waits for is another
// launch's, or the host's. Others take turns with the blocks of their grid.
void nap(Cta& c, const Ins& i, const Mask& m) {
    constexpr uint32_t longest = 1000000; // ns, as the ISA has it
    const uint32_t* grid = c.m.launch.grid;
    if (grid[0] * grid[1] * grid[2] != 1 || !m.any()) {
        return;
    }
    uint32_t lane = 0;
    while (!(m.w[lane / warp_size] >> (lane % warp_size) & 1)) {
        ++lane;
    }
    const uint32_t ns = std::min(c.reg<uint32_t>(i.op[0])[lane], longest);
    std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
    c.m.steps += ns; // the clock; so the launch soon looks whether it is cancelled
}

} // namespace

// Instructions that change no value: the modifiers and numbers of operands that they may have.
bool Lowering::hint(const Statement& s) {
    struct Form {
        std::vector<std::string_view> mods;
        size_t least, most;
    };
    static const std::unordered_map<std::string, Form> forms{
        {"prefetch", {{"global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal"}, 1, 1}},
        {"prefetchu", {{"L1"}, 1, 1}},
        {"discard", {{"global", "L2"}, 2, 2}},
        {"applypriority", {{"global", "L2::evict_normal"}, 2, 2}},
        {"pmevent", {{"mask"}, 1, 1}},
        {"nanosleep", {{"u32"}, 1, 1}},
        {"createpolicy",
         {{"fractional", "range", "cvt", "global", "L2", "L2::evict_last", "L2::evict_normal",
           "L2::evict_first", "L2::evict_unchanged", "b64"},
          2,
          4}}};
    auto form = forms.find(s.op);
    if (form == forms.end()) {
        return false;
    }
    Mods mods(s);
    for (std::string_view name : form->second.mods) {
        mods.take(name);
    }
    mods.finish();
    want(s, form->second.least, form->second.most);
    if (s.op == "createpolicy") {
        emit(find_move(8), {destination(s.operands[0], Type::b64), constant(8, 0)});
    } else if (s.op == "nanosleep") {
        emit(nap, {source(s.operands[0], Type::u32)}).spins = true;
    } else {
        emit([](Cta&, const Ins&, const Mask&) {}, {});
    }
    return true;
}

bool Lowering::lower_memory(const Statement& s) {
    if (s.op == "ld" || s.op == "ldu") {
        access(s, true);
    } else if (s.op == "st") {
        access(s, false);
    } else if (s.op == "atom" || s.op == "red") {
        atomic(s, s.op == "atom");
    } else if (s.op == "cp") {
        async_copy(s);
    } else if (s.op == "mbarrier") {
        mbarrier(s);
    } else if (s.op == "membar" || s.op == "fence") {
        Mods mods(s);
        if (mods.take("proxy") && !mods.take("alias")) {
            bad("not supported");
        }
        mods.take_any({"sc", "acq_rel", "acquire", "release"});
        mods.take_any({"cta", "gl", "gpu", "sys", "cluster"});
        mods.finish();
        emit([](Cta&, const Ins&, const Mask&) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }, {});
    } else {
        return hint(s);
    }
    return true;
}

} // namespace flowgpu::emu::ptx
