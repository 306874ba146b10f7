// PTX interpreter of the emulated GPU: text in, kernels executed on one CPU thread a launch.
//
// Rules:
// - No global mutable state: any number of launches may run at once on different threads.
// - One launch is deterministic: CTAs run in linear order on the calling thread; only CTAs that
// spin
//   on global memory are time-sliced, round robin.
// - What the interpreter does not know is an Error that names it, raised by Module::parse.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace flowgpu::emu::ptx {

// Generic addresses of the per-CTA and per-thread spaces. Device memory must lie below all of them.
constexpr uint64_t shared_window = 0x0001'0000'0000'0000ull;
constexpr uint64_t local_window = 0x0002'0000'0000'0000ull;
constexpr uint64_t param_window = 0x0003'0000'0000'0000ull;
constexpr uint64_t window_bytes = 0x0000'0001'0000'0000ull;
// Addresses of functions begin here. No memory is at them: a kernel can only call and compare them.
constexpr uint64_t code_window = 0x0004'0000'0000'0000ull;
constexpr uint64_t function_bytes = 16; // from one function of a module to the next

struct Error {
    std::string message; // "line 12: opcode: reason"
};

struct Param {
    uint32_t offset, size, align; // bytes in the parameter buffer
};

// A module-scope .global or .const variable. The driver gives it memory before the first launch.
struct Variable {
    // The 8 bytes at `offset` become address(symbol) plus the value that `init` already holds
    // there. The symbol is a variable's or a function's.
    struct Reloc {
        uint64_t offset;
        std::string symbol;
    };
    std::string name;
    uint64_t size = 0;
    uint32_t align = 1;
    bool constant = false;
    std::vector<uint8_t> init; // empty (all zeros) or `size` bytes
    std::vector<Reloc> relocs;
    bool visible = false; // outside of its module
    bool managed = false; // the host uses it by its address, too
};

struct Code; // decoded instructions

struct Function {
    std::string name;
    std::vector<Param> params;
    uint32_t param_bytes = 0;
    uint32_t static_shared_bytes = 0;
    uint32_t local_bytes = 0; // a thread
    uint32_t reg_count = 0;   // 32-bit registers a thread, at most 255: an estimate, PTX fixes none
    uint32_t max_threads = 1024;
    std::array<uint32_t, 3> required_block{}; // by .reqntid; 0: any will do
    bool entry = false;
    std::shared_ptr<const Code> code; // entries only; functions are expanded where they are called
};

class Module {
  public:
    // Null and *error when the text is not PTX that the interpreter can run completely.
    static std::shared_ptr<Module> parse(std::string_view text, Error* error);

    const Function* find(std::string_view name) const; // null: no such function
    const std::vector<Function>& functions() const { return functions_; }
    // In bytes of addresses: that of a function is where the code lies plus its offset.
    uint64_t code_bytes() const { return functions_.size() * function_bytes; }
    uint64_t code_offset(const Function& function) const {
        return static_cast<uint64_t>(&function - functions_.data()) * function_bytes;
    }
    const std::vector<Variable>& variables() const { return variables_; }
    const std::string& target() const { return target_; }   // "sm_80"
    const std::string& version() const { return version_; } // "9.0"

  private:
    friend class ModuleBuilder;
    std::vector<Function> functions_;
    std::vector<Variable> variables_;
    std::string target_, version_;
};

// What a number means that a kernel has for a texture or a surface object. An extent of 0 is a
// dimension that there is not.
struct Image {
    enum class Texel : uint8_t { u8, u16, u32, s8, s16, s32, f16, f32 };
    enum class Edge : uint8_t { wrap, clamp, mirror, border };

    uint8_t* host = nullptr; // of an array; null: device memory at `address`
    uint64_t address = 0;
    uint64_t width = 0, height = 0, depth = 0; // elements
    uint64_t layers = 0;                       // faces of a cubemap, too
    uint64_t pitch = 0, slice = 0;             // bytes from row to row, and from slice to slice
    Texel texel = Texel::u8;
    uint8_t channels = 1;
    bool cube = false;
    bool linear_memory = false;
    bool surface = false;  // else a texture
    bool stored = false;   // surfaces may be made of it
    bool integers = false; // integers are read as they are, else as fractions
    bool normalized = false;
    bool filtered = false;
    Edge edge[3] = {Edge::clamp, Edge::clamp, Edge::clamp};
    float border[4] = {};

    uint32_t element() const { // bytes
        const bool one = texel == Texel::u8 || texel == Texel::s8;
        const bool four = texel == Texel::u32 || texel == Texel::s32 || texel == Texel::f32;
        return channels * (one ? 1u : four ? 4u : 2u);
    }
};

// Live device memory as the launch sees it. Called from the launching thread only.
class AddressSpace {
  public:
    struct Range {
        uint64_t begin = 0, end = 0; // the whole live mapping around the address
        uint8_t* host = nullptr;     // host address of `begin`
        bool writable = false;
    };
    virtual ~AddressSpace() = default;
    // False: no live mapping at `addr`, the kernel gets illegal_address.
    virtual bool find(uint64_t addr, Range* range) = 0;
    // Ranges are cached as long as this stays the same; it is asked again every few thousand
    // instructions. Memory behind a range found earlier must stay readable until the launch ends or
    // the epoch was seen to change.
    virtual uint64_t epoch() const { return 0; }
    // Null: the number means nothing. Stays as it is as `find` says of ranges.
    virtual const Image* image(uint64_t) { return nullptr; }
};

// Exact ranges of device memory that one launch wrote (st, atom, red, wmma.store).
class WriteLog {
  public:
    struct Range {
        uint64_t addr, size;
    };
    void add(uint64_t addr, uint64_t size) {
        if (!raw_.empty() && raw_.back().addr + raw_.back().size == addr) {
            raw_.back().size += size;
            return;
        }
        raw_.push_back({addr, size});
        if (raw_.size() >= limit_) {
            compact();
        }
    }
    // Sorted, merged, disjoint.
    const std::vector<Range>& ranges() {
        compact();
        return raw_;
    }

  private:
    void compact();
    std::vector<Range> raw_;
    size_t limit_ = 1 << 16;
};

struct Launch {
    uint32_t grid[3] = {1, 1, 1};
    uint32_t block[3] = {1, 1, 1};
    uint32_t dynamic_shared = 0;
    const uint8_t* params = nullptr; // Function::param_bytes bytes
    std::vector<uint64_t> variables; // device address of each of Module::variables(), in order
    uint64_t code = 0;               // where the functions' addresses begin
    WriteLog* log = nullptr;         // null: off
    const std::atomic<bool>* cancel = nullptr; // true: stop soon, result is `cancelled`
};

struct Result {
    enum class Code {
        ok,
        illegal_address,
        misaligned_address,
        illegal_instruction,
        launch_failure, // trap, deadlock, or a launch that the function cannot have
        assert_failed,
        cancelled,
    };
    Code code = Code::ok;
    uint64_t address = 0;           // of illegal_address and misaligned_address
    std::string detail;             // opcode, PTX line, CTA and thread
    uint64_t lane_instructions = 0; // executed instructions times active threads
};

Result launch(const Module& module, const Function& function, const Launch& launch,
              AddressSpace& memory);

} // namespace flowgpu::emu::ptx
