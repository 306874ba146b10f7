// Tokens of PTX text.
#pragma once

#include <string_view>
#include <vector>

#include "ptx.h"

namespace flowgpu::emu::ptx {

struct Token {
    enum class Kind { word, number, string, punct, end };
    Kind kind = Kind::end;
    std::string_view text;
    uint32_t line = 0;
};

// Thrown inside the parser and the lowering only; Module::parse turns it into an Error.
struct PtxFailure {
    std::string message;
};

[[noreturn]] void fail(uint32_t line, const std::string& what);

// A word keeps its dots ("ld.global.v4.f32", "%tid.x", ".L2::128B"). The debug lines .loc and .file
// end with their line instead of a semicolon and are dropped here.
std::vector<Token> lex(std::string_view text);

} // namespace flowgpu::emu::ptx
