// What the bodies of recorded functions share.
#ifndef FLOWGPU_INTERCEPT_REPLAY_RECORDED_H
#define FLOWGPU_INTERCEPT_REPLAY_RECORDED_H

#include "bridge.h"
#include "record.h"

namespace flowgpu::replay::recorded {

// The call of a function that gives a handle, as an object keeps it.
template <class H, class F, class... V> Make maker(Function<F> function, V... values) {
    return Make(
        function.symbol,
        [call = function.call](void** again, V&... each) {
            H handle = nullptr;
            CUresult result = call(&handle, to_call(each)...);
            *again = handle;
            return result;
        },
        std::move(values)...);
}

template <class H> CUresult destroy(H handle, CUresult (*function)(H)) {
    CUresult result = function(to_driver(handle));
    if (result == CUDA_SUCCESS)
        end(handle);
    return result;
}

// The call of a function that sets `what` of an object, as the object keeps it.
template <class F, class... V>
void keep_set(const void* handle, uint64_t what, Function<F> function, V... values) {
    set(handle, function.symbol, what,
        Set(
            function.symbol, [call = function.call](V&... each) { return call(to_call(each)...); },
            std::move(values)...));
}

// Calls it, and keeps it if it succeeded.
template <class F, class... V>
CUresult change(const void* handle, uint64_t what, Function<F> function, V... values) {
    const CUresult result = function.call(to_call(values)...);
    if (result == CUDA_SUCCESS)
        keep_set(handle, what, function, std::move(values)...);
    return result;
}

} // namespace flowgpu::replay::recorded

#endif
