// Frames, slots and operands.
#include "lower.h"

#include <algorithm>

#include "float_bits.h"

namespace flowgpu::emu::ptx {

namespace {
constexpr size_t most_instructions = 1u << 21; // after the expansion of all calls
constexpr uint64_t most_shared = 48u << 10;    // bytes of static shared memory a CTA, as ptxas
constexpr uint32_t most_slots = 1u << 20;      // bytes of registers a thread
constexpr uint64_t most_local = 512u << 10;    // bytes a thread, as on hardware
} // namespace

uint32_t align_up(uint64_t value, uint32_t align) {
    return static_cast<uint32_t>((value + align - 1) / align * align);
}

bool Mods::take(std::string_view name) {
    auto found = std::find(left_.begin(), left_.end(), name);
    if (found == left_.end()) {
        return false;
    }
    left_.erase(found);
    return true;
}

std::string Mods::take_any(std::initializer_list<std::string_view> names) {
    for (std::string_view name : names) {
        if (take(name)) {
            return std::string(name);
        }
    }
    return {};
}

std::optional<Type> Mods::take_type() {
    for (auto it = left_.begin(); it != left_.end(); ++it) {
        if (auto type = type_from(*it)) {
            left_.erase(it);
            return type;
        }
    }
    return std::nullopt;
}

Type Mods::type() {
    auto type = take_type();
    if (!type) {
        fail(statement_.line, statement_.op + ": no known type");
    }
    return *type;
}

void Mods::finish() const {
    if (!left_.empty()) {
        fail(statement_.line, statement_.op + ": unknown modifier ." + left_[0]);
    }
}

void Lowering::bad(const std::string& why) const {
    std::string name = current_->op;
    for (const std::string& mod : current_->mods) {
        name += "." + mod;
    }
    fail(current_->line, name + ": " + why);
}

void Lowering::want(const Statement& s, size_t low, size_t high) const {
    if (s.operands.size() < low || s.operands.size() > high) {
        bad("wrong number of operands");
    }
}

Ins& Lowering::emit(Handler fn, std::initializer_list<uint32_t> op) {
    if (!fn) {
        bad("not supported");
    }
    if (code_.ins.size() >= most_instructions) {
        bad("too many instructions after the expansion of calls");
    }
    Ins ins;
    ins.fn = fn;
    std::copy(op.begin(), op.end(), ins.op);
    ins.pred = no_slot;
    if (current_->pred != Statement::no_pred) {
        ins.pred = frame_->shape->registers[current_->pred];
        ins.pred_negated = current_->pred_negated;
    }
    ins.line = current_->line;
    ins.text = text_;
    code_.ins.push_back(ins);
    return code_.ins.back();
}

Ins& Lowering::emit_flow(Flow flow) {
    static constexpr auto none = [](Cta&, const Ins&, const Mask&) {};
    Ins& ins = emit(none, {});
    ins.flow = flow;
    return ins;
}

uint32_t Lowering::new_slot(uint32_t bytes) {
    uint32_t slot = code_.slot_bytes;
    if (slot + bytes > most_slots) {
        fail(frame_ ? current_->line : 0, function_.name + ": too many registers");
    }
    code_.slot_bytes += bytes;
    return slot;
}

uint32_t Lowering::constant(uint32_t bytes, uint64_t value) {
    value = bytes == 8 ? value : value & ((1ull << (8 * bytes)) - 1);
    auto [it, fresh] = constants_.try_emplace({bytes, value}, 0);
    if (fresh) {
        it->second = address_constant(Constant::Kind::value, bytes, value, 0);
    }
    return it->second;
}

uint32_t Lowering::address_constant(Constant::Kind kind, uint32_t bytes, uint64_t value,
                                    uint32_t index) {
    uint32_t slot = new_slot(bytes);
    code_.constants.push_back({kind, static_cast<uint8_t>(bytes), slot, value, index});
    return slot;
}

uint32_t Lowering::special(const std::string& name, uint32_t* bytes) {
    static const std::map<std::string, SpecialKind> kinds{
        {"%tid.x", SpecialKind::tid_x},
        {"%tid.y", SpecialKind::tid_y},
        {"%tid.z", SpecialKind::tid_z},
        {"%ntid.x", SpecialKind::ntid_x},
        {"%ntid.y", SpecialKind::ntid_y},
        {"%ntid.z", SpecialKind::ntid_z},
        {"%ctaid.x", SpecialKind::ctaid_x},
        {"%ctaid.y", SpecialKind::ctaid_y},
        {"%ctaid.z", SpecialKind::ctaid_z},
        {"%nctaid.x", SpecialKind::nctaid_x},
        {"%nctaid.y", SpecialKind::nctaid_y},
        {"%nctaid.z", SpecialKind::nctaid_z},
        {"%laneid", SpecialKind::laneid},
        {"%warpid", SpecialKind::warpid},
        {"%nwarpid", SpecialKind::nwarpid},
        {"%lanemask_eq", SpecialKind::mask_eq},
        {"%lanemask_le", SpecialKind::mask_le},
        {"%lanemask_lt", SpecialKind::mask_lt},
        {"%lanemask_ge", SpecialKind::mask_ge},
        {"%lanemask_gt", SpecialKind::mask_gt},
        {"%smid", SpecialKind::smid},
        {"%nsmid", SpecialKind::nsmid},
        {"%gridid", SpecialKind::gridid},
        {"%dynamic_smem_size", SpecialKind::dynamic_smem},
        {"%total_smem_size", SpecialKind::total_smem},
        {"%aggr_smem_size", SpecialKind::total_smem},
        {"%clock", SpecialKind::clock},
        {"%clock_hi", SpecialKind::clock_hi},
        {"%clock64", SpecialKind::clock64},
        {"%globaltimer", SpecialKind::globaltimer},
        {"%globaltimer_lo", SpecialKind::globaltimer_lo},
        {"%globaltimer_hi", SpecialKind::globaltimer_hi}};
    auto kind = kinds.find(name);
    if (kind == kinds.end()) {
        bad("special register " + name + " is not supported");
    }
    bool wide = name == "%clock64" || name == "%globaltimer" || name == "%gridid";
    *bytes = wide ? 8 : 4;
    if (Handler read = find_special(kind->second)) {
        uint32_t slot = new_slot(*bytes);
        emit(read, {slot});
        return slot;
    }
    auto [it, fresh] = specials_.try_emplace(name, 0);
    if (fresh) {
        it->second = new_slot(*bytes);
        code_.specials.push_back({kind->second, static_cast<uint8_t>(*bytes), it->second});
    }
    return it->second;
}

uint32_t Lowering::allocate_local(uint64_t size, uint32_t align) {
    uint32_t offset = align_up(function_.local_bytes, align);
    if (size > most_local || offset + size > most_local) {
        fail(frame_->body->line, frame_->body->name + ": more than 512 KiB of local memory");
    }
    function_.local_bytes = offset + static_cast<uint32_t>(size);
    return offset;
}

uint32_t Lowering::shared_offset(const Declaration& decl) {
    auto [it, fresh] = shared_.try_emplace(&decl, 0);
    if (fresh) {
        it->second = align_up(function_.static_shared_bytes, decl.align);
        if (it->second + decl.size > most_shared) {
            fail(decl.line, decl.name + ": more than 48 KiB of static shared memory");
        }
        function_.static_shared_bytes = it->second + static_cast<uint32_t>(decl.size);
    }
    return it->second;
}

Lowering::Place& Lowering::place(uint32_t index) {
    Place& place = frame_->shape->variables[index];
    const Declaration& decl = frame_->body->variables[index];
    if (!place.allocated) {
        place.allocated = true;
        place.space = decl.space == Declaration::Space::shared ? Space::shared : Space::local;
        place.offset = place.space == Space::shared ? shared_offset(decl)
                                                    : allocate_local(decl.size, decl.align);
    }
    return place;
}

uint32_t Lowering::literal(const Operand& operand, Type type) {
    uint32_t bytes = slot_size(type);
    if (type == Type::pred) {
        return constant(1, operand.bits != 0);
    }
    if (operand.literal == Operand::Literal::integer) {
        return constant(bytes, operand.bits);
    }
    double value = operand.literal == Operand::Literal::f64
                       ? bit_cast<double>(operand.bits)
                       : static_cast<double>(bit_cast<float>(static_cast<uint32_t>(operand.bits)));
    if (bytes == 8) {
        bool same = operand.literal == Operand::Literal::f64;
        return constant(8, same ? operand.bits : bit_cast<uint64_t>(value));
    }
    if (type == Type::f16) {
        return constant(2, narrow<Half>(value).bits);
    }
    if (type == Type::bf16) {
        return constant(2, narrow<Bfloat>(value).bits);
    }
    if (bytes != 4) {
        bad("floating-point constant of another type");
    }
    bool same = operand.literal == Operand::Literal::f32;
    return constant(4, same ? operand.bits : bit_cast<uint32_t>(static_cast<float>(value)));
}

uint32_t Lowering::symbol(const Operand& operand, uint32_t bytes) {
    if (bytes != 8 && bytes != 4) {
        bad(operand.name + ": an address needs a 32-bit or 64-bit register");
    }
    const Declaration* decl = ast_.variable(operand.name);
    if (!decl) {
        const Body* body = ast_.find(operand.name);
        if (!body || operand.offset != 0) {
            bad(operand.name +
                (body ? ": no arithmetic with the address of a function" : ": no such symbol"));
        }
        return function_address(*body, bytes);
    }
    uint64_t offset = static_cast<uint64_t>(operand.offset);
    if (decl->space == Declaration::Space::shared) {
        if (decl->external || decl->size == 0) {
            code_.dynamic_shared_align = std::max(code_.dynamic_shared_align, decl->align);
            return address_constant(Constant::Kind::dynamic_shared, bytes, offset, 0);
        }
        return constant(bytes, shared_offset(*decl) + offset);
    }
    uint32_t index = 0;
    for (const Declaration& other : ast_.variables) {
        if (&other == decl) {
            break;
        }
        index += other.space != Declaration::Space::shared;
    }
    return address_constant(Constant::Kind::variable, bytes, offset, index);
}

uint32_t Lowering::function_address(const Body& body, uint32_t bytes) {
    if (!body.defined) {
        bad(body.name + ": a function without a body has no address");
    }
    auto [it, fresh] = function_addresses_.try_emplace({&body, bytes}, 0);
    if (fresh) {
        uint32_t index = 0;
        for (const Body& other : ast_.bodies) {
            if (&other == &body) {
                break;
            }
            index += other.defined;
        }
        it->second = address_constant(Constant::Kind::function, bytes, 0, index);
    }
    return it->second;
}

uint32_t Lowering::register_slot(const Operand& operand, uint32_t* bytes) {
    *bytes = slot_size(frame_->body->registers[operand.index]);
    return frame_->shape->registers[operand.index];
}

uint32_t Lowering::wide_source(const Operand& operand, Type type, uint32_t* bytes) {
    *bytes = slot_size(type);
    switch (operand.kind) {
    case Operand::Kind::reg: {
        uint32_t slot = register_slot(operand, bytes);
        if (operand.negated) {
            uint32_t inverse = new_slot(1);
            emit(find_predicate("not"), {inverse, slot});
            return inverse;
        }
        return slot;
    }
    case Operand::Kind::imm:
        return literal(operand, type);
    case Operand::Kind::special:
        return special(operand.name, bytes);
    case Operand::Kind::local:
        return constant(*bytes,
                        place(operand.index).offset + static_cast<uint64_t>(operand.offset));
    case Operand::Kind::param: {
        bool result = operand.index >= Operand::ret_base;
        const Place& at = result ? frame_->returns[operand.index - Operand::ret_base]
                                 : frame_->params[operand.index];
        return constant(*bytes, at.offset + static_cast<uint64_t>(operand.offset));
    }
    case Operand::Kind::symbol:
        return symbol(operand, *bytes);
    default:
        bad("unexpected operand");
    }
}

// A register fits where its type or the instruction's is untyped bits, where both are integers, and
// where they are the same.
void Lowering::want_type(const Operand& operand, Type type) const {
    Type own = frame_->body->registers[operand.index];
    bool untyped = (own >= Type::b8 && own <= Type::b64) || (type >= Type::b8 && type <= Type::b64);
    bool integers = !is_float(own) && !is_float(type);
    bool packed = type == Type::u16x2 || type == Type::s16x2;
    if (!untyped && own != type && (!integers || packed)) {
        bad("operand of another type");
    }
}

uint32_t Lowering::source(const Operand& operand, Type type) {
    uint32_t bytes = 0;
    uint32_t slot = wide_source(operand, type, &bytes);
    if (bytes == slot_size(type)) {
        if (operand.kind == Operand::Kind::reg) {
            want_type(operand, type);
        }
        return slot;
    }
    if (operand.kind == Operand::Kind::special) {
        uint32_t resized = temp(type);
        emit(find_extend(bytes == 8 ? Type::u64 : Type::u32, slot_size(type)), {resized, slot});
        return resized;
    }
    bad("operand and type differ in size");
}

uint32_t Lowering::destination(const Operand& operand, Type type) {
    if (operand.kind == Operand::Kind::sink) {
        return temp(type);
    }
    if (operand.kind != Operand::Kind::reg || operand.negated) {
        bad("the destination is not a register");
    }
    uint32_t bytes = 0;
    uint32_t slot = register_slot(operand, &bytes);
    if (bytes != slot_size(type)) {
        bad("destination and type differ in size");
    }
    want_type(operand, type);
    return slot;
}

Lowering::Address Lowering::address(const Operand& operand, Space space) {
    if (operand.kind != Operand::Kind::memory) {
        bad("expected an address in brackets");
    }
    const Operand& base = operand.elems[0];
    if (base.kind == Operand::Kind::symbol && !ast_.variable(base.name)) {
        bad(base.name + ": no such variable");
    }
    if (space == Space::param) {
        bool own = base.kind == Operand::Kind::local ||
                   (base.kind == Operand::Kind::param && frame_->caller) ||
                   (base.kind == Operand::Kind::reg && frame_->caller);
        space = own ? Space::local : Space::param;
    }
    uint32_t bytes = 8;
    uint32_t slot = wide_source(base, Type::u64, &bytes);
    if (bytes != 8 && bytes != 4) {
        bad("an address needs a 32-bit or 64-bit register");
    }
    return {space, slot, bytes == 8, operand.offset};
}

Lowering::Shape* Lowering::shape(const Body& body) {
    auto [it, fresh] = shapes_.try_emplace(&body);
    if (fresh) {
        for (Type type : body.registers) {
            it->second.registers.push_back(temp(type));
        }
        it->second.variables.resize(body.variables.size());
    }
    return &it->second;
}

void Lowering::entry(const Body& body) {
    Statement end;
    end.op = "exit";
    end.line = body.line;
    current_ = &end;
    Frame frame{&body, shape(body), {}, {}, nullptr, false, {}, {}, {}, {}};
    for (const Param& param : function_.params) {
        frame.params.push_back({Space::param, param.offset, true});
    }
    if (!body.entry) { // checked for its own sake, never launched
        frame_ = &frame;
        for (const Declaration& result : body.returns) {
            frame.returns.push_back(
                {Space::local, allocate_local(result.size, result.align), true});
        }
    }
    expand(body, frame);
    current_ = &end;
    frame_ = &frame;
    emit_flow(Flow::exit);
    finish_frame(frame);
}

void Lowering::expand(const Body& body, Frame& frame) {
    for (const Statement& s : body.statements) {
        frame_ = &frame;
        frame.pc_of_statement.push_back(static_cast<uint32_t>(code_.ins.size()));
        statement(s);
    }
    frame_ = &frame;
}

void Lowering::finish_frame(Frame& frame) {
    auto pc_of = [&](uint32_t label) {
        uint32_t statement = frame.body->labels[label];
        return statement < frame.pc_of_statement.size() ? frame.pc_of_statement[statement]
                                                        : static_cast<uint32_t>(code_.ins.size());
    };
    uint32_t end = static_cast<uint32_t>(code_.ins.size()) - (frame.caller ? 0 : 1);
    for (const Frame::Patch& patch : frame.patches) {
        code_.ins[patch.ins].target = std::min(pc_of(patch.label), end);
    }
    for (uint32_t ins : frame.to_end) {
        code_.ins[ins].target = end;
    }
    for (uint32_t list : frame.lists) {
        for (uint32_t& target : code_.lists[list]) {
            target = std::min(pc_of(target), end);
        }
    }
}

void Lowering::statement(const Statement& s) {
    current_ = &s;
    std::string text = s.op;
    for (const std::string& mod : s.mods) {
        text += "." + mod;
    }
    auto [it, fresh] = texts_.try_emplace(text, static_cast<uint32_t>(code_.texts.size()));
    if (fresh) {
        code_.texts.push_back(text);
    }
    text_ = it->second;
    if (!lower_flow(s) && !lower_warp(s) && !lower_matrix(s) && !lower_memory(s) &&
        !lower_texture(s) && !lower_move(s) && !lower_alu(s)) {
        fail(s.line, "unknown instruction " + text);
    }
}

} // namespace flowgpu::emu::ptx
