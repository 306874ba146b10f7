#include "bridge.h"

#include "arguments.h"
#include "effects.h"
#include "living.h"
#include "threads.h"

namespace flowgpu::replay {

std::atomic<uint64_t> unsaved_calls[kSymbols];

namespace bridge {

#define FG_OFTEN(name) static __attribute__((hot)) decltype(::name) name;
#include "generated/often.inc"
#undef FG_OFTEN

template <unsigned symbol> constexpr bool kLaunches = effects[symbol].does == Does::launches;

// Works as Entry does. But a watched call goes to the watcher first, which calls the bridge again.
#define FG_ENTER(name, arguments)                                                                  \
    gate::Guard guard;                                                                             \
    if constexpr (does(I_##name) != Does::nothing)                                                 \
        if (guard.watched())                                                                       \
            return gate::watched<I_##name, &bridge::name, CUresult> arguments;                     \
    catch_up(guard.record());

#define FG_PASS(name, parameters, arguments)                                                       \
    static CUresult name parameters {                                                              \
        FG_ENTER(name, arguments)                                                                  \
        return DriverCall(FG_DRIVER(name), kLaunches<I_##name>) arguments;                         \
    }
#define FG_UNSAVED(name, parameters, arguments)                                                    \
    static CUresult name parameters {                                                              \
        FG_ENTER(name, arguments)                                                                  \
        CUresult result = DriverCall(FG_DRIVER(name), kLaunches<I_##name>) arguments;              \
        flowgpu_page.contexts.fetch_add(1); /* whatever it was */                                  \
        if (result == CUDA_SUCCESS)                                                                \
            unsaved_calls[I_##name].fetch_add(1, std::memory_order_relaxed);                       \
        return result;                                                                             \
    }
#define FG_LIVES(name, parameters, arguments)                                                      \
    static CUresult name parameters {                                                              \
        FG_ENTER(name, arguments)                                                                  \
        return living::begun(DriverCall(FG_DRIVER(name)) arguments, I_##name,                      \
                             living::made_at arguments);                                           \
    }
#define FG_ENDS(name, parameters, arguments)                                                       \
    static CUresult name parameters {                                                              \
        FG_ENTER(name, arguments)                                                                  \
        living::Ending ending arguments;                                                           \
        return ending.done(DriverCall(FG_DRIVER(name)) arguments);                                 \
    }
#define FG_RECORD(name, parameters, arguments)                                                     \
    static CUresult name parameters {                                                              \
        FG_ENTER(name, arguments)                                                                  \
        return recorded::name arguments;                                                           \
    }
#include "generated/replay.inc"
#undef FG_ENTER
#undef FG_PASS
#undef FG_UNSAVED
#undef FG_LIVES
#undef FG_ENDS
#undef FG_RECORD

// True if the program sees only one GPU: then every context is on it.
static bool one_device() {
    int count = 0;
    return FG_DRIVER(cuDeviceGetCount)(&count) == CUDA_SUCCESS && count == 1;
}

__attribute__((noinline)) static CUresult ask_for_device(CUdevice* device) {
    Entry entry;
    const uint32_t contexts = flowgpu_page.contexts.load();
    const CUresult result = FG_DRIVER(cuCtxGetDevice)(device);
    const bool known = result == CUDA_SUCCESS && *device == 0 && one_device();
    if (gate::ThreadRecord* record = knowing_record())
        record->on_device.store(known ? contexts : 0, std::memory_order_relaxed);
    return result;
}

// cudart asks for it a dozen times a launch. Where there is but one GPU it is known as long as the
// thread's context is the same, and there; the driver need not be for that.
__attribute__((always_inline)) static inline CUresult device_in(const gate::ThreadRecord* record,
                                                                CUdevice* device) {
    const uint32_t contexts = flowgpu_page.contexts.load(std::memory_order_relaxed);
    if (__builtin_expect(device && record->on_device.load(std::memory_order_relaxed) == contexts,
                         1)) {
        *device = 0;
        return CUDA_SUCCESS;
    }
    return ask_for_device(device);
}

__attribute__((hot)) static CUresult current_device(CUdevice* device) {
    return device_in(gate::find_record(), device);
}

// cudart 13 asks by this one. No context means the current one.
__attribute__((hot)) static CUresult device_of(CUdevice* device, CUcontext context) {
    const gate::ThreadRecord* record = gate::find_record();
    if (!context ||
        (knows_current(record) && record->context.load(std::memory_order_relaxed) == context))
        return device_in(record, device);
    return bridge::cuCtxGetDevice_v2(device, context);
}

__attribute__((hot)) static CUresult get_current(CUcontext* context) {
    const gate::ThreadRecord* record = gate::find_record();
    if (!context || !knows_current(record))
        return bridge::cuCtxGetCurrent(context);
    *context =
        static_cast<CUcontext>(const_cast<void*>(record->context.load(std::memory_order_relaxed)));
    return CUDA_SUCCESS;
}

// The first device's primary context, where it is active: what is in `contexts` when that was
// known, and its flags.
static uint64_t active_with(uint32_t contexts, unsigned flags) {
    return uint64_t{contexts} << 32 | flags;
}

__attribute__((noinline)) static CUresult ask_for_primary(CUdevice device, unsigned* flags,
                                                          int* active) {
    Entry entry;
    const uint32_t contexts = flowgpu_page.contexts.load();
    const CUresult result = FG_DRIVER(cuDevicePrimaryCtxGetState)(device, flags, active);
    if (result == CUDA_SUCCESS && device == 0 && *active)
        flowgpu_page.primary.store(active_with(contexts, *flags), std::memory_order_relaxed);
    return result;
}

// PyTorch asks for it four times a launch.
__attribute__((hot)) static CUresult primary_state(CUdevice device, unsigned* flags, int* active) {
    const uint64_t known = flowgpu_page.primary.load(std::memory_order_relaxed);
    const uint32_t contexts = flowgpu_page.contexts.load(std::memory_order_relaxed);
    if (__builtin_expect(device == 0 && flags && active && known >> 32 == contexts, 1)) {
        *flags = static_cast<unsigned>(known);
        *active = 1;
        return CUDA_SUCCESS;
    }
    return ask_for_primary(device, flags, active);
}

} // namespace bridge

void* bridge_for(unsigned symbol, void* driver) {
    static void* const functions[kSymbols] = {
#define FG_FORWARD(name, parameters, arguments) reinterpret_cast<void*>(&bridge::name),
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#define FG_PLAIN(name, refuse) nullptr,
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
    };
    switch (symbol) {
    case I_cuCtxGetCurrent:
        return reinterpret_cast<void*>(&bridge::get_current);
    case I_cuCtxGetDevice:
        return reinterpret_cast<void*>(&bridge::current_device);
    case I_cuCtxGetDevice_v2:
        return reinterpret_cast<void*>(&bridge::device_of);
    case I_cuDevicePrimaryCtxGetState:
        return reinterpret_cast<void*>(&bridge::primary_state);
    default:
        return functions[symbol] ? functions[symbol] : driver;
    }
}

} // namespace flowgpu::replay
