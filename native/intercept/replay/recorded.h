// What the bodies of recorded functions share.
#ifndef FLOWGPU_INTERCEPT_REPLAY_RECORDED_H
#define FLOWGPU_INTERCEPT_REPLAY_RECORDED_H

#include "bridge.h"
#include "record.h"

namespace flowgpu::replay::recorded {

// `call`, which gives a handle of the driver's, as an object keeps it.
template <class H, class F> Make maker(F call) {
    return [call](void** again) mutable {
        H handle = nullptr;
        CUresult result = call(&handle);
        *again = handle;
        return result;
    };
}

template <class H> CUresult destroy(H handle, CUresult (*function)(H)) {
    CUresult result = function(to_driver(handle));
    if (result == CUDA_SUCCESS)
        end(handle);
    return result;
}

// Keeps a change of an object, if it succeeded.
inline CUresult change(const void* handle, CUresult result, unsigned symbol, uint64_t what,
                       Set again) {
    if (result == CUDA_SUCCESS)
        set(handle, symbol, what, std::move(again));
    return result;
}

} // namespace flowgpu::replay::recorded

#endif
