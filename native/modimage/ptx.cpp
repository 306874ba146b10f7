// Finds the variables of PTX text in one pass, keeping nothing but their names. Only what the
// assembler accepts as a module is known; a text that this cannot follow is said to be unknown.
#include "forms.h"

#include <algorithm>
#include <cstring>

namespace flowgpu {

namespace {

// Not <cctype>, which follows the program's locale.
bool digit(char c) {
    return c >= '0' && c <= '9';
}

bool word_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || digit(c) || c == '_' || c == '$' ||
           c == '%';
}

bool blank(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

class Scanner {
  public:
    Scanner(std::string_view text, Variables* found) : text_(text), found_(found) {}

    bool run(std::string* why) {
        take();
        if (token_ != ".version") {
            *why = "neither PTX text nor a cubin nor a fat binary";
            return false;
        }
        while (sound_ && !done_) {
            statement();
        }
        *why = why_;
        return sound_;
    }

  private:
    void fail(const std::string& what) {
        if (sound_) {
            sound_ = false;
            why_ = "PTX text: " + what;
        }
        done_ = true;
        token_ = {};
    }

    // Spaces and comments.
    void skip_blank() {
        while (pos_ < text_.size()) {
            if (blank(text_[pos_])) {
                ++pos_;
            } else if (text_.compare(pos_, 2, "//") == 0) {
                pos_ = std::min(text_.find('\n', pos_), text_.size());
            } else if (text_.compare(pos_, 2, "/*") == 0) {
                const size_t end = text_.find("*/", pos_ + 2);
                if (end == std::string_view::npos) {
                    return fail("a comment without end");
                }
                pos_ = end + 2;
            } else {
                return;
            }
        }
    }

    // The next token: a string with its quotes, ".word", "word", or one other character. Behind the
    // end it is empty. "ld.global.u32" is three tokens, told from a directive by what is before it.
    void take() {
        skip_blank();
        if (done_ || pos_ >= text_.size()) {
            done_ = true;
            token_ = {};
            return;
        }
        const size_t start = pos_++;
        if (text_[start] == '"') {
            while (pos_ < text_.size() && text_[pos_] != '"') {
                pos_ += text_[pos_] == '\\' ? 2 : 1;
            }
            if (pos_ >= text_.size()) {
                return fail("a string without end");
            }
            ++pos_;
        } else if (text_[start] == '.' || word_char(text_[start])) {
            while (pos_ < text_.size() && word_char(text_[pos_])) {
                ++pos_;
            }
        }
        token_ = text_.substr(start, pos_ - start);
        if (in_value_ && word_char(token_[0]) && !digit(token_[0])) {
            found_->by_address_alone = false; // the name of what has an address
        }
    }

    bool accept(std::string_view token) {
        if (token_ != token) {
            return false;
        }
        take();
        return true;
    }

    // From an opening bracket to behind the one that closes it.
    void skip_brackets() {
        size_t depth = 0;
        do {
            depth += token_ == "{" || token_ == "(" || token_ == "[" ? 1 : 0;
            depth -= token_ == "}" || token_ == ")" || token_ == "]" ? 1 : 0;
            found_->managed |= token_ == ".managed"; // nowhere else but in .attribute(.managed)
            take();
        } while (depth != 0 && !done_);
        if (depth != 0) {
            fail("brackets without end");
        }
    }

    // At module scope. Linkage (.visible, .weak, .common) is read over. So is .extern: loaded
    // without a linker, an external variable is a variable of this module ("ignoring extern
    // qualifier", says ptxas). The lines that end without a semicolon (.version, .target, .file)
    // need no more either.
    void statement() {
        if (token_ == ".global" || token_ == ".const") {
            const bool constant = token_ == ".const";
            take();
            variables(constant);
        } else if (token_ == ".entry" || token_ == ".func") {
            take();
            function();
        } else if (token_ == "{") {
            skip_brackets(); // of a .section
        } else if (word_char(token_[0]) || std::strchr(".,;[]\"", token_[0]) != nullptr) {
            take();
        } else {
            fail("a character that is none of PTX at module scope");
        }
    }

    // From behind the state space to behind the semicolon: attributes, then names.
    void variables(bool constant) {
        bool opaque = false; // textures, samplers and surfaces are references, not memory
        while (!token_.empty() && token_[0] == '.') {
            opaque |= token_ == ".texref" || token_ == ".samplerref" || token_ == ".surfref";
            const bool align = token_ == ".align";
            take();
            if (align) {
                take();
            } else if (token_ == "(") {
                skip_brackets(); // of .attribute
            }
        }
        do {
            if (token_.empty() || !word_char(token_[0]) || digit(token_[0])) {
                return fail("a variable without a name");
            }
            if (!opaque) {
                found_->names.emplace_back(token_);
                if (constant) {
                    found_->constants.emplace_back(token_);
                }
            }
            take();
            while (token_ == "[") {
                skip_brackets();
            }
            in_value_ = token_ == "=";
            if (accept("=")) {
                while (!done_ && token_ != "," && token_ != ";") {
                    if (token_ == "{" || token_ == "(") {
                        skip_brackets();
                    } else {
                        take();
                    }
                }
            }
            in_value_ = false;
        } while (accept(","));
        if (!accept(";")) {
            fail("a variable that does not end with its statement");
        }
    }

    // From behind .entry or .func: parameters, attributes, and a body or a semicolon.
    void function() {
        found_->by_address_alone = false;
        while (!done_ && token_ != "{" && token_ != ";") {
            if (accept(".pragma")) {
                while (!done_ && !accept(";")) {
                    take();
                }
            } else if (token_ == "(") {
                skip_brackets();
            } else {
                take();
            }
        }
        if (done_) {
            fail("a function without end");
        } else if (!accept(";")) {
            body();
        }
    }

    void body() {
        size_t depth = 0;
        bool first = false; // of a statement
        do {
            if (first && token_ == ".global") {
                return fail("a function has a .global variable of its own, which no name leads to");
            }
            depth += token_ == "{" ? 1 : 0;
            depth -= token_ == "}" ? 1 : 0;
            first = token_ == "{" || token_ == "}" || token_ == ";" || token_ == ":";
            take();
        } while (depth != 0 && !done_);
        if (depth != 0) {
            fail("a function without end");
        }
    }

    std::string_view text_;
    Variables* found_;
    std::string_view token_;
    std::string why_;
    size_t pos_ = 0;
    bool done_ = false;
    bool in_value_ = false;
    bool sound_ = true;
};

// The device's malloc is declared so: `.extern .func (.param .b64 result) malloc (...)`.
bool declares_malloc(std::string_view text) {
    constexpr std::string_view kName = "malloc", kSpace = " \t\r\n";
    for (size_t at = text.find(kName); at != text.npos; at = text.find(kName, at + 1)) {
        const size_t before = text.substr(0, at).find_last_not_of(kSpace);
        const size_t behind = text.find_first_not_of(kSpace, at + kName.size());
        if (before != text.npos && text[before] == ')' && behind != text.npos &&
            text[behind] == '(') {
            return true;
        }
    }
    return false;
}

} // namespace

bool ptx_variables(std::string_view text, Variables* variables, std::string* why) {
    variables->heap |= declares_malloc(text);
    return Scanner(text, variables).run(why);
}

} // namespace flowgpu
