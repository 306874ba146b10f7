// Token cursor shared by the two halves of the parser.
#pragma once

#include "ast.h"

namespace flowgpu::emu::ptx {

class Cursor {
  public:
    explicit Cursor(const std::vector<Token>& tokens) : tokens_(tokens) {}

    const Token& peek(size_t ahead = 0) const {
        return tokens_[std::min(pos_ + ahead, tokens_.size() - 1)];
    }
    uint32_t line() const { return peek().line; }
    bool done() const { return peek().kind == Token::Kind::end; }
    bool is(std::string_view text) const {
        return peek().text == text && peek().kind != Token::Kind::string;
    }
    bool accept(std::string_view text);
    void expect(std::string_view text);
    const Token& take();
    std::string word(); // a word, or fails
    uint64_t integer(); // a constant with optional sign
    Operand literal();  // integer or floating-point constant
    void skip_braces(); // "{ ... }"

  private:
    const std::vector<Token>& tokens_;
    size_t pos_ = 0;
};

// ".align 4 .b8 name[16]" and its relatives, from behind the state space on.
Declaration parse_declaration(Cursor& cursor, Declaration::Space space);

// "(.param .b32 a, .param .b64 b)", or nothing.
std::vector<Declaration> parse_parameters(Cursor& cursor);

// From behind the parameter list of a function on: "{ ... }".
void parse_body(Cursor& cursor, Body& body);

} // namespace flowgpu::emu::ptx
