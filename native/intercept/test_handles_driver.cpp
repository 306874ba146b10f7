// A driver that does nothing but look at what it is given: a call with a handle of the program's
// among its arguments, or in what they lead to, is answered with CUDA_ERROR_INVALID_HANDLE. All
// others succeed, and have new handles of its own where they ask for some.
#include <atomic>
#include <cstring>
#include <type_traits>

#include "replay/handles.h"
#include "test_handles.h"

namespace {

using flowgpu::replay::IsHandle;

bool in_words(const void* bytes, size_t size) {
    for (size_t at = 0; at + sizeof(void*) <= size; at += sizeof(void*)) {
        const void* word = nullptr;
        memcpy(&word, static_cast<const char*>(bytes) + at, sizeof word);
        if (flowgpu::replay::slot_of(word))
            return true;
    }
    return false;
}

// The size of what a pointer leads to; 0 if its type is opaque.
template <class T, class = void> constexpr size_t kBytes = 0;
template <class T>
constexpr size_t kBytes<T, std::enable_if_t<std::is_object_v<T> && sizeof(T) != 0>> = sizeof(T);

template <class T> bool has_handle(const T& argument) {
    return in_words(&argument, sizeof argument);
}
template <class T> bool has_handle(T* const& argument) {
    if constexpr (kBytes<T> != 0)
        if (argument && in_words(argument, kBytes<T> * kListed<T>))
            return true;
    return in_words(&argument, sizeof argument);
}
bool has_handle(const CUlaunchConfig* const& config) {
    return config && (in_words(config, sizeof *config) ||
                      in_words(config->attrs, sizeof *config->attrs * config->numAttrs));
}

template <class T> void answer(const T&) {}
template <class H> std::enable_if_t<IsHandle<H>::value> answer(H* const& place) {
    static std::atomic<uintptr_t> last{0};
    if (place)
        *place = reinterpret_cast<H>(last += 64);
}
void answer(const CUlaunchConfig* const& config) {
    for (unsigned a = 0; config && a < config->numAttrs; a++)
        if (config->attrs[a].id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE)
            config->attrs[a].value.deviceUpdatableKernelNode.devNode = kDeviceNode;
}
void answer(CUcontext* const& place) { // one is current all the time
    if (place)
        *place = reinterpret_cast<CUcontext>(64);
}

template <class... T> CUresult call(const T&... arguments) {
    if ((has_handle(arguments) || ...))
        return CUDA_ERROR_INVALID_HANDLE;
    (answer(arguments), ...);
    return CUDA_SUCCESS;
}

} // namespace

#define FG_FORWARD(name, parameters, arguments)                                                    \
    extern "C" __attribute__((visibility("default"))) CUresult name parameters {                   \
        return call arguments;                                                                     \
    }
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#include "generated/api.inc"
