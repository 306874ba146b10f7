// Parsed PTX: names of registers, labels and function-scope variables are resolved to indices.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lexer.h"
#include "types.h"

namespace flowgpu::emu::ptx {

struct Operand {
    enum class Kind {
        reg,     // index: register of the function
        imm,     // bits
        special, // name: "%tid.x"
        local,   // index: variable of the function, plus offset
        param,   // index: formal parameter (or, from `ret_base` on, return value), plus offset
        symbol,  // name: anything of module scope, plus offset
        memory,  // elems[0] is the base (reg, imm, local, param or symbol), plus offset
        vector,  // elems in braces
        list,    // elems in parentheses
        label,   // index into Body::labels
        sink,    // "_"
    };
    enum class Literal { none, integer, f32, f64 };
    static constexpr uint32_t ret_base = 1u << 16;

    Kind kind = Kind::sink;
    uint32_t index = 0;
    uint64_t bits = 0;
    Literal literal = Literal::none;
    int64_t offset = 0;
    bool negated = false; // "!%p"
    std::string name;
    std::vector<Operand> elems;
    std::vector<Operand> second; // the q of "p|q", at most one
};

struct Statement {
    static constexpr uint32_t no_pred = ~0u;
    std::string op;                // "ld"
    std::vector<std::string> mods; // "global", "v4", "f32"
    std::vector<Operand> operands;
    uint32_t pred = no_pred;
    bool pred_negated = false;
    uint32_t line = 0;
};

struct Declaration {
    enum class Space { global, constant, shared, local, param, reg };
    Space space = Space::global;
    std::string name;
    Type type = Type::b8;
    uint64_t size = 0; // bytes; 0 for an unsized array
    uint32_t align = 1;
    bool external = false;
    bool visible = false; // .visible, .weak or .common
    bool managed = false; // .attribute(.managed)
    std::vector<uint8_t> init;
    std::vector<Variable::Reloc> relocs;
    uint32_t line = 0;
};

// What a label says of a call through a pointer.
struct Callees {
    std::vector<std::string> names;           // by .calltargets; none: any of the form below
    std::vector<Declaration> params, returns; // by .callprototype
};

struct Body {
    std::string name;
    bool entry = false;
    bool defined = false;
    uint32_t line = 0;
    uint32_t max_threads = 1024;
    std::array<uint32_t, 3> required_block{}; // by .reqntid; 0: none
    std::vector<Declaration> params, returns;
    std::vector<Type> registers;
    std::vector<Declaration> variables; // .local, .shared and .param inside the body
    std::vector<Statement> statements;
    std::vector<uint32_t> labels;                             // statement index of each label
    std::map<uint32_t, std::vector<uint32_t>> branch_targets; // label -> labels of its list
    std::map<uint32_t, Callees> callees;                      // by label
};

struct Ast {
    std::string version, target;
    std::vector<Body> bodies;
    std::vector<Declaration> variables;

    const Body* find(std::string_view name) const;
    const Declaration* variable(std::string_view name) const;
};

Ast parse_ast(std::string_view text);

} // namespace flowgpu::emu::ptx
