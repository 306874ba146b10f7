#include "driver.h"

#include <cerrno>
#include <cstdlib>
#include <unordered_map>

#include <dlfcn.h>
#include <pthread.h>

#include "exports.h"
#include "replay/bridge.h"
#include "replay/record.h"

namespace flowgpu {

const char* const symbol_names[kSymbols] = {
#define FG_FORWARD(name, parameters, arguments) #name,
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#define FG_PLAIN(name, refuse) #name,
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
};

const bool refuses[kSymbols] = {
#define FG_FORWARD(name, parameters, arguments) false,
#define FG_GATE FG_FORWARD
#define FG_REFUSE(name, parameters, arguments) true,
// A handler counts what makes the program's state one that cannot be saved, and nothing else.
#define FG_HANDLE FG_REFUSE
#define FG_PLAIN(name, refuse) refuse != 0,
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
};

extern "C" {
Page flowgpu_page;
std::atomic<uint64_t> flowgpu_refused_calls[kSymbols];
}

namespace {

void* const wrappers[kSymbols] = {
#define FG_FORWARD(name, parameters, arguments) reinterpret_cast<void*>(&::name),
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#define FG_PLAIN(name, refuse) reinterpret_cast<void*>(&::name),
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
};

// Says how much a wrapper does: open_driver() leaves out those that only pass a call on.
enum class Wrapper : uint8_t { forwards, gates, does_more };
constexpr Wrapper kinds[kSymbols] = {
#define FG_FORWARD(name, parameters, arguments) Wrapper::forwards,
#define FG_GATE(name, parameters, arguments) Wrapper::gates,
#define FG_HANDLE(name, parameters, arguments) Wrapper::does_more,
#define FG_REFUSE FG_HANDLE
#define FG_PLAIN(name, refuse) Wrapper::does_more,
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
};

CUresult no_driver() {
    return CUDA_ERROR_NO_DEVICE;
}
CUresult no_symbol() {
    return CUDA_ERROR_NOT_FOUND;
}

pthread_once_t opened = PTHREAD_ONCE_INIT;
std::unordered_map<void*, void*>* by_address; // real -> ours; never freed, read-only once made

void open_driver() {
    const char* path = getenv("FLOWGPU_REAL_LIBCUDA");
    // RTLD_LOCAL: the program's symbols must go on binding to us, not to the driver behind us.
    void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    const bool replay = library && replay::prepare(library);
    auto* map = new std::unordered_map<void*, void*>();
    map->reserve(kSymbols * 2);
    for (unsigned i = 0; i < kSymbols; i++) {
        void* function = library ? dlsym(library, symbol_names[i]) : nullptr;
        void* next = function && replay ? replay::bridge_for(i, function) : function;
        // The program may have what our wrapper would only pass the call on to: of the driver's
        // what passes no gate, and the bridges, which pass it themselves.
        const bool passed_on =
            kinds[i] == Wrapper::forwards || (kinds[i] == Wrapper::gates && next != function);
        if (function)
            map->emplace(function, passed_on ? next : wrappers[i]);
        else
            next = function = reinterpret_cast<void*>(library ? &no_symbol : &no_driver);
        flowgpu_page.functions[i].driver = function;
        __atomic_store_n(&flowgpu_page.functions[i].next, next, __ATOMIC_RELEASE);
    }
    by_address = map;
}

} // namespace

extern "C" void* flowgpu_resolve(unsigned symbol) {
    int error = errno;
    pthread_once(&opened, open_driver);
    errno = error;
    return __atomic_load_n(&flowgpu_page.functions[symbol].next, __ATOMIC_ACQUIRE);
}

FG_QUIET(flowgpu_resolve_quietly, flowgpu_resolve);

void* wrapper_for(void* real) {
    pthread_once(&opened, open_driver);
    auto it = by_address->find(real);
    return it == by_address->end() ? nullptr : it->second;
}

} // namespace flowgpu
