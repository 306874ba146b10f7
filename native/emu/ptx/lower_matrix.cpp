// mma.sync, ldmatrix, movmatrix and wmma.
#include "lower.h"

namespace flowgpu::emu::ptx {

void Lowering::load_matrix(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    bool form = mods.take("sync") && mods.take("aligned") && mods.take("m8n8");
    std::string number = mods.take_any({"x1", "x2", "x4"});
    bool transposed = mods.take("trans");
    bool shared = mods.take("shared") || mods.take("shared::cta");
    Type type = mods.type();
    mods.finish();
    if (!form || number.empty() || type != Type::b16) {
        bad("not supported");
    }
    uint32_t count = static_cast<uint32_t>(number[1] - '0');
    std::vector<uint32_t> registers = vector_slots(s.operands[0], count, Type::b32, true);
    Address at = address(s.operands[1], shared ? Space::shared : Space::generic);
    Ins& ins = warp_wide(find_load_matrix(count, transposed), std::move(registers));
    ins.op[0] = at.slot;
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
}

void Lowering::transpose_matrix(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    bool form =
        mods.take("sync") && mods.take("aligned") && mods.take("m8n8") && mods.take("trans");
    Type type = mods.type();
    mods.finish();
    if (!form || type != Type::b16) {
        bad("not supported");
    }
    uint32_t a = source(s.operands[1], Type::b32), d = destination(s.operands[0], Type::b32);
    Ins& ins = warp_wide(find_transpose_matrix(), {});
    ins.op[0] = d;
    ins.op[1] = a;
}

void Lowering::multiply_matrix(const Statement& s) {
    want(s, 4, 4);
    bool fragments = s.op == "wmma";
    Mods mods(s);
    bool form = mods.take("sync") && mods.take("aligned");
    std::string a_layout = mods.take_any({"row", "col"}), b_layout = mods.take_any({"row", "col"});
    // Fragments of wmma hide how A and B were loaded; mma has them in one way.
    bool known = fragments || (s.mods.size() > 4 && s.mods[3] == "row" && s.mods[4] == "col");
    form = form && known && !a_layout.empty() && !b_layout.empty();
    bool saturates = mods.take("satfinite");
    std::string name;
    for (const std::string& part : mods.rest()) {
        bool skipped = fragments && (part == "mma" || (part == "rn" && s.mods.back() == "f64"));
        name += skipped ? "" : name.empty() ? part : "." + part;
    }
    const Multiply* found = fragments ? find_multiply_fragment(name) : find_multiply_matrix(name);
    if (!form || !found || (saturates && !found->saturating)) {
        bad("not supported");
    }
    Type type = found->wide ? Type::b64 : Type::b32;
    std::vector<uint32_t> slots = vector_slots(s.operands[0], found->d, type, true);
    const uint32_t counts[] = {found->a, found->b, found->c};
    for (size_t k = 0; k < 3; ++k) {
        std::vector<uint32_t> part = vector_slots(s.operands[k + 1], counts[k], type, false);
        slots.insert(slots.end(), part.begin(), part.end());
    }
    warp_wide(found->fn, std::move(slots)).mode = saturates;
}

// wmma.load d, [p], stride and wmma.store [p], s, stride.
void Lowering::fragment(const Statement& s, bool load) {
    want(s, 2, 3);
    Mods mods(s);
    mods.take(load ? "load" : "store");
    bool form = mods.take("sync") && mods.take("aligned");
    std::string role = load ? mods.take_any({"a", "b", "c"}) : mods.take_any({"d"});
    std::string layout = mods.take_any({"row", "col"});
    std::string size = mods.take_any({"m16n16k16", "m32n8k16", "m8n32k16", "m16n16k8", "m8n8k4"});
    std::string space = mods.take_any({"global", "shared", "shared::cta"});
    Type type = mods.type();
    mods.finish();
    std::optional<FragmentShape> shape = find_fragment(role, size, type);
    if (!form || role.empty() || layout.empty() || !shape) {
        bad("not supported");
    }
    Address at = address(s.operands[load ? 1 : 0], space.empty()       ? Space::generic
                                                   : space == "global" ? Space::global
                                                                       : Space::shared);
    uint32_t stride = s.operands.size() == 3 ? source(s.operands[2], Type::u32) : no_slot;
    std::vector<uint32_t> list = vector_slots(s.operands[load ? 0 : 1], shape->registers,
                                              type == Type::f64 ? Type::b64 : Type::b32, load);
    list.insert(list.begin(), {shape->rows, shape->columns});
    Handler fn = load ? find_load_fragment(type) : find_store_fragment(type);
    Ins& ins = warp_wide(fn, std::move(list));
    ins.op[0] = at.slot;
    ins.op[1] = stride;
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
    ins.mode = layout == "col";
    ins.count = static_cast<uint8_t>(size_of(type));
}

// Slots of registers in braces.
std::vector<uint32_t> Lowering::vector_slots(const Operand& vector, uint32_t count, Type type,
                                             bool write) {
    std::vector<Operand> elems =
        vector.kind == Operand::Kind::vector ? vector.elems : std::vector<Operand>{vector};
    if (elems.size() != count) {
        bad("wrong number of vector elements");
    }
    std::vector<uint32_t> slots;
    for (const Operand& operand : elems) {
        slots.push_back(write ? destination(operand, type) : source(operand, type));
    }
    return slots;
}

Ins& Lowering::warp_wide(Handler fn, std::vector<uint32_t> slots) {
    uint32_t everyone = constant(4, ~0u);
    Ins& ins = emit(fn, {0, 0, 0, 0, 0, everyone});
    ins.flow = Flow::warp;
    ins.aux = static_cast<uint32_t>(code_.lists.size());
    code_.lists.push_back(std::move(slots));
    return ins;
}

bool Lowering::lower_matrix(const Statement& s) {
    std::string first = s.mods.empty() ? "" : s.mods[0];
    if (s.op == "ldmatrix") {
        load_matrix(s);
    } else if (s.op == "movmatrix") {
        transpose_matrix(s);
    } else if (s.op == "mma" || (s.op == "wmma" && first == "mma")) {
        multiply_matrix(s);
    } else if (s.op == "wmma" && (first == "load" || first == "store")) {
        fragment(s, first == "load");
    } else {
        return false;
    }
    return true;
}

} // namespace flowgpu::emu::ptx
