// From the parsed body of an entry to decoded instructions. Calls are expanded in place: lanes of
// one CTA then only ever differ in one program counter, and the lowest one reconverges them.
#pragma once

#include <map>
#include <optional>

#include "ast.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

// The modifiers of one instruction; whatever nobody takes is an error.
class Mods {
  public:
    explicit Mods(const Statement& statement) : statement_(statement), left_(statement.mods) {}

    bool take(std::string_view name);
    std::string take_any(std::initializer_list<std::string_view> names); // "" for none of them
    std::optional<Type> take_type();                                     // the next one
    Type type(); // the next one, or an error
    const std::vector<std::string>& rest() const { return left_; }
    void finish() const;

  private:
    const Statement& statement_;
    std::vector<std::string> left_;
};

class Lowering {
  public:
    Lowering(const Ast& ast, Function& function, Code& code)
        : ast_(ast), function_(function), code_(code) {}
    void entry(const Body& body);

  private:
    // Where a variable or parameter lives.
    struct Place {
        Space space = Space::local;
        uint32_t offset = 0;
        bool allocated = false;
    };
    struct Shape { // of a function, shared by all its expansions
        std::vector<uint32_t> registers;
        std::vector<Place> variables;
    };
    struct Frame {
        const Body* body;
        Shape* shape;
        std::vector<Place> params, returns;
        const Frame* caller;
        bool by_pointer; // entered by a call through one
        std::vector<uint32_t> pc_of_statement;
        struct Patch {
            uint32_t ins, label;
        };
        std::vector<Patch> patches;
        std::vector<uint32_t> to_end; // branches to the end of the expansion
        std::vector<uint32_t> lists;  // of branch targets, still labels
    };
    using Operands = std::vector<Operand>;
    struct Address {
        Space space;
        uint32_t slot;
        bool wide;
        int64_t offset;
    };

    // lower.cpp: frames, slots, operands
    void expand(const Body& body, Frame& frame);
    void statement(const Statement& s);
    Shape* shape(const Body& body);
    void finish_frame(Frame& frame);
    uint32_t new_slot(uint32_t bytes);
    uint32_t temp(Type type) { return new_slot(slot_size(type)); }
    uint32_t constant(uint32_t bytes, uint64_t value);
    uint32_t address_constant(Constant::Kind kind, uint32_t bytes, uint64_t value, uint32_t index);
    uint32_t special(const std::string& name, uint32_t* bytes);
    Place& place(uint32_t index);
    uint32_t shared_offset(const Declaration& decl);
    uint32_t allocate_local(uint64_t size, uint32_t align);
    uint32_t literal(const Operand& operand, Type type);
    uint32_t symbol(const Operand& operand, uint32_t bytes);
    uint32_t function_address(const Body& body, uint32_t bytes);
    uint32_t register_slot(const Operand& operand, uint32_t* bytes);
    void want_type(const Operand& operand, Type type) const;
    uint32_t source(const Operand& operand, Type type);
    uint32_t destination(const Operand& operand, Type type);
    // Any width at least that of the type; *bytes tells which.
    uint32_t wide_source(const Operand& operand, Type type, uint32_t* bytes);
    Address address(const Operand& operand, Space space);
    void want(const Statement& s, size_t low, size_t high) const;
    Ins& emit(Handler fn, std::initializer_list<uint32_t> op);
    Ins& emit_flow(Flow flow);
    [[noreturn]] void bad(const std::string& why) const;

    // lower_flow.cpp
    bool lower_flow(const Statement& s);
    void call(const Statement& s);
    void call_through(const Operand& pointer, const Operand& label, const Operands& results,
                      const Operands& arguments);
    void call_body(const Body& callee, const Operands& results, const Operands& arguments,
                   bool by_pointer);
    bool recurs(const Body& callee, bool by_pointer) const;
    bool call_builtin(const Body& callee, const Operands& results);
    Place argument(const Operand& operand);
    void branch_index(const Statement& s);
    void barrier(const Statement& s);
    bool lower_warp(const Statement& s);
    void shuffle(const Statement& s);
    void vote(const Statement& s);
    void warp_operation(const Statement& s);

    // lower_matrix.cpp
    bool lower_matrix(const Statement& s);
    void load_matrix(const Statement& s);
    void transpose_matrix(const Statement& s);
    void multiply_matrix(const Statement& s);
    void fragment(const Statement& s, bool load);
    std::vector<uint32_t> vector_slots(const Operand& vector, uint32_t count, Type type,
                                       bool write);
    Ins& warp_wide(Handler fn, std::vector<uint32_t> slots);

    // lower_alu.cpp
    bool lower_alu(const Statement& s);
    bool lower_move(const Statement& s);
    void arithmetic(const Statement& s, std::string_view form);
    Type copied(Mods& mods) const;
    void mov(const Statement& s);
    void mov_vector(const Statement& s, Type type);
    void setp(const Statement& s);
    void set(const Statement& s);
    void select(const Statement& s);
    void predicate(const Statement& s);
    void dot(const Statement& s);
    void testp(const Statement& s);
    void cvt(const Statement& s);
    void cvta(const Statement& s);
    void isspacep(const Statement& s);
    void compare(const Statement& s, Mods& mods, Key key, uint32_t result, uint32_t second);
    void convert_pack(const Statement& s, Mods& mods);

    // lower_memory.cpp
    bool lower_memory(const Statement& s);
    void access(const Statement& s, bool load);
    void atomic(const Statement& s, bool returns);
    void async_copy(const Statement& s);
    void async_arrive(const Statement& s);
    void mbarrier(const Statement& s);
    bool hint(const Statement& s);

    // lower_texture.cpp
    bool lower_texture(const Statement& s);
    void sample(const Statement& s);
    void surface(const Statement& s, bool store);
    void image_query(const Statement& s);
    Geometry geometry(Mods& mods, uint32_t* given, uint32_t* used) const;
    std::vector<uint32_t> image_slots(const Operand& operand, Geometry geometry, uint32_t given,
                                      uint32_t used, Type type);
    Ins& emit_image(Handler fn, Geometry geometry, std::vector<uint32_t> slots);

    const Ast& ast_;
    Function& function_;
    Code& code_;
    Frame* frame_ = nullptr;
    const Statement* current_ = nullptr;
    std::map<const Body*, Shape> shapes_;
    std::map<std::pair<uint32_t, uint64_t>, uint32_t> constants_;
    std::map<std::string, uint32_t> specials_;
    std::map<const Declaration*, uint32_t> shared_;
    std::map<std::pair<const Body*, uint32_t>, uint32_t> function_addresses_; // by their bytes
    uint32_t carry_ = no_slot;
    uint32_t text_ = 0;
    std::map<std::string, uint32_t> texts_;
};

uint32_t align_up(uint64_t value, uint32_t align);
Key key_of(Mods& mods, const std::string& op); // all but the type

} // namespace flowgpu::emu::ptx
