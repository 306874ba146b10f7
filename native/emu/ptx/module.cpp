// Module::parse: text to decoded functions.
#include "lower.h"

namespace flowgpu::emu::ptx {

class ModuleBuilder {
  public:
    static std::shared_ptr<Module> build(std::string_view text) {
        Ast ast = parse_ast(text);
        auto module = std::make_shared<Module>();
        module->version_ = ast.version;
        module->target_ = ast.target;
        for (const Declaration& decl : ast.variables) {
            if (decl.space != Declaration::Space::shared) {
                check_relocations(ast, decl);
                module->variables_.push_back({decl.name, decl.size, decl.align,
                                              decl.space == Declaration::Space::constant, decl.init,
                                              decl.relocs, decl.visible, decl.managed});
            }
        }
        for (const Body& body : ast.bodies) {
            if (body.defined) {
                module->functions_.push_back(function(ast, body));
            }
        }
        return module;
    }

  private:
    static constexpr uint64_t most_params = 32764; // as on hardware

    static void check_relocations(const Ast& ast, const Declaration& decl) {
        for (const Variable::Reloc& reloc : decl.relocs) {
            const Declaration* variable = ast.variable(reloc.symbol);
            const Body* body = ast.find(reloc.symbol);
            if (variable ? variable->space == Declaration::Space::shared
                         : !body || !body->defined) {
                fail(decl.line,
                     decl.name + ": the address of " + reloc.symbol + " is not a constant");
            }
        }
    }

    // Functions are lowered on their own as well, so that an unknown instruction in one that nobody
    // calls is still an error.
    static Function function(const Ast& ast, const Body& body) {
        Function result;
        result.name = body.name;
        result.entry = body.entry;
        result.max_threads = body.max_threads;
        result.required_block = body.required_block;
        for (const Declaration& param : body.params) {
            uint32_t offset = align_up(result.param_bytes, param.align);
            if (param.size > most_params || offset + param.size > most_params) {
                fail(body.line, body.name + ": too many bytes of parameters");
            }
            result.params.push_back({offset, static_cast<uint32_t>(param.size), param.align});
            result.param_bytes = offset + static_cast<uint32_t>(param.size);
        }
        auto code = std::make_shared<Code>();
        Lowering(ast, result, *code).entry(body);
        uint64_t bytes = 0;
        for (Type type : body.registers) {
            bytes += type == Type::pred ? 0 : slot_size(type);
        }
        result.reg_count = static_cast<uint32_t>(std::min<uint64_t>(255, 16 + bytes / 16));
        if (body.entry) {
            result.code = std::move(code);
        }
        return result;
    }
};

std::shared_ptr<Module> Module::parse(std::string_view text, Error* error) {
#if defined(__x86_64__)
    // The handlers are built for x86-64-v3.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        *error = {"this CPU has no AVX2 and FMA, which the emulated GPU needs"};
        return nullptr;
    }
#endif
    try {
        return ModuleBuilder::build(text);
    } catch (const PtxFailure& failure) {
        *error = {failure.message};
    } catch (const std::bad_alloc&) {
        *error = {"out of memory"};
    } catch (const std::exception& e) {
        *error = {std::string("PTX: ") + e.what()};
    }
    return nullptr;
}

const Function* Module::find(std::string_view name) const {
    for (const Function& function : functions_) {
        if (function.name == name) {
            return &function;
        }
    }
    return nullptr;
}

} // namespace flowgpu::emu::ptx
