// CUPTI: profilers (PyTorch's by Kineto, TensorFlow's) switch kinds of activity on and off through
// these functions, whose real ones are called. While one is on, what was recorded and not yet read
// is lost with the driver. Signatures and results as in cupti_activity.h of CUDA 13.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "flowgpu/live.h"
#include "memstub.h"

namespace flowgpu::memstub {

namespace {

constexpr int kSuccess = 0, kNotInitialized = 15;
constexpr int kKinds = 256;

std::atomic<uint64_t> on[kKinds / 64];

using Real = std::atomic<void*>;

template <class F, class... A> int call(Real& real, const char* name, F ours, A... arguments) {
    void* function = real.load(std::memory_order_relaxed);
    if (!function) {
        function = next_definition(name, reinterpret_cast<void*>(ours));
        real.store(function, std::memory_order_relaxed);
    }
    return function ? reinterpret_cast<F>(function)(arguments...) : kNotInitialized;
}

int switched(int result, int kind, bool now_on) {
    if (result != kSuccess || kind < 0 || kind >= kKinds)
        return result;
    const uint64_t bit = uint64_t{1} << kind % 64;
    if (now_on)
        on[kind / 64].fetch_or(bit);
    else
        on[kind / 64].fetch_and(~bit);
    return result;
}

} // namespace

} // namespace flowgpu::memstub

#define FGM_SWITCHES(name, parameters, arguments, now_on)                                          \
    static flowgpu::memstub::Real real_##name{nullptr};                                            \
    FGM_EXPORT int name parameters {                                                               \
        using namespace flowgpu::memstub;                                                          \
        return switched(call(real_##name, #name, &::name, FGM_UNPACK arguments), kind, now_on);    \
    }
#define FGM_UNPACK(...) __VA_ARGS__

FGM_SWITCHES(cuptiActivityEnable, (int kind), (kind), true)
FGM_SWITCHES(cuptiActivityDisable, (int kind), (kind), false)
FGM_SWITCHES(cuptiActivityEnableContext, (void* context, int kind), (context, kind), true)
FGM_SWITCHES(cuptiActivityDisableContext, (void* context, int kind), (context, kind), false)

static flowgpu::memstub::Real real_cuptiFinalize{nullptr};
FGM_EXPORT int cuptiFinalize() {
    using namespace flowgpu::memstub;
    const int result = call(real_cuptiFinalize, "cuptiFinalize", &::cuptiFinalize);
    for (auto& kinds : on)
        if (result == kSuccess)
            kinds = 0;
    return result;
}

void* flowgpu::memstub::ours_of_cupti(const char* name, void* found) {
#define FGM_ENTRY(name)                                                                            \
    {                                                                                              \
        #name, reinterpret_cast<void*>(&::name), &real_##name                                      \
    }
    static const struct {
        const char* name;
        void* ours;
        Real* real;
    } kOurs[] = {
        FGM_ENTRY(cuptiActivityEnable),
        FGM_ENTRY(cuptiActivityDisable),
        FGM_ENTRY(cuptiActivityEnableContext),
        FGM_ENTRY(cuptiActivityDisableContext),
        FGM_ENTRY(cuptiFinalize),
    };
    for (const auto& one : kOurs) {
        void* before = nullptr;
        if (strcmp(name, one.name) == 0 && found != one.ours &&
            (one.real->compare_exchange_strong(before, found) || before == found))
            return one.ours;
    }
    return found;
}

FGM_EXPORT uint32_t flowgpu_memstub_is_profiled() {
    uint64_t any = 0;
    for (const auto& kinds : flowgpu::memstub::on)
        any |= kinds.load();
    return any != 0;
}
