// Function bodies: scopes, registers, labels, instructions.
#include <algorithm>

#include "parser.h"

namespace flowgpu::emu::ptx {

namespace {

constexpr std::string_view special_prefixes[] = {"%tid",
                                                 "%ntid",
                                                 "%ctaid",
                                                 "%nctaid",
                                                 "%laneid",
                                                 "%warpid",
                                                 "%nwarpid",
                                                 "%lanemask_eq",
                                                 "%lanemask_le",
                                                 "%lanemask_lt",
                                                 "%lanemask_ge",
                                                 "%lanemask_gt",
                                                 "%clock",
                                                 "%clock_hi",
                                                 "%clock64",
                                                 "%globaltimer",
                                                 "%globaltimer_lo",
                                                 "%globaltimer_hi",
                                                 "%smid",
                                                 "%nsmid",
                                                 "%gridid",
                                                 "%dynamic_smem_size",
                                                 "%total_smem_size",
                                                 "%aggr_smem_size"};

bool is_special(std::string_view name) {
    std::string_view head = name.substr(0, name.find('.'));
    return std::find(std::begin(special_prefixes), std::end(special_prefixes), head) !=
           std::end(special_prefixes);
}

struct Scope {
    size_t parent;
    std::map<std::string, Operand, std::less<>> names;
    std::map<std::string, uint32_t, std::less<>> labels;
};

class BodyParser {
  public:
    BodyParser(Cursor& cursor, Body& body) : cursor_(cursor), body_(body) {}

    void run() {
        scopes_.push_back({0, {}, {}});
        formal(body_.params, 0);
        formal(body_.returns, Operand::ret_base);
        cursor_.expect("{");
        block();
        for (const LabelUse& use : label_uses_) {
            body_.statements[use.statement].operands[use.operand].index = resolve(use);
        }
        for (const TargetList& list : target_lists_) {
            for (const LabelUse& use : list.uses) {
                body_.branch_targets[list.label].push_back(resolve(use));
            }
        }
    }

  private:
    struct LabelUse {
        size_t statement, operand, scope;
        std::string name;
        uint32_t line;
    };
    struct TargetList {
        uint32_t label;
        std::vector<LabelUse> uses;
    };

    void formal(const std::vector<Declaration>& list, uint32_t base) {
        for (uint32_t i = 0; i < list.size(); ++i) {
            Operand operand;
            operand.kind = Operand::Kind::param;
            operand.index = base + i;
            if (list[i].space == Declaration::Space::reg) {
                fail(list[i].line, body_.name + ": parameters in registers are not supported");
            }
            define(list[i].name, operand, list[i].line);
        }
    }

    void define(const std::string& name, const Operand& operand, uint32_t line) {
        if (!scopes_[scope_].names.emplace(name, operand).second) {
            fail(line, name + ": declared twice");
        }
    }

    void block() {
        while (!cursor_.accept("}")) {
            if (cursor_.accept("{")) {
                size_t outer = scope_;
                scopes_.push_back({outer, {}, {}});
                scope_ = scopes_.size() - 1;
                block();
                scope_ = outer;
            } else {
                line();
            }
        }
    }

    void line() {
        const Token& token = cursor_.peek();
        if (token.text == ";") {
            cursor_.take();
            return;
        }
        if (token.kind == Token::Kind::word && cursor_.peek(1).text == ":") {
            label();
        } else if (token.kind == Token::Kind::word && token.text[0] == '.') {
            directive();
        } else {
            instruction();
        }
    }

    void label() {
        uint32_t line = cursor_.line();
        std::string name = cursor_.word();
        cursor_.expect(":");
        uint32_t index = static_cast<uint32_t>(body_.labels.size());
        if (!scopes_[scope_].labels.emplace(name, index).second) {
            fail(line, name + ": label defined twice");
        }
        body_.labels.push_back(static_cast<uint32_t>(body_.statements.size()));
        if (cursor_.accept(".branchtargets")) {
            TargetList list{index, {}};
            do {
                list.uses.push_back({0, 0, scope_, cursor_.word(), line});
            } while (cursor_.accept(","));
            cursor_.expect(";");
            target_lists_.push_back(std::move(list));
        } else if (cursor_.accept(".calltargets")) {
            Callees& callees = body_.callees[index];
            do {
                callees.names.push_back(cursor_.word());
            } while (cursor_.accept(","));
            cursor_.expect(";");
        } else if (cursor_.accept(".callprototype")) {
            Callees& callees = body_.callees[index];
            callees.returns = parse_parameters(cursor_);
            cursor_.expect("_");
            callees.params = parse_parameters(cursor_);
            cursor_.accept(".noreturn");
            cursor_.expect(";");
        }
    }

    // A branch and a call through a pointer lead to labels, as words outside of brackets.
    static bool takes_label(const Statement& s) {
        if (s.op == "call") {
            return std::any_of(s.operands.begin(), s.operands.end(), [](const Operand& operand) {
                return operand.kind == Operand::Kind::reg;
            });
        }
        return s.op == "bra" || (s.op == "brx" && !s.operands.empty());
    }

    uint32_t resolve(const LabelUse& use) const {
        for (size_t scope = use.scope;; scope = scopes_[scope].parent) {
            auto found = scopes_[scope].labels.find(use.name);
            if (found != scopes_[scope].labels.end()) {
                return found->second;
            }
            if (scope == 0) {
                fail(use.line, use.name + ": no such label");
            }
        }
    }

    void directive() {
        uint32_t line = cursor_.line();
        std::string word = cursor_.word();
        if (word == ".reg") {
            registers();
            return;
        }
        if (word == ".pragma") {
            cursor_.take();
        } else if (word == ".local" || word == ".shared" || word == ".param") {
            do {
                Declaration decl =
                    parse_declaration(cursor_, word == ".local"    ? Declaration::Space::local
                                               : word == ".shared" ? Declaration::Space::shared
                                                                   : Declaration::Space::param);
                Operand operand;
                operand.kind = Operand::Kind::local;
                operand.index = static_cast<uint32_t>(body_.variables.size());
                define(decl.name, operand, line);
                body_.variables.push_back(std::move(decl));
            } while (cursor_.accept(","));
        } else {
            fail(line, "unknown directive " + word);
        }
        cursor_.expect(";");
    }

    void registers() {
        uint32_t line = cursor_.line();
        std::string word = cursor_.word();
        auto type = type_from(std::string_view(word).substr(1));
        if (!type) {
            fail(line, ".reg: unknown type " + word);
        }
        do {
            std::string name = cursor_.word();
            if (!cursor_.accept("<")) {
                add_register(name, *type, line);
                continue;
            }
            uint64_t count = cursor_.integer();
            cursor_.expect(">");
            if (count > 1u << 20) {
                fail(line, ".reg: too many registers");
            }
            for (uint64_t i = 0; i < count; ++i) {
                add_register(name + std::to_string(i), *type, line);
            }
        } while (cursor_.accept(","));
        cursor_.expect(";");
    }

    void add_register(const std::string& name, Type type, uint32_t line) {
        Operand operand;
        operand.kind = Operand::Kind::reg;
        operand.index = static_cast<uint32_t>(body_.registers.size());
        define(name, operand, line);
        body_.registers.push_back(type);
    }

    void instruction() {
        Statement statement;
        statement.line = cursor_.line();
        if (cursor_.accept("@")) {
            statement.pred_negated = cursor_.accept("!");
            Operand pred = name_operand(cursor_.word());
            if (pred.kind != Operand::Kind::reg || body_.registers[pred.index] != Type::pred) {
                fail(statement.line, "guard is not a predicate register");
            }
            statement.pred = pred.index;
        }
        opcode_ = cursor_.word();
        split_opcode(statement, opcode_);
        while (!cursor_.accept(";")) {
            if (cursor_.peek().kind == Token::Kind::word && takes_label(statement)) {
                label_uses_.push_back({body_.statements.size(), statement.operands.size(), scope_,
                                       cursor_.word(), statement.line});
                Operand operand;
                operand.kind = Operand::Kind::label;
                statement.operands.push_back(operand);
            } else {
                statement.operands.push_back(operand());
            }
            if (!cursor_.is(";")) {
                cursor_.expect(",");
            }
        }
        body_.statements.push_back(std::move(statement));
    }

    static void split_opcode(Statement& statement, const std::string& word) {
        size_t start = word.find('.');
        statement.op = word.substr(0, start);
        while (start != std::string::npos) {
            size_t end = word.find('.', start + 1);
            statement.mods.push_back(
                word.substr(start + 1, end == std::string::npos ? end : end - start - 1));
            start = end;
        }
    }

    Operand name_operand(const std::string& name) {
        for (size_t scope = scope_;; scope = scopes_[scope].parent) {
            auto found = scopes_[scope].names.find(name);
            if (found != scopes_[scope].names.end()) {
                return found->second;
            }
            if (scope == 0) {
                break;
            }
        }
        Operand operand;
        operand.name = name;
        if (name == "_") {
            operand.kind = Operand::Kind::sink;
        } else if (is_special(name)) {
            operand.kind = Operand::Kind::special;
        } else if (name == "WARP_SZ") {
            operand.kind = Operand::Kind::imm;
            operand.literal = Operand::Literal::integer;
            operand.bits = 32;
        } else if (name[0] == '%') {
            fail(cursor_.line(), name + ": no such register");
        } else {
            operand.kind = Operand::Kind::symbol;
        }
        return operand;
    }

    Operand enclosed(Operand::Kind kind, std::string_view close) {
        Operand operand;
        operand.kind = kind;
        while (!cursor_.accept(close)) {
            operand.elems.push_back(this->operand());
            cursor_.accept(",");
        }
        return operand;
    }

    int64_t offset() {
        int64_t sum = 0;
        while (cursor_.is("+") || cursor_.is("-")) {
            cursor_.accept("+");
            sum += static_cast<int64_t>(cursor_.integer());
        }
        return sum;
    }

    bool takes_coordinates() const {
        const std::string op = opcode_.substr(0, opcode_.find('.'));
        return op == "tex" || op == "suld" || op == "sust";
    }

    Operand operand() {
        if (cursor_.accept("{")) {
            return enclosed(Operand::Kind::vector, "}");
        }
        if (cursor_.accept("(")) {
            return enclosed(Operand::Kind::list, ")");
        }
        if (cursor_.accept("[")) {
            Operand memory;
            memory.kind = Operand::Kind::memory;
            memory.elems.push_back(operand());
            memory.offset = memory.elems[0].offset + offset();
            memory.elems[0].offset = 0;
            if (cursor_.accept(",")) {
                if (!takes_coordinates()) { // tensor maps
                    fail(cursor_.line(), opcode_ + ": this form of address is not supported");
                }
                memory.elems.push_back(operand());
            }
            cursor_.expect("]");
            return memory;
        }
        if (cursor_.accept("!")) {
            Operand negated = name_operand(cursor_.word());
            negated.negated = true;
            return negated;
        }
        if (cursor_.peek().kind != Token::Kind::word) {
            return cursor_.literal();
        }
        Operand named = name_operand(cursor_.word());
        if (named.kind != Operand::Kind::reg) {
            named.offset = offset();
        }
        if (cursor_.accept("|")) {
            named.second.push_back(name_operand(cursor_.word()));
        }
        return named;
    }

    Cursor& cursor_;
    Body& body_;
    std::vector<Scope> scopes_;
    size_t scope_ = 0;
    std::string opcode_;
    std::vector<LabelUse> label_uses_;
    std::vector<TargetList> target_lists_;
};

} // namespace

void parse_body(Cursor& cursor, Body& body) {
    BodyParser(cursor, body).run();
}

} // namespace flowgpu::emu::ptx
