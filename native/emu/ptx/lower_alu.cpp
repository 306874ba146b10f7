// Arithmetic, comparisons, conversions and moves.
#include <unordered_map>

#include "lower.h"

namespace flowgpu::emu::ptx {

namespace {

Round round_of(const std::string& name) {
    static const std::unordered_map<std::string, Round> rounds{
        {"rn", Round::rn},   {"rz", Round::rz},   {"rm", Round::rm},
        {"rp", Round::rp},   {"rni", Round::rni}, {"rzi", Round::rzi},
        {"rmi", Round::rmi}, {"rpi", Round::rpi}, {"rna", Round::rna}};
    auto found = rounds.find(name);
    return found == rounds.end() ? Round::none : found->second;
}

// Operands by opcode, destination first. t: of the instruction's type, u: 32 bits, w: double width.
const std::unordered_map<std::string, std::string_view>& forms() {
    static const std::unordered_map<std::string, std::string_view> table{
        {"add", "ttt"},      {"sub", "ttt"},    {"addc", "ttt"},   {"subc", "ttt"},
        {"mul", "ttt"},      {"mad", "tttt"},   {"madc", "tttt"},  {"fma", "tttt"},
        {"mul24", "ttt"},    {"mad24", "tttt"}, {"sad", "tttt"},   {"div", "ttt"},
        {"rem", "ttt"},      {"abs", "tt"},     {"neg", "tt"},     {"min", "ttt"},
        {"max", "ttt"},      {"and", "ttt"},    {"or", "ttt"},     {"xor", "ttt"},
        {"not", "tt"},       {"cnot", "tt"},    {"lop3", "ttttu"}, {"shl", "ttu"},
        {"shr", "ttu"},      {"shf", "tttu"},   {"popc", "ut"},    {"clz", "ut"},
        {"bfind", "ut"},     {"brev", "tt"},    {"bfe", "ttuu"},   {"bfi", "tttuu"},
        {"fns", "utuu"},     {"bmsk", "ttt"},   {"szext", "ttu"},  {"prmt", "tttu"},
        {"copysign", "ttt"}, {"rcp", "tt"},     {"sqrt", "tt"},    {"rsqrt", "tt"},
        {"sin", "tt"},       {"cos", "tt"},     {"lg2", "tt"},     {"ex2", "tt"},
        {"tanh", "tt"}};
    return table;
}

Type widened(Type type) {
    switch (type) {
    case Type::u16:
        return Type::u32;
    case Type::s16:
        return Type::s32;
    case Type::u32:
        return Type::u64;
    default:
        return Type::s64;
    }
}

} // namespace

Key key_of(Mods& mods, const std::string& op) {
    Key key;
    key.op = op;
    key.round =
        round_of(mods.take_any({"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"}));
    key.ftz = mods.take("ftz");
    key.sat = mods.take("sat");
    key.nan = mods.take("NaN");
    key.relu = mods.take("relu");
    key.satfinite = mods.take("satfinite");
    for (std::string_view part : {"lo", "hi", "wide", "approx", "full", "l", "r", "clamp", "wrap",
                                  "cc", "shiftamt", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) {
        if (mods.take(part)) {
            key.variant += (key.variant.empty() ? "" : ".") + std::string(part);
        }
    }
    return key;
}

void Lowering::arithmetic(const Statement& s, std::string_view form) {
    Mods mods(s);
    Key key = key_of(mods, s.op);
    key.type = mods.type();
    mods.finish();
    if (key.type == Type::pred) {
        predicate(s);
        return;
    }
    bool wide = key.variant == "wide";
    std::string shape(form);
    if (wide) {
        shape[0] = 'w';
        if (shape.size() == 4) {
            shape[3] = 'w';
        }
    }
    want(s, shape.size(), shape.size());
    uint32_t slots[6] = {};
    for (size_t k = 1; k <= shape.size(); ++k) { // sources first: they may need instructions
        size_t at = k == shape.size() ? 0 : k;
        Type type = shape[at] == 'u' ? Type::u32 : shape[at] == 'w' ? widened(key.type) : key.type;
        slots[at] = at == 0 ? destination(s.operands[0], type) : source(s.operands[at], type);
    }
    bool carries = key.variant.find("cc") != std::string::npos || s.op == "addc" ||
                   s.op == "subc" || s.op == "madc";
    if (carries) {
        carry_ = carry_ == no_slot ? new_slot(4) : carry_;
        slots[5] = carry_;
    }
    Handler fn = find_integer(key);
    fn = fn ? fn : find_float(key);
    fn = fn ? fn : find_half(key);
    emit(fn, {slots[0], slots[1], slots[2], slots[3], slots[4], slots[5]});
}

void Lowering::predicate(const Statement& s) {
    Handler fn = find_predicate(s.op);
    if (s.op == "not" || s.op == "mov") {
        want(s, 2, 2);
        uint32_t a = source(s.operands[1], Type::pred);
        emit(fn, {destination(s.operands[0], Type::pred), a});
        return;
    }
    want(s, 3, 3);
    uint32_t a = source(s.operands[1], Type::pred), b = source(s.operands[2], Type::pred);
    emit(fn, {destination(s.operands[0], Type::pred), a, b});
}

void Lowering::mov_vector(const Statement& s, Type type) {
    bool packs = s.operands[1].kind == Operand::Kind::vector;
    const Operand& vector = s.operands[packs ? 1 : 0];
    uint32_t total = slot_size(type), count = static_cast<uint32_t>(vector.elems.size());
    if (type < Type::b16 || type > Type::b64) {
        bad("not supported");
    }
    if ((count != 1 && count != 2 && count != 4) || count > total) {
        bad("wrong number of vector elements");
    }
    uint32_t each = total / count;
    Type element = each == 1 ? Type::b8 : each == 2 ? Type::b16 : each == 4 ? Type::b32 : Type::b64;
    for (const Operand& operand : vector.elems) { // 8-bit registers are as long as 16-bit ones
        if (operand.kind == Operand::Kind::reg &&
            size_of(frame_->body->registers[operand.index]) != each) {
            bad("operand of another type");
        }
    }
    uint32_t slots[6] = {};
    if (packs) {
        for (uint32_t e = 0; e < count; ++e) {
            slots[1 + e] = source(vector.elems[e], element);
        }
        slots[0] = destination(s.operands[0], type);
    } else {
        for (uint32_t e = 0; e < count; ++e) {
            slots[e] = destination(vector.elems[e], element);
        }
        slots[count] = source(s.operands[1], type);
    }
    Handler fn = count == 1 ? find_move(total)
                 : packs    ? find_pack(each, total)
                            : find_unpack(total, each);
    emit(fn, {slots[0], slots[1], slots[2], slots[3], slots[4]});
}

// Narrow floats are copied as untyped bits alone.
Type Lowering::copied(Mods& mods) const {
    Type type = mods.type();
    if (is_float(type) && type != Type::f32 && type != Type::f64) {
        bad("not supported");
    }
    return type;
}

void Lowering::mov(const Statement& s) {
    Mods mods(s);
    Type type = copied(mods);
    mods.finish();
    want(s, 2, 2);
    if (type == Type::pred) {
        predicate(s);
        return;
    }
    if (size_of(type) == 1) {
        bad("not supported");
    }
    if (s.operands[0].kind == Operand::Kind::vector ||
        s.operands[1].kind == Operand::Kind::vector) {
        mov_vector(s, type);
        return;
    }
    uint32_t from = source(s.operands[1], type);
    emit(find_move(slot_size(type)), {destination(s.operands[0], type), from});
}

namespace {

std::string take_comparison(Mods& mods) {
    return mods.take_any({"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu",
                          "ltu", "leu", "gtu", "geu", "num", "nan"});
}

} // namespace

// Emits the comparison of operands 1 and 2. `second` gets the inverse or, for packed types, the
// comparison of the upper halves; no_slot where nobody asks for the inverse.
void Lowering::compare(const Statement& s, Mods& mods, Key key, uint32_t result, uint32_t second) {
    std::string combine = mods.take_any({"and", "or", "xor"});
    mods.finish();
    if (combine.empty() != (s.operands.size() == 3)) {
        bad("wrong number of operands");
    }
    uint32_t a = source(s.operands[1], key.type), b = source(s.operands[2], key.type);
    if (key.type == Type::f16x2) {
        if (second == no_slot) {
            bad("packed types have two results");
        }
        uint32_t halves[4] = {new_slot(2), new_slot(2), new_slot(2), new_slot(2)};
        emit(find_unpack(4, 2), {halves[0], halves[1], a});
        emit(find_unpack(4, 2), {halves[2], halves[3], b});
        key.type = Type::f16;
        emit(find_compare(key), {result, halves[0], halves[2]});
        emit(find_compare(key), {second, halves[1], halves[3]});
    } else {
        emit(find_compare(key), {result, a, b});
        if (second != no_slot) {
            emit(find_predicate("not"), {second, result});
        }
    }
    if (!combine.empty()) {
        uint32_t c = source(s.operands[3], Type::pred);
        emit(find_predicate(combine), {result, result, c});
        if (second != no_slot) {
            emit(find_predicate(combine), {second, second, c});
        }
    }
}

void Lowering::setp(const Statement& s) {
    want(s, 3, 4);
    Mods mods(s);
    Key key;
    key.op = s.op;
    key.variant = take_comparison(mods);
    key.ftz = mods.take("ftz");
    key.type = mods.type();
    const std::vector<Operand>& second = s.operands[0].second;
    uint32_t p = destination(s.operands[0], Type::pred);
    if (second.empty() && s.operands.size() == 3) {
        compare(s, mods, key, p, no_slot);
        return;
    }
    // Operands and guard may be destinations.
    uint32_t result = new_slot(1), other = second.empty() ? no_slot : new_slot(1);
    compare(s, mods, key, result, other);
    if (second.empty()) {
        emit(find_predicate("mov"), {p, result});
        return;
    }
    uint32_t q = destination(second[0], Type::pred);
    uint32_t guard = no_slot;
    if (s.pred != Statement::no_pred) {
        guard = new_slot(1);
        emit(find_predicate("mov"), {guard, frame_->shape->registers[s.pred]}).pred = no_slot;
    }
    emit(find_predicate("mov"), {p, result}).pred = guard;
    emit(find_predicate("mov"), {q, other}).pred = guard;
}

void Lowering::set(const Statement& s) {
    want(s, 3, 4);
    Mods mods(s);
    Key key;
    key.op = s.op;
    key.variant = take_comparison(mods);
    key.ftz = mods.take("ftz");
    Type to = mods.type();
    key.type = mods.type();
    bool pair = key.type == Type::f16x2;
    uint32_t result = new_slot(1), upper = pair ? new_slot(1) : no_slot;
    compare(s, mods, key, result, upper);
    uint32_t d = destination(s.operands[0], to);
    emit(pair ? find_set_pair(to) : find_set(to), {d, result, upper});
}

void Lowering::select(const Statement& s) {
    want(s, 4, 4);
    Mods mods(s);
    Key flush;
    flush.ftz = s.op == "slct" && mods.take("ftz");
    Type type = copied(mods);
    Type selector = s.op == "selp" ? Type::pred : mods.type();
    mods.finish();
    if (flush.ftz && selector != Type::f32) {
        bad("not supported");
    }
    uint32_t a = source(s.operands[1], type), b = source(s.operands[2], type);
    uint32_t c = source(s.operands[3], selector);
    if (flush.ftz) {
        uint32_t flushed = temp(selector);
        emit(find_convert(selector, selector, flush), {flushed, c});
        c = flushed;
    }
    emit(find_select(s.op, type, selector), {destination(s.operands[0], type), a, b, c});
}

// dp4a, dp2a, vabsdiff2, vabsdiff4: the types of all operands make the name.
void Lowering::dot(const Statement& s) {
    want(s, 4, 4);
    Key key;
    key.op = s.op;
    key.type = Type::b32;
    for (const std::string& mod : s.mods) {
        key.variant += (key.variant.empty() ? "" : ".") + mod;
    }
    uint32_t a = source(s.operands[1], Type::b32), b = source(s.operands[2], Type::b32);
    uint32_t c = source(s.operands[3], Type::b32);
    emit(find_integer(key), {destination(s.operands[0], Type::b32), a, b, c});
}

void Lowering::testp(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    Key key;
    key.op = s.op;
    key.variant =
        mods.take_any({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
    key.type = mods.type();
    mods.finish();
    uint32_t a = source(s.operands[1], key.type);
    emit(find_compare(key), {destination(s.operands[0], Type::pred), a});
}

void Lowering::convert_pack(const Statement& s, Mods& mods) {
    bool form = mods.take("sat");
    Type to = mods.type(), from = mods.type();
    bool merges = size_of(to) == 1;
    form = form && from == Type::s32 && (!merges || mods.take("b32"));
    mods.finish();
    if (!form) {
        bad("not supported");
    }
    want(s, merges ? 4 : 3, merges ? 4 : 3);
    uint32_t a = source(s.operands[1], from), b = source(s.operands[2], from);
    uint32_t c = merges ? source(s.operands[3], Type::b32) : constant(4, 0);
    emit(find_convert_pack(to), {destination(s.operands[0], Type::b32), a, b, c});
}

void Lowering::cvt(const Statement& s) {
    Mods mods(s);
    if (mods.take("pack")) {
        convert_pack(s, mods);
        return;
    }
    Key key = key_of(mods, s.op);
    Type to = mods.type(), from = mods.type();
    key.type = to;
    mods.finish();
    if (to == Type::f16x2 || to == Type::bf16x2) {
        want(s, 3, 3);
        uint32_t a = source(s.operands[1], from), b = source(s.operands[2], from);
        emit(find_convert(to, from, key), {destination(s.operands[0], to), a, b});
        return;
    }
    want(s, 2, 2);
    uint32_t bytes = 0;
    uint32_t a = wide_source(s.operands[1], from, &bytes);
    if (s.operands[1].kind == Operand::Kind::reg) {
        want_type(s.operands[1], from);
    }
    if (bytes < slot_size(from)) {
        bad("operand and type differ in size");
    }
    if (bytes > slot_size(from)) { // the low bytes count
        uint32_t low = temp(from);
        emit(find_extend(bytes == 8 ? Type::b64 : Type::b32, slot_size(from)), {low, a});
        a = low;
    }
    uint32_t d_bytes = 0;
    if (s.operands[0].kind != Operand::Kind::reg) {
        bad("the destination is not a register");
    }
    uint32_t d = register_slot(s.operands[0], &d_bytes);
    want_type(s.operands[0], to);
    if (d_bytes < slot_size(to)) {
        bad("destination and type differ in size");
    }
    uint32_t exact = d_bytes == slot_size(to) ? d : temp(to);
    emit(find_convert(to, from, key), {exact, a});
    if (exact != d) {
        emit(find_extend(to, d_bytes), {d, exact});
    }
}

void Lowering::cvta(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    bool to = mods.take("to");
    std::string space =
        mods.take_any({"global", "const", "shared", "shared::cta", "local", "param"});
    Type type = mods.type();
    mods.finish();
    if (slot_size(type) != 8) {
        bad("only 64-bit addresses are supported");
    }
    bool own = space == "param" && frame_->caller; // parameters of functions lie in local memory
    uint64_t window = space == "local" || own                       ? local_window
                      : space == "shared" || space == "shared::cta" ? shared_window
                      : space == "param"                            ? param_window
                                                                    : 0;
    Key key;
    key.op = to ? "sub" : "add";
    key.type = Type::u64;
    uint32_t a = source(s.operands[1], type);
    emit(find_integer(key), {destination(s.operands[0], type), a, constant(8, window)});
}

void Lowering::isspacep(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    std::string space =
        mods.take_any({"global", "const", "shared", "shared::cta", "local", "param"});
    mods.finish();
    uint32_t a = source(s.operands[1], Type::u64), at = new_slot(8);
    uint64_t begin = space == "shared" || space == "shared::cta" ? shared_window
                     : space == "local"                          ? local_window
                     : space == "param"                          ? param_window
                                                                 : 0;
    // Constant memory is device memory here, so nothing is "constant" for a generic address.
    uint64_t size = space == "global" ? shared_window : space == "const" ? 0 : window_bytes;
    Key minus, less;
    minus.op = "sub";
    minus.type = less.type = Type::u64;
    less.op = "setp";
    less.variant = "lo";
    emit(find_integer(minus), {at, a, constant(8, begin)});
    emit(find_compare(less), {destination(s.operands[0], Type::pred), at, constant(8, size)});
}

bool Lowering::lower_move(const Statement& s) {
    using Method = void (Lowering::*)(const Statement&);
    static const std::unordered_map<std::string, Method> methods{
        {"mov", &Lowering::mov},           {"setp", &Lowering::setp},
        {"set", &Lowering::set},           {"selp", &Lowering::select},
        {"slct", &Lowering::select},       {"testp", &Lowering::testp},
        {"cvt", &Lowering::cvt},           {"cvta", &Lowering::cvta},
        {"isspacep", &Lowering::isspacep}, {"dp4a", &Lowering::dot},
        {"dp2a", &Lowering::dot},          {"vabsdiff2", &Lowering::dot},
        {"vabsdiff4", &Lowering::dot}};
    auto found = methods.find(s.op);
    if (found == methods.end()) {
        return false;
    }
    (this->*found->second)(s);
    return true;
}

bool Lowering::lower_alu(const Statement& s) {
    auto found = forms().find(s.op);
    if (found == forms().end()) {
        return false;
    }
    arithmetic(s, found->second);
    return true;
}

} // namespace flowgpu::emu::ptx
