// Module scope: directives, variables and function headers.
#include "parser.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace flowgpu::emu::ptx {

bool Cursor::accept(std::string_view text) {
    if (!is(text)) {
        return false;
    }
    ++pos_;
    return true;
}

void Cursor::expect(std::string_view text) {
    if (!accept(text)) {
        fail(line(),
             "expected '" + std::string(text) + "' before '" + std::string(peek().text) + "'");
    }
}

const Token& Cursor::take() {
    const Token& token = peek();
    if (token.kind == Token::Kind::end) {
        fail(token.line, "unexpected end of the text");
    }
    ++pos_;
    return token;
}

std::string Cursor::word() {
    if (peek().kind != Token::Kind::word) {
        fail(line(), "expected a name before '" + std::string(peek().text) + "'");
    }
    return std::string(take().text);
}

namespace {

uint64_t bits_of_hex(const std::string& digits, size_t expected, uint32_t line) {
    if (digits.size() != expected) {
        fail(line, "bad floating-point constant");
    }
    return std::stoull(digits, nullptr, 16);
}

uint64_t parse_integer(std::string text, uint32_t line) {
    if (!text.empty() && (text.back() == 'U' || text.back() == 'u')) {
        text.pop_back();
    }
    bool binary = text.size() > 2 && (text[1] == 'b' || text[1] == 'B');
    size_t used = 0;
    uint64_t value = 0;
    try {
        value = binary ? std::stoull(text.substr(2), &used, 2) : std::stoull(text, &used, 0);
    } catch (const std::exception&) {
        fail(line, "bad constant '" + text + "'");
    }
    if (used + (binary ? 2 : 0) != text.size()) {
        fail(line, "bad constant '" + text + "'");
    }
    return value;
}

} // namespace

Operand Cursor::literal() {
    Operand operand;
    operand.kind = Operand::Kind::imm;
    bool negative = false;
    while (is("-") || is("+")) {
        negative ^= take().text == "-";
    }
    if (peek().kind != Token::Kind::number) {
        fail(line(), "expected a constant before '" + std::string(peek().text) + "'");
    }
    uint32_t at = line();
    std::string text(take().text);
    char tag = text.size() > 1 && text[0] == '0' ? text[1] : '\0';
    if (tag == 'f' || tag == 'F') {
        operand.literal = Operand::Literal::f32;
        operand.bits = bits_of_hex(text.substr(2), 8, at) ^ (negative ? 0x80000000u : 0);
    } else if (tag == 'd' || tag == 'D') {
        operand.literal = Operand::Literal::f64;
        operand.bits = bits_of_hex(text.substr(2), 16, at) ^ (negative ? 1ull << 63 : 0);
    } else if (tag != 'x' && tag != 'X' && text.find_first_of(".eE") != std::string::npos) {
        operand.literal = Operand::Literal::f64;
        double value = std::stod(text) * (negative ? -1 : 1);
        std::memcpy(&operand.bits, &value, sizeof value);
    } else {
        operand.literal = Operand::Literal::integer;
        operand.bits = parse_integer(text, at);
        operand.bits = negative ? 0 - operand.bits : operand.bits;
    }
    return operand;
}

uint64_t Cursor::integer() {
    uint32_t at = line();
    Operand operand = literal();
    if (operand.literal != Operand::Literal::integer) {
        fail(at, "expected an integer");
    }
    return operand.bits;
}

void Cursor::skip_braces() {
    expect("{");
    for (int depth = 1; depth > 0;) {
        const Token& token = take();
        depth += token.text == "{" ? 1 : token.text == "}" ? -1 : 0;
    }
}

namespace {

void store(Declaration& decl, uint64_t at, uint64_t bits, uint32_t line) {
    uint32_t width = size_of(decl.type);
    if (at + width > decl.size) {
        fail(line, decl.name + ": more initial values than elements");
    }
    std::memcpy(decl.init.data() + at, &bits, width);
}

uint64_t element_bits(const Declaration& decl, const Operand& value, uint32_t line) {
    bool wide = value.literal == Operand::Literal::f64;
    if (value.literal == Operand::Literal::integer || (wide && decl.type == Type::f64) ||
        (!wide && size_of(decl.type) == 4)) {
        return value.bits;
    }
    if (wide && decl.type == Type::f32) {
        double number;
        std::memcpy(&number, &value.bits, sizeof number);
        float narrow = static_cast<float>(number);
        uint32_t bits;
        std::memcpy(&bits, &narrow, sizeof bits);
        return bits;
    }
    fail(line, decl.name + ": initial value of another type");
}

void parse_initializer(Cursor& cursor, Declaration& decl, uint64_t& at) {
    if (cursor.accept("{")) {
        while (!cursor.accept("}")) {
            parse_initializer(cursor, decl, at);
            cursor.accept(",");
        }
        return;
    }
    uint32_t line = cursor.line();
    if (cursor.peek().kind != Token::Kind::word) {
        store(decl, at, element_bits(decl, cursor.literal(), line), line);
        at += size_of(decl.type);
        return;
    }
    std::string name = cursor.word();
    if (name == "generic" && cursor.accept("(")) {
        name = cursor.word();
        cursor.expect(")");
    }
    if (size_of(decl.type) != 8) {
        fail(line, decl.name + ": an address needs 64-bit elements");
    }
    uint64_t addend = 0;
    if (cursor.accept("+") || cursor.is("-")) {
        addend = cursor.integer();
    }
    decl.relocs.push_back({at, name});
    store(decl, at, addend, line);
    at += 8;
}

void parse_array(Cursor& cursor, Declaration& decl, uint64_t element) {
    uint64_t count = 1;
    bool unsized = false;
    while (cursor.accept("[")) {
        if (cursor.is("]")) {
            unsized = true;
        } else {
            count *= cursor.integer();
        }
        cursor.expect("]");
    }
    decl.size = unsized ? 0 : element * count;
}

} // namespace

Declaration parse_declaration(Cursor& cursor, Declaration::Space space) {
    Declaration decl;
    decl.space = space;
    decl.line = cursor.line();
    uint32_t align = 0, vector = 1;
    bool typed = false;
    while (cursor.peek().kind == Token::Kind::word && cursor.peek().text[0] == '.') {
        std::string word = cursor.word().substr(1);
        if (word == "align") {
            align = static_cast<uint32_t>(cursor.integer());
        } else if (word == "v2" || word == "v4") {
            vector = word == "v2" ? 2 : 4;
        } else if (word == "attribute" && space == Declaration::Space::global) {
            cursor.expect("(");
            const std::string attribute = cursor.word();
            if (attribute != ".managed") {
                fail(cursor.line(), "declaration: unknown attribute " + attribute);
            }
            cursor.expect(")");
            decl.managed = true;
        } else if (auto type = type_from(word)) {
            decl.type = *type;
            typed = true;
        } else if (!(space == Declaration::Space::param &&
                     (word == "ptr" || word == "global" || word == "const" || word == "shared" ||
                      word == "local"))) {
            fail(cursor.line(), "declaration: unknown attribute ." + word);
        }
    }
    if (!typed) {
        fail(cursor.line(), "declaration without a known type");
    }
    // ".ptr .align N" tells about the memory pointed to, not about the parameter.
    bool aggregate = decl.type == Type::b8;
    decl.name = cursor.word();
    uint32_t element = size_of(decl.type) * vector;
    decl.align =
        space == Declaration::Space::param && !aggregate ? element : std::max(align, element);
    if (decl.align == 0 || (decl.align & (decl.align - 1)) != 0) {
        fail(decl.line, decl.name + ": alignment is not a power of two");
    }
    parse_array(cursor, decl, element);
    if (cursor.accept("=")) {
        decl.init.resize(decl.size);
        uint64_t at = 0;
        parse_initializer(cursor, decl, at);
    }
    return decl;
}

std::vector<Declaration> parse_parameters(Cursor& cursor) {
    std::vector<Declaration> list;
    if (!cursor.accept("(")) {
        return list;
    }
    while (!cursor.accept(")")) {
        std::string space = cursor.word();
        if (space != ".param" && space != ".reg") {
            fail(cursor.line(), "expected .param or .reg before '" + space + "'");
        }
        list.push_back(parse_declaration(cursor, space == ".reg" ? Declaration::Space::reg
                                                                 : Declaration::Space::param));
        cursor.accept(",");
    }
    return list;
}

const Body* Ast::find(std::string_view name) const {
    for (const Body& body : bodies) {
        if (body.name == name) {
            return &body;
        }
    }
    return nullptr;
}

const Declaration* Ast::variable(std::string_view name) const {
    for (const Declaration& decl : variables) {
        if (decl.name == name) {
            return &decl;
        }
    }
    return nullptr;
}

namespace {

constexpr int newest = 80; // compute capability 8.0

class ModuleParser {
  public:
    explicit ModuleParser(const std::vector<Token>& tokens) : cursor_(tokens) {}

    Ast run() {
        while (!cursor_.done()) {
            statement();
        }
        if (ast_.version.empty() || ast_.target.empty()) {
            fail(cursor_.line(), "no .version or no .target");
        }
        return std::move(ast_);
    }

  private:
    void statement() {
        uint32_t line = cursor_.line();
        std::string word = cursor_.word();
        if (word == ".version") {
            ast_.version = std::string(cursor_.take().text);
        } else if (word == ".target") {
            ast_.target = cursor_.word();
            if (ast_.target.rfind("sm_", 0) == 0 && std::atoi(ast_.target.c_str() + 3) > newest) {
                fail(line, ".target: " + ast_.target + " is newer than this device");
            }
            while (cursor_.accept(",")) {
                std::string option = cursor_.word();
                if (option != "debug") {
                    fail(line, ".target: unknown option " + option);
                }
            }
        } else if (word == ".address_size") {
            if (cursor_.integer() != 64) {
                fail(line, ".address_size: only 64 is supported");
            }
        } else if (word == ".section") {
            while (!cursor_.is("{")) {
                cursor_.word();
            }
            cursor_.skip_braces();
        } else if (word == ".pragma") {
            cursor_.take();
            cursor_.expect(";");
        } else if (word == ".extern") {
            external_ = true;
        } else if (word == ".visible" || word == ".weak" || word == ".common") {
            external_ = false;
            visible_ = true;
        } else if (word == ".func" || word == ".entry") {
            function(word == ".entry", line);
            external_ = visible_ = false;
        } else {
            variable(word, line);
            external_ = visible_ = false;
        }
    }

    void variable(const std::string& word, uint32_t line) {
        Declaration::Space space;
        if (word == ".global") {
            space = Declaration::Space::global;
        } else if (word == ".const") {
            space = Declaration::Space::constant;
        } else if (word == ".shared") {
            space = Declaration::Space::shared;
        } else {
            fail(line, "unknown directive " + word);
        }
        Declaration decl = parse_declaration(cursor_, space);
        cursor_.expect(";");
        decl.external = external_;
        decl.visible = visible_;
        if (external_ && space != Declaration::Space::shared) {
            fail(line, decl.name + ": external variables of other modules cannot be linked");
        }
        if (ast_.variable(decl.name)) {
            fail(line, decl.name + ": declared twice");
        }
        ast_.variables.push_back(std::move(decl));
    }

    void function(bool entry, uint32_t line) {
        Body body;
        body.entry = entry;
        body.line = line;
        body.returns = entry ? std::vector<Declaration>() : parse_parameters(cursor_);
        body.name = cursor_.word();
        body.params = parse_parameters(cursor_);
        attributes(body);
        if (!cursor_.accept(";")) {
            body.defined = true;
            parse_body(cursor_, body);
        }
        for (Body& known : ast_.bodies) {
            if (known.name == body.name) {
                if (known.defined && body.defined) {
                    fail(line, body.name + ": defined twice");
                }
                if (body.defined) {
                    known = std::move(body);
                }
                return;
            }
        }
        ast_.bodies.push_back(std::move(body));
    }

    void attributes(Body& body) {
        while (!cursor_.is("{") && !cursor_.is(";")) {
            uint32_t line = cursor_.line();
            std::string word = cursor_.word();
            if (word == ".maxntid" || word == ".reqntid") {
                std::array<uint32_t, 3> block{static_cast<uint32_t>(cursor_.integer()), 1, 1};
                for (size_t i = 1; i < block.size() && cursor_.accept(","); ++i) {
                    block[i] = static_cast<uint32_t>(cursor_.integer());
                }
                if (word == ".reqntid") {
                    body.required_block = block;
                } else {
                    const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
                    body.max_threads = static_cast<uint32_t>(std::min<uint64_t>(threads, 1024));
                }
            } else if (word == ".minnctapersm" || word == ".maxnctapersm" || word == ".maxnreg") {
                cursor_.integer();
            } else if (word == ".pragma") {
                cursor_.take();
                cursor_.accept(";");
            } else if (word != ".noreturn") {
                fail(line, body.name + ": unknown directive " + word);
            }
        }
    }

    Cursor cursor_;
    Ast ast_;
    bool external_ = false;
    bool visible_ = false;
};

} // namespace

Ast parse_ast(std::string_view text) {
    std::vector<Token> tokens = lex(text);
    return ModuleParser(tokens).run();
}

} // namespace flowgpu::emu::ptx
