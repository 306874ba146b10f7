// Branches, calls, barriers and warp operations.
#include <algorithm>
#include <unordered_map>

#include "lanes.h"
#include "lower.h"

namespace flowgpu::emu::ptx {

namespace {

// As far as it matters here: arguments and results are bytes in memory of the caller's.
bool same_form(const std::vector<Declaration>& a, const std::vector<Declaration>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const Declaration& x, const Declaration& y) { return x.size == y.size; });
}

// For lanes with a pointer to no function of theirs, or to one that they are in already.
void illegal(Cta& c, const Ins&, const Mask& m) {
    for_lanes(c, m, [&](uint32_t l) { c.raise(Result::Code::illegal_instruction, 0, l); });
}

} // namespace

Lowering::Place Lowering::argument(const Operand& operand) {
    if (operand.kind == Operand::Kind::local) {
        return place(operand.index);
    }
    if (operand.kind == Operand::Kind::param && frame_->caller) {
        return operand.index >= Operand::ret_base
                   ? frame_->returns[operand.index - Operand::ret_base]
                   : frame_->params[operand.index];
    }
    bad("only .param variables can be passed");
}

// Functions of the device runtime that have no PTX.
bool Lowering::call_builtin(const Body& callee, const Operands& results) {
    if (callee.name == "__assertfail") {
        emit_flow(Flow::assert_fail);
        return true;
    }
    if (callee.name == "vprintf") { // prints nothing, and says that nothing was printed
        if (!results.empty()) {
            Ins& ins = emit(find_store(Type::b32, 4),
                            {constant(8, argument(results[0]).offset), constant(4, 0)});
            ins.space = Space::local;
        }
        return true;
    }
    return false;
}

// True for a function that is being expanded already, if a pointer leads to it again: that is known
// when it runs.
bool Lowering::recurs(const Body& callee, bool by_pointer) const {
    for (const Frame* f = frame_; f; f = f->caller) {
        if (f->body == &callee) {
            if (!by_pointer) {
                bad(callee.name + ": recursion is not supported");
            }
            return true;
        }
        by_pointer |= f->by_pointer;
    }
    return false;
}

void Lowering::call_body(const Body& callee, const Operands& results, const Operands& arguments,
                         bool by_pointer) {
    if (recurs(callee, by_pointer)) {
        emit(illegal, {});
        return;
    }
    if (!callee.defined) {
        if (!call_builtin(callee, results)) {
            bad(callee.name + ": function without a body");
        }
        return;
    }
    if (arguments.size() != callee.params.size() || results.size() != callee.returns.size()) {
        bad(callee.name + ": wrong number of arguments");
    }
    Frame frame{&callee, shape(callee), {}, {}, frame_, by_pointer, {}, {}, {}, {}};
    for (const Operand& operand : arguments) {
        frame.params.push_back(argument(operand));
    }
    for (const Operand& operand : results) {
        frame.returns.push_back(argument(operand));
    }
    Frame* caller = frame_;
    const Statement* statement = current_;
    uint32_t text = text_;
    expand(callee, frame);
    finish_frame(frame);
    frame_ = caller;
    current_ = statement;
    text_ = text;
}

// One expansion for each function that the pointer may lead to, which lanes with another skip.
void Lowering::call_through(const Operand& pointer, const Operand& label, const Operands& results,
                            const Operands& arguments) {
    auto found = frame_->body->callees.find(label.index);
    if (label.kind != Operand::Kind::label || found == frame_->body->callees.end() ||
        frame_->body->labels[label.index] >= frame_->pc_of_statement.size()) {
        bad("no .callprototype and no .calltargets at a label above it");
    }
    const Callees& callees = found->second;
    for (const std::string& name : callees.names) {
        const Body* body = ast_.find(name);
        if (!body || !body->defined || body->entry) {
            bad(name + ": no such function");
        }
    }
    const bool listed = !callees.names.empty();
    if (!listed &&
        (arguments.size() != callees.params.size() || results.size() != callees.returns.size())) {
        bad("wrong number of arguments");
    }
    Key equal;
    equal.op = "setp";
    equal.variant = "eq";
    equal.type = Type::u64;
    uint32_t address = source(pointer, Type::u64), same = temp(Type::pred);
    std::vector<uint32_t> to_end;
    for (const Body& body : ast_.bodies) {
        bool reached =
            listed ? std::count(callees.names.begin(), callees.names.end(), body.name) != 0
                   : body.defined && !body.entry && same_form(body.params, callees.params) &&
                         same_form(body.returns, callees.returns);
        if (!reached) {
            continue;
        }
        emit(find_compare(equal), {same, address, function_address(body, 8)});
        uint32_t skip = static_cast<uint32_t>(code_.ins.size());
        Ins& ins = emit_flow(Flow::branch);
        ins.pred = same;
        ins.pred_negated = true;
        call_body(body, results, arguments, true);
        to_end.push_back(static_cast<uint32_t>(code_.ins.size()));
        emit_flow(Flow::branch);
        code_.ins[skip].target = static_cast<uint32_t>(code_.ins.size());
    }
    emit(illegal, {});
    for (uint32_t ins : to_end) {
        code_.ins[ins].target = static_cast<uint32_t>(code_.ins.size());
    }
}

void Lowering::call(const Statement& s) {
    Mods mods(s);
    mods.take("uni");
    mods.finish();
    size_t at = 0;
    auto list = [&] {
        bool here = at < s.operands.size() && s.operands[at].kind == Operand::Kind::list;
        return here ? s.operands[at++].elems : Operands();
    };
    Operands results = list();
    if (at >= s.operands.size()) {
        bad("no function");
    }
    const Operand& callee = s.operands[at++];
    Operands arguments = list();
    bool by_pointer = callee.kind == Operand::Kind::reg;
    const Body* body = ast_.find(callee.name);
    if (!by_pointer && !body) {
        bad(callee.name + ": no such function");
    }
    if (s.operands.size() != at + by_pointer) {
        bad("wrong number of operands");
    }
    uint32_t skip = no_slot;
    Statement open = s; // the guard only decides whether the whole expansion runs
    if (s.pred != Statement::no_pred) {
        skip = static_cast<uint32_t>(code_.ins.size());
        Ins& ins = emit_flow(Flow::branch);
        ins.pred_negated = !ins.pred_negated;
        open.pred = Statement::no_pred;
    }
    current_ = &open;
    if (by_pointer) {
        call_through(callee, s.operands[at], results, arguments);
    } else {
        call_body(*body, results, arguments, false);
    }
    current_ = &s;
    if (skip != no_slot) {
        code_.ins[skip].target = static_cast<uint32_t>(code_.ins.size());
    }
}

void Lowering::branch_index(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    if (!mods.take("idx")) {
        bad("not supported");
    }
    mods.take("uni");
    mods.finish();
    auto list = frame_->body->branch_targets.find(s.operands[1].index);
    if (list == frame_->body->branch_targets.end()) {
        bad("no .branchtargets at the label");
    }
    uint32_t index = source(s.operands[0], Type::u32);
    uint32_t aux = static_cast<uint32_t>(code_.lists.size());
    code_.lists.push_back(list->second);
    frame_->lists.push_back(aux);
    Ins& ins = emit_flow(Flow::branch_index);
    ins.op[0] = index;
    ins.aux = aux;
}

void Lowering::barrier(const Statement& s) {
    Mods mods(s);
    if (mods.take("warp")) {
        bool sync = mods.take("sync");
        mods.finish();
        want(s, 1, 1);
        uint32_t mask = source(s.operands[0], Type::b32);
        if (!sync) {
            bad("not supported");
        }
        emit_flow(Flow::warp_sync).op[5] = mask;
        return;
    }
    mods.take("cta");
    mods.take("aligned");
    std::string kind = mods.take_any({"sync", "arrive", "red"});
    std::string reduction = mods.take_any({"popc", "and", "or"});
    if (kind.empty() || (kind == "red") == reduction.empty()) {
        bad("not supported");
    }
    bool reduces = kind == "red";
    if (reduces) {
        mods.type();
    }
    mods.finish();
    size_t first = reduces ? 1 : 0, last = s.operands.size() - (reduces ? 1 : 0);
    want(s, first + 1 + reduces, first + 2 + reduces);
    uint32_t id = source(s.operands[first], Type::u32);
    uint32_t count = last > first + 1 ? source(s.operands[first + 1], Type::u32) : no_slot;
    uint32_t value = reduces ? source(s.operands[last], Type::pred) : no_slot;
    uint32_t result = reduces
                          ? destination(s.operands[0], reduction == "popc" ? Type::u32 : Type::pred)
                          : no_slot;
    if (kind == "arrive" && count == no_slot) {
        bad("arrive needs a thread count");
    }
    Ins& ins = emit_flow(Flow::barrier);
    BarrierKind mode = kind == "sync"        ? BarrierKind::sync
                       : kind == "arrive"    ? BarrierKind::arrive
                       : reduction == "popc" ? BarrierKind::red_popc
                       : reduction == "and"  ? BarrierKind::red_and
                                             : BarrierKind::red_or;
    ins.mode = static_cast<uint8_t>(mode);
    ins.op[0] = id;
    ins.op[1] = count;
    ins.op[2] = result;
    ins.op[3] = value;
}

bool Lowering::lower_flow(const Statement& s) {
    if (s.op == "bra") {
        Mods mods(s);
        mods.take("uni");
        mods.finish();
        want(s, 1, 1);
        if (s.operands[0].kind != Operand::Kind::label) {
            bad("the target is not a label");
        }
        frame_->patches.push_back({static_cast<uint32_t>(code_.ins.size()), s.operands[0].index});
        emit_flow(Flow::branch);
    } else if (s.op == "brx") {
        branch_index(s);
    } else if (s.op == "call") {
        call(s);
    } else if (s.op == "ret" || s.op == "exit") {
        Mods mods(s);
        mods.take("uni");
        mods.finish();
        if (s.op == "ret" && frame_->caller) {
            frame_->to_end.push_back(static_cast<uint32_t>(code_.ins.size()));
            emit_flow(Flow::branch);
        } else {
            emit_flow(Flow::exit);
        }
    } else if (s.op == "trap" || s.op == "brkpt") {
        emit_flow(Flow::trap);
    } else if (s.op == "bar" || s.op == "barrier") {
        barrier(s);
    } else {
        return false;
    }
    return true;
}

void Lowering::shuffle(const Statement& s) {
    want(s, 5, 5);
    Mods mods(s);
    std::string mode = mods.take_any({"up", "down", "bfly", "idx"});
    bool sync = mods.take("sync");
    Type type = mods.type();
    mods.finish();
    if (!sync || mode.empty() || type != Type::b32) {
        bad("not supported");
    }
    uint32_t a = source(s.operands[1], type), b = source(s.operands[2], Type::u32);
    uint32_t c = source(s.operands[3], Type::u32), mask = source(s.operands[4], Type::u32);
    const std::vector<Operand>& second = s.operands[0].second;
    uint32_t p = second.empty() ? temp(Type::pred) : destination(second[0], Type::pred);
    Operand first = s.operands[0];
    first.second.clear();
    emit(find_warp("shfl", mode, type), {destination(first, type), p, a, b, c, mask}).flow =
        Flow::warp;
}

void Lowering::vote(const Statement& s) {
    want(s, 3, 3);
    Mods mods(s);
    bool sync = mods.take("sync");
    std::string mode = mods.take_any({"all", "any", "uni", "ballot"});
    Type type = mods.type();
    mods.finish();
    if (!sync || mode.empty() || type != (mode == "ballot" ? Type::b32 : Type::pred)) {
        bad("not supported");
    }
    uint32_t a = source(s.operands[1], Type::pred), mask = source(s.operands[2], Type::u32);
    emit(find_warp("vote", mode, type), {destination(s.operands[0], type), a, 0, 0, 0, mask}).flow =
        Flow::warp;
}

// match.any, match.all, redux: d, a, mask.
void Lowering::warp_operation(const Statement& s) {
    want(s, 3, 3);
    Mods mods(s);
    bool sync = mods.take("sync");
    std::string mode = mods.take_any({"any", "all", "add", "min", "max", "and", "or", "xor"});
    Type type = mods.type();
    mods.finish();
    if (!sync || (s.op == "match" && type != Type::b32 && type != Type::b64)) {
        bad("not supported");
    }
    uint32_t a = source(s.operands[1], type), mask = source(s.operands[2], Type::u32);
    const std::vector<Operand>& second = s.operands[0].second;
    uint32_t p = second.empty() ? temp(Type::pred) : destination(second[0], Type::pred);
    Operand first = s.operands[0];
    first.second.clear();
    Type result = s.op == "match" ? Type::b32 : type;
    emit(find_warp(s.op, mode, type), {destination(first, result), p, a, 0, 0, mask}).flow =
        Flow::warp;
}

bool Lowering::lower_warp(const Statement& s) {
    if (s.op == "shfl") {
        shuffle(s);
    } else if (s.op == "vote") {
        vote(s);
    } else if (s.op == "match" || s.op == "redux") {
        warp_operation(s);
    } else if (s.op == "activemask") {
        want(s, 1, 1);
        Mods mods(s);
        Type type = mods.type();
        mods.finish();
        emit(find_warp("activemask", "", type), {destination(s.operands[0], type)});
    } else {
        return false;
    }
    return true;
}

} // namespace flowgpu::emu::ptx
