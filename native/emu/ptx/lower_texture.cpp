// Textures and surfaces, by the numbers of their objects in 64-bit registers.
#include "lower.h"

namespace flowgpu::emu::ptx {

namespace {

struct Form {
    std::string_view name;
    Geometry geometry;
    uint32_t given, used; // coordinates
};

// The fourth of four coordinates means nothing.
constexpr Form forms[] = {{"1d", Geometry::d1, 1, 1},
                          {"2d", Geometry::d2, 2, 2},
                          {"3d", Geometry::d3, 4, 3},
                          {"a1d", Geometry::a1d, 2, 2},
                          {"a2d", Geometry::a2d, 4, 3}};

} // namespace

Geometry Lowering::geometry(Mods& mods, uint32_t* given, uint32_t* used) const {
    for (const Form& form : forms) {
        if (mods.take(form.name)) {
            *given = form.given;
            *used = form.used;
            return form.geometry;
        }
    }
    bad("not supported"); // cubemaps, multisampled ones
}

// The slots of the number and of the coordinates that count, of type `type`; a layer is an integer.
std::vector<uint32_t> Lowering::image_slots(const Operand& operand, Geometry geometry,
                                            uint32_t given, uint32_t used, Type type) {
    if (operand.kind != Operand::Kind::memory || operand.elems.size() != 2 || operand.offset != 0) {
        bad("expected an object and coordinates in brackets");
    }
    if (operand.elems[0].kind != Operand::Kind::reg) {
        bad("not supported but with an object in a register");
    }
    const bool layered = geometry == Geometry::a1d || geometry == Geometry::a2d;
    const Operand& vector = operand.elems[1];
    const std::vector<Operand> parts =
        vector.kind == Operand::Kind::vector ? vector.elems : std::vector<Operand>{vector};
    if (parts.size() != given) {
        bad("wrong number of coordinates");
    }
    std::vector<uint32_t> slots{source(operand.elems[0], Type::u64)};
    for (uint32_t k = 0; k < given; ++k) {
        const uint32_t slot = source(parts[k], layered && k == 0 ? Type::b32 : type);
        if (k < used) {
            slots.push_back(slot);
        }
    }
    return slots;
}

Ins& Lowering::emit_image(Handler fn, Geometry geometry, std::vector<uint32_t> slots) {
    Ins& ins = emit(fn, {});
    ins.mode = static_cast<uint8_t>(geometry);
    ins.aux = static_cast<uint32_t>(code_.lists.size());
    code_.lists.push_back(std::move(slots));
    return ins;
}

void Lowering::sample(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    uint32_t given = 0, used = 0;
    if (mods.take("level") || mods.take("grad") || mods.take("base")) {
        bad("not supported");
    }
    const Geometry where = geometry(mods, &given, &used);
    const bool vector = mods.take("v4");
    const Type result = mods.type(), coordinate = mods.type();
    mods.finish();
    if (!vector || (result != Type::f32 && result != Type::s32 && result != Type::u32) ||
        (coordinate != Type::f32 && coordinate != Type::s32)) {
        bad("not supported");
    }
    std::vector<uint32_t> slots = image_slots(s.operands[1], where, given, used, coordinate);
    for (const uint32_t slot : vector_slots(s.operands[0], 4, result, true)) {
        slots.push_back(slot);
    }
    emit_image(find_texture(coordinate == Type::f32), where, std::move(slots));
}

// suld.b and sust.b: bytes as they are.
void Lowering::surface(const Statement& s, bool store) {
    want(s, 2, 2);
    Mods mods(s);
    uint32_t given = 0, used = 0;
    if (!mods.take("b")) {
        bad("not supported"); // sust.p
    }
    const Geometry where = geometry(mods, &given, &used);
    mods.take_any({"ca", "cg", "cs", "cv", "wb", "wt"});
    const std::string vector = mods.take_any({"v2", "v4"});
    const Type type = mods.type();
    const std::string rule = mods.take_any({"trap", "clamp", "zero"});
    mods.finish();
    const uint32_t count = vector.empty() ? 1 : static_cast<uint32_t>(vector[1] - '0');
    const bool bits = type >= Type::b8 && type <= Type::b64;
    if (!bits || rule.empty() || count * size_of(type) > 16) {
        bad("not supported");
    }
    const Operand& data = s.operands[store ? 1 : 0];
    std::vector<uint32_t> slots =
        image_slots(s.operands[store ? 0 : 1], where, given, used, Type::s32);
    if (data.kind == Operand::Kind::vector) {
        for (const uint32_t slot : vector_slots(data, count, type, !store)) {
            slots.push_back(slot);
        }
    } else if (count == 1) {
        slots.push_back(store ? source(data, type) : destination(data, type));
    } else {
        bad("wrong number of vector elements");
    }
    Ins& ins = emit_image(find_surface(size_of(type), store), where, std::move(slots));
    ins.count = static_cast<uint8_t>(count);
    ins.imm = rule == "trap" ? 0 : rule == "clamp" ? 1 : 2;
}

void Lowering::image_query(const Statement& s) {
    want(s, 2, 2);
    Mods mods(s);
    const std::string what = mods.take_any({"width", "height", "depth", "array_size"});
    const bool bits = mods.take("b32");
    mods.finish();
    const Operand& object = s.operands[1];
    if (what.empty() || !bits || object.kind != Operand::Kind::memory || object.offset != 0 ||
        object.elems.size() != 1 || object.elems[0].kind != Operand::Kind::reg) {
        bad("not supported");
    }
    const uint32_t number = source(object.elems[0], Type::u64);
    Ins& ins =
        emit(find_image_query(s.op == "suq"), {destination(s.operands[0], Type::b32), number});
    ins.mode = what == "width" ? 0 : what == "height" ? 1 : what == "depth" ? 2 : 3;
}

bool Lowering::lower_texture(const Statement& s) {
    if (s.op == "tex") {
        sample(s);
    } else if (s.op == "suld" || s.op == "sust") {
        surface(s, s.op == "sust");
    } else if (s.op == "txq" || s.op == "suq") {
        image_query(s);
    } else {
        return false;
    }
    return true;
}

} // namespace flowgpu::emu::ptx
