#include "lexer.h"

#include <cctype>

namespace flowgpu::emu::ptx {

void fail(uint32_t line, const std::string& what) {
    throw PtxFailure{"line " + std::to_string(line) + ": " + what};
}

namespace {

bool word_start(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
           c == '.';
}

bool word_char(char c) {
    return word_start(c) || std::isdigit(static_cast<unsigned char>(c));
}

class Lexer {
  public:
    explicit Lexer(std::string_view text) : text_(text) {}

    std::vector<Token> run() {
        while (skip_blank(), pos_ < text_.size()) {
            Token token = next();
            if (token.kind == Token::Kind::word &&
                (token.text == ".loc" || token.text == ".file")) {
                skip_line();
                continue;
            }
            tokens_.push_back(token);
        }
        tokens_.push_back({Token::Kind::end, {}, line_});
        return std::move(tokens_);
    }

  private:
    char at(size_t offset) const {
        return pos_ + offset < text_.size() ? text_[pos_ + offset] : '\0';
    }

    void skip_line() {
        while (pos_ < text_.size() && text_[pos_] != '\n') {
            ++pos_;
        }
    }

    void skip_blank() {
        while (pos_ < text_.size()) {
            char c = text_[pos_];
            if (c == '\n') {
                ++line_;
                ++pos_;
            } else if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
                ++pos_; // images handed to the driver end with a NUL
            } else if (c == '/' && at(1) == '/') {
                skip_line();
            } else if (c == '/' && at(1) == '*') {
                skip_comment();
            } else {
                return;
            }
        }
    }

    void skip_comment() {
        uint32_t start = line_;
        for (pos_ += 2; pos_ < text_.size(); ++pos_) {
            if (text_[pos_] == '*' && at(1) == '/') {
                pos_ += 2;
                return;
            }
            line_ += text_[pos_] == '\n';
        }
        fail(start, "comment without end");
    }

    Token next() {
        size_t start = pos_;
        Token::Kind kind = Token::Kind::punct;
        if (word_start(text_[pos_])) {
            kind = Token::Kind::word;
            bool directive = text_[pos_] == '.'; // ".reg.b32 x" is three words
            while ((word_char(at(0)) && !(directive && pos_ > start && at(0) == '.')) ||
                   (at(0) == ':' && at(1) == ':')) {
                pos_ += at(0) == ':' ? 2 : 1;
            }
        } else if (std::isdigit(static_cast<unsigned char>(text_[pos_]))) {
            kind = Token::Kind::number;
            bool hex = text_[pos_] == '0' && std::isalpha(static_cast<unsigned char>(at(1)));
            while (word_char(at(0)) || (!hex && (at(0) == '-' || at(0) == '+') &&
                                        (text_[pos_ - 1] == 'e' || text_[pos_ - 1] == 'E'))) {
                ++pos_;
            }
        } else if (text_[pos_] == '"') {
            kind = Token::Kind::string;
            do {
                pos_ += at(0) == '\\' ? 2 : 1;
                if (pos_ >= text_.size() || at(0) == '\n') {
                    fail(line_, "string without end");
                }
            } while (at(0) != '"');
            ++pos_;
        } else {
            ++pos_;
        }
        return {kind, text_.substr(start, pos_ - start), line_};
    }

    std::string_view text_;
    size_t pos_ = 0;
    uint32_t line_ = 1;
    std::vector<Token> tokens_;
};

} // namespace

std::vector<Token> lex(std::string_view text) {
    return Lexer(text).run();
}

} // namespace flowgpu::emu::ptx
