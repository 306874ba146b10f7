// C interface of the interpreter for the tests: libflowgpu_ptx_test.so, loaded with ctypes.
// Device memory is whatever host buffers the test registers, at addresses of its choice.
#include <cstring>
#include <map>

#include "ptx.h"

using namespace flowgpu::emu::ptx;

namespace {

class Buffers : public AddressSpace {
  public:
    std::map<uint64_t, Range> ranges;

    bool find(uint64_t addr, Range* range) override {
        auto it = ranges.upper_bound(addr);
        if (it == ranges.begin() || addr >= (--it)->second.end) {
            return false;
        }
        *range = it->second;
        return true;
    }
};

struct Session {
    std::shared_ptr<Module> module;
    Buffers memory;
    std::vector<uint64_t> variables;
    uint64_t code = code_window;
    WriteLog log;
    Result result;
    std::atomic<bool> cancel{false};
};

void copy_text(const std::string& text, char* out, size_t size) {
    size_t length = std::min(text.size(), size - 1);
    std::memcpy(out, text.data(), length);
    out[length] = '\0';
}

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Null on error; `message` says why.
EXPORT Session* ptx_open(const char* text, size_t size, char* message, size_t message_size) {
    Error error;
    auto module = Module::parse(std::string_view(text, size), &error);
    if (!module) {
        copy_text(error.message, message, message_size);
        return nullptr;
    }
    auto* session = new Session;
    session->module = std::move(module);
    session->variables.resize(session->module->variables().size());
    return session;
}

EXPORT void ptx_close(Session* session) {
    delete session;
}

EXPORT void ptx_map(Session* session, uint64_t addr, void* host, uint64_t size, int writable) {
    session->memory.ranges[addr] = {addr, addr + size, static_cast<uint8_t*>(host), writable != 0};
}

EXPORT int ptx_variable_count(const Session* session) {
    return static_cast<int>(session->module->variables().size());
}

EXPORT uint64_t ptx_variable(const Session* session, int index, char* name, size_t name_size) {
    const Variable& variable = session->module->variables()[static_cast<size_t>(index)];
    copy_text(variable.name, name, name_size);
    return variable.size;
}

// The address of a function, or 0.
EXPORT uint64_t ptx_function(const Session* session, const char* name) {
    const Function* function = session->module->find(name);
    return function ? session->code + session->module->code_offset(*function) : 0;
}

// Places a variable at `addr`, which must be mapped. Relocations are applied by ptx_link, when all
// variables have their place.
EXPORT void ptx_place(Session* session, int index, uint64_t addr) {
    session->variables[static_cast<size_t>(index)] = addr;
}

EXPORT int ptx_link(Session* session) {
    const auto& variables = session->module->variables();
    for (size_t k = 0; k < variables.size(); ++k) {
        AddressSpace::Range range;
        if (!session->memory.find(session->variables[k], &range)) {
            return -1;
        }
        uint8_t* host = range.host + (session->variables[k] - range.begin);
        std::memset(host, 0, variables[k].size);
        if (!variables[k].init.empty()) {
            std::memcpy(host, variables[k].init.data(), variables[k].init.size());
        }
        for (const Variable::Reloc& reloc : variables[k].relocs) {
            uint64_t value, address = ptx_function(session, reloc.symbol.c_str());
            for (size_t other = 0; other < variables.size(); ++other) {
                if (variables[other].name == reloc.symbol) {
                    address = session->variables[other];
                }
            }
            std::memcpy(&value, host + reloc.offset, sizeof value);
            value += address;
            std::memcpy(host + reloc.offset, &value, sizeof value);
        }
    }
    return 0;
}

// -1: no such kernel. Otherwise the number of parameters; offsets and sizes of the first `room`.
EXPORT int ptx_params(const Session* session, const char* kernel, uint32_t* offsets,
                      uint32_t* sizes, int room) {
    const Function* function = session->module->find(kernel);
    if (!function) {
        return -1;
    }
    int count = static_cast<int>(function->params.size());
    for (int k = 0; k < std::min(count, room); ++k) {
        offsets[k] = function->params[static_cast<size_t>(k)].offset;
        sizes[k] = function->params[static_cast<size_t>(k)].size;
    }
    return count;
}

// static shared, local, registers, max threads, parameter bytes
EXPORT int ptx_attributes(const Session* session, const char* kernel, uint32_t* out) {
    const Function* function = session->module->find(kernel);
    if (!function) {
        return -1;
    }
    out[0] = function->static_shared_bytes;
    out[1] = function->local_bytes;
    out[2] = function->reg_count;
    out[3] = function->max_threads;
    out[4] = function->param_bytes;
    return 0;
}

EXPORT int ptx_launch(Session* session, const char* kernel, const uint32_t* grid,
                      const uint32_t* block, uint32_t dynamic_shared, const uint8_t* params,
                      int with_log) {
    const Function* function = session->module->find(kernel);
    if (!function) {
        return -1;
    }
    Launch config;
    std::copy(grid, grid + 3, config.grid);
    std::copy(block, block + 3, config.block);
    config.dynamic_shared = dynamic_shared;
    config.params = params;
    config.variables = session->variables;
    config.code = session->code;
    session->log = WriteLog();
    config.log = with_log ? &session->log : nullptr;
    config.cancel = &session->cancel;
    session->result = launch(*session->module, *function, config, session->memory);
    return static_cast<int>(session->result.code);
}

EXPORT void ptx_cancel(Session* session) {
    session->cancel = true;
}

EXPORT void ptx_result(const Session* session, uint64_t* address, uint64_t* lane_instructions,
                       char* detail, size_t detail_size) {
    *address = session->result.address;
    *lane_instructions = session->result.lane_instructions;
    copy_text(session->result.detail, detail, detail_size);
}

// Number of written ranges; the first `room` of them as (address, size) pairs.
EXPORT uint64_t ptx_writes(Session* session, uint64_t* pairs, uint64_t room) {
    const auto& ranges = session->log.ranges();
    for (uint64_t k = 0; k < std::min<uint64_t>(ranges.size(), room); ++k) {
        pairs[2 * k] = ranges[k].addr;
        pairs[2 * k + 1] = ranges[k].size;
    }
    return ranges.size();
}
