// mma.sync and ldmatrix.
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
    std::vector<uint32_t> registers = vector_slots(s.operands[0], count, true);
    Address at = address(s.operands[1], shared ? Space::shared : Space::generic);
    warp_wide(find_load_matrix(count, transposed), std::move(registers));
    Ins& ins = code_.ins.back();
    ins.op[0] = at.slot;
    ins.space = at.space;
    ins.wide_address = at.wide;
    ins.imm = at.offset;
}

void Lowering::multiply_matrix(const Statement& s) {
    want(s, 4, 4);
    Mods mods(s);
    bool form = mods.take("sync") && mods.take("aligned") && mods.take("row") && mods.take("col");
    std::string size = mods.take_any({"m16n8k4", "m16n8k8", "m16n8k16"});
    Type d = mods.type(), a = mods.type(), b = mods.type(), c = mods.type();
    mods.finish();
    if (!form || size.empty() || d != Type::f32 || c != Type::f32 || a != b) {
        bad("not supported");
    }
    uint32_t depth = static_cast<uint32_t>(std::stoul(size.substr(6)));
    Handler fn = find_multiply_matrix(a, depth);
    uint32_t b_count = depth / (a == Type::tf32 ? 4 : 8);
    std::vector<uint32_t> slots = vector_slots(s.operands[0], 4, true);
    const uint32_t counts[] = {2 * b_count, b_count, 4};
    for (size_t k = 0; k < 3; ++k) {
        std::vector<uint32_t> part = vector_slots(s.operands[k + 1], counts[k], false);
        slots.insert(slots.end(), part.begin(), part.end());
    }
    warp_wide(fn, std::move(slots));
}

// Slots of 32-bit registers in braces.
std::vector<uint32_t> Lowering::vector_slots(const Operand& vector, uint32_t count, bool write) {
    std::vector<Operand> elems =
        vector.kind == Operand::Kind::vector ? vector.elems : std::vector<Operand>{vector};
    if (elems.size() != count) {
        bad("wrong number of vector elements");
    }
    std::vector<uint32_t> slots;
    for (const Operand& operand : elems) {
        slots.push_back(write ? destination(operand, Type::b32) : source(operand, Type::b32));
    }
    return slots;
}

void Lowering::warp_wide(Handler fn, std::vector<uint32_t> slots) {
    uint32_t everyone = constant(4, ~0u);
    Ins& ins = emit(fn, {0, 0, 0, 0, 0, everyone});
    ins.flow = Flow::warp;
    ins.aux = static_cast<uint32_t>(code_.lists.size());
    code_.lists.push_back(std::move(slots));
}

bool Lowering::lower_matrix(const Statement& s) {
    if (s.op == "ldmatrix") {
        load_matrix(s);
    } else if (s.op == "mma") {
        multiply_matrix(s);
    } else {
        return false;
    }
    return true;
}

} // namespace flowgpu::emu::ptx
