// Branches, calls, barriers and warp operations.
#include <algorithm>
#include <unordered_map>

#include "lower.h"

namespace flowgpu::emu::ptx {

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
bool Lowering::call_builtin(const Body& callee, const std::vector<Operand>& results) {
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

void Lowering::call(const Statement& s) {
    Mods mods(s);
    mods.take("uni");
    mods.finish();
    size_t at = 0;
    std::vector<Operand> results, arguments;
    if (at < s.operands.size() && s.operands[at].kind == Operand::Kind::list) {
        results = s.operands[at++].elems;
    }
    if (at >= s.operands.size() || s.operands[at].kind != Operand::Kind::symbol) {
        bad("indirect calls are not supported");
    }
    const std::string& name = s.operands[at++].name;
    const Body* callee = ast_.find(name);
    if (!callee) {
        bad(name + ": no such function");
    }
    if (at < s.operands.size()) {
        arguments = s.operands[at++].elems;
    }
    if (at != s.operands.size()) {
        bad("indirect calls are not supported");
    }
    for (const Frame* f = frame_; f; f = f->caller) {
        if (f->body == callee) {
            bad(name + ": recursion is not supported");
        }
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
    if (!callee->defined) {
        if (!call_builtin(*callee, results)) {
            bad(name + ": function without a body");
        }
    } else {
        if (arguments.size() != callee->params.size() || results.size() != callee->returns.size()) {
            bad(name + ": wrong number of arguments");
        }
        Frame frame{callee, shape(*callee), {}, {}, frame_, {}, {}, {}, {}};
        for (const Operand& operand : arguments) {
            frame.params.push_back(argument(operand));
        }
        for (const Operand& operand : results) {
            frame.returns.push_back(argument(operand));
        }
        Frame* caller = frame_;
        uint32_t text = text_;
        expand(*callee, frame);
        finish_frame(frame);
        frame_ = caller;
        text_ = text;
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
