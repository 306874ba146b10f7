// Contexts, and what of a thread is the driver's.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "recorded.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

bool primary_is_active(CUdevice device) {
    unsigned flags = 0;
    int active = 0;
    return FG_DRIVER(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && active;
}

// Retains the primary context as often as the program did. Ends it where the program had ended it.
CUresult retain_again(CUdevice device, const Object& primary, void** again) {
    CUcontext context = nullptr;
    CUresult result = CUDA_SUCCESS;
    // cudart has the handle of each context from its start on, and launchers nothing more.
    if (!primary.uses && find_primary(&context, device)) {
        *again = context;
        return result;
    }
    for (uint64_t i = 0; result == CUDA_SUCCESS && i < std::max<uint64_t>(primary.uses, 1); i++)
        result = FG_DRIVER(cuDevicePrimaryCtxRetain)(&context, device);
    *again = context;
    if (result == CUDA_SUCCESS && !primary.uses)
        result = FG_DRIVER(cuDevicePrimaryCtxRelease_v2)(device);
    else if (result == CUDA_SUCCESS && !primary.active)
        result = FG_DRIVER(cuDevicePrimaryCtxReset_v2)(device);
    return result;
}

} // namespace

CUcontext note_primary(CUcontext driver, CUdevice device, bool used) {
    const bool active = used || primary_is_active(device);
    CUcontext context = note(driver, false, [=](Object& object) {
        object.context = nullptr;
        object.primary = device;
        object.active = active;
        object.make = Make(
            I_cuDevicePrimaryCtxRetain,
            [self = &object](void** again, CUdevice of) { return retain_again(of, *self, again); },
            device);
    });
    if (used)
        with_object(context, [](Object& object) {
            flowgpu_page.contexts.fetch_add(1);
            object.uses++;
            object.active = true;
        });
    return context;
}

namespace recorded {

namespace {

// `call` gets where the context goes, and `values`.
template <class F, class... V>
CUresult create(CUcontext* out, unsigned symbol, const char* why, F call, V... values) {
    CUcontext made = nullptr;
    CUresult result = call(out ? &made : nullptr, values...);
    if (result != CUDA_SUCCESS)
        return result;
    *out = note(made, true, [&](Object& object) {
        object.context = nullptr;
        object.why = why;
        if (*why)
            return;
        object.make = Make(
            symbol,
            [call](void** again, V&... each) {
                CUcontext context = nullptr;
                CUresult remade = call(&context, each...);
                *again = context;
                if (remade == CUDA_SUCCESS)
                    FG_DRIVER(cuCtxPopCurrent_v2)(&context);
                return remade;
            },
            values...);
    });
    now_pushed(*out);
    return result;
}

CUresult destroy(CUcontext context, CUresult (*function)(CUcontext)) {
    flowgpu_page.contexts.fetch_add(1); // what it stores is destroyed now
    CUresult result = function(to_driver(context));
    if (result != CUDA_SUCCESS)
        return result;
    if (current_context() == context)
        now_popped();
    end(context);
    return result;
}

CUresult push(CUcontext context, CUresult (*function)(CUcontext)) {
    CUresult result = function(to_driver(context));
    if (result == CUDA_SUCCESS)
        now_pushed(context);
    return result;
}

// A context that has ended may still be current: then only the thread's own stack knows it.
CUresult current(CUcontext* out, CUresult (*function)(CUcontext*)) {
    const uint32_t contexts = flowgpu_page.contexts.load();
    CUcontext driver = nullptr;
    CUresult result = function(out ? &driver : nullptr);
    if (result == CUDA_SUCCESS && out) {
        CUcontext known = current_context();
        if (known && driver == own_thread->ended && !object_of(known))
            *out = known;
        else if (to_driver(known) != driver)
            *out = to_program(driver);
        else if ((*out = known))
            know_current(known, contexts);
    }
    return result;
}

CUresult pop(CUcontext* out, CUresult (*function)(CUcontext*)) {
    CUresult result = current(out, function);
    if (result == CUDA_SUCCESS)
        now_popped();
    return result;
}

CUresult end_primary(CUdevice device, CUresult (*function)(CUdevice), bool one_use) {
    flowgpu_page.contexts.fetch_add(1); // what it stores may be destroyed now
    CUresult result = function(device);
    flowgpu_page.contexts.fetch_add(1);
    if (result != CUDA_SUCCESS)
        return result;
    end_of_primary(device, one_use, primary_is_active(device));
    return result;
}

CUresult set_primary(CUdevice device, unsigned flags, CUresult (*function)(CUdevice, unsigned)) {
    CUresult result = function(device, flags);
    flowgpu_page.contexts.fetch_add(1);
    if (result == CUDA_SUCCESS)
        set_primary_flags(device, flags);
    return result;
}

} // namespace

CUresult cuCtxCreate(CUcontext* pctx, unsigned flags, CUdevice dev) {
    return create(pctx, I_cuCtxCreate, "", FG_DRIVER(cuCtxCreate), flags, dev);
}

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned flags, CUdevice dev) {
    return create(pctx, I_cuCtxCreate_v2, "", FG_DRIVER(cuCtxCreate_v2), flags, dev);
}

CUresult cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* params, int count, unsigned flags,
                        CUdevice dev) {
    std::vector<CUexecAffinityParam> kept;
    if (params && count > 0)
        kept.assign(params, params + count);
    const auto call = [params, count](CUcontext* out, std::vector<CUexecAffinityParam>& given,
                                      unsigned with, CUdevice on) {
        return FG_DRIVER(cuCtxCreate_v3)(out, given.empty() ? params : given.data(), count, with,
                                         on);
    };
    return create(pctx, I_cuCtxCreate_v3, "", call, kept, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* params, unsigned flags, CUdevice dev) {
    if (!params)
        return create(
            pctx, I_cuCtxCreate_v4, "",
            [](CUcontext* out, unsigned with, CUdevice on) {
                return FG_DRIVER(cuCtxCreate_v4)(out, nullptr, with, on);
            },
            flags, dev);
    const char* why = params->cigParams ? "shared with a graphics client" : "";
    std::vector<CUexecAffinityParam> kept;
    if (params->execAffinityParams && params->numExecAffinityParams > 0)
        kept.assign(params->execAffinityParams,
                    params->execAffinityParams + params->numExecAffinityParams);
    const auto call = [given = *params](CUcontext* out, std::vector<CUexecAffinityParam>& affinity,
                                        unsigned with, CUdevice on) {
        CUctxCreateParams copy = given;
        if (!affinity.empty())
            copy.execAffinityParams = affinity.data();
        return FG_DRIVER(cuCtxCreate_v4)(out, &copy, with, on);
    };
    return create(pctx, I_cuCtxCreate_v4, why, call, kept, flags, dev);
}

CUresult cuCtxDestroy(CUcontext ctx) {
    return destroy(ctx, FG_DRIVER(cuCtxDestroy));
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
    return destroy(ctx, FG_DRIVER(cuCtxDestroy_v2));
}

CUresult cuCtxGetCurrent(CUcontext* pctx) {
    return current(pctx, FG_DRIVER(cuCtxGetCurrent));
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
    const uint32_t contexts = flowgpu_page.contexts.load();
    CUresult result = FG_DRIVER(cuCtxSetCurrent)(to_driver(ctx));
    if (result != CUDA_SUCCESS)
        return result;
    now_current(ctx);
    if (ctx) // else the one below it on the stack, if there is one
        know_current(ctx, contexts);
    return result;
}

CUresult cuCtxPushCurrent(CUcontext ctx) {
    return push(ctx, FG_DRIVER(cuCtxPushCurrent));
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
    return push(ctx, FG_DRIVER(cuCtxPushCurrent_v2));
}

CUresult cuCtxPopCurrent(CUcontext* pctx) {
    return pop(pctx, FG_DRIVER(cuCtxPopCurrent));
}

CUresult cuCtxPopCurrent_v2(CUcontext* pctx) {
    return pop(pctx, FG_DRIVER(cuCtxPopCurrent_v2));
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return change(current_context(), limit, FG_FUNCTION(cuCtxSetLimit), limit, value);
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    return change(current_context(), 0, FG_FUNCTION(cuCtxSetCacheConfig), config);
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
    return change(current_context(), 0, FG_FUNCTION(cuCtxSetSharedMemConfig), config);
}

CUresult cuCtxSetFlags(unsigned flags) {
    CUresult result = change(current_context(), 0, FG_FUNCTION(cuCtxSetFlags), flags);
    flowgpu_page.contexts.fetch_add(1);
    return result;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    const CUresult result = FG_DRIVER(cuCtxEnablePeerAccess)(to_driver(peer), flags);
    const auto again = [](CUcontext to, unsigned with) {
        const Object* other = object_of(to);
        return other && !other->active ? CUDA_SUCCESS
                                       : FG_DRIVER(cuCtxEnablePeerAccess)(to_driver(to), with);
    };
    if (result == CUDA_SUCCESS)
        set(current_context(), I_cuCtxEnablePeerAccess, number_of(peer),
            Set(I_cuCtxEnablePeerAccess, again, peer, flags));
    return result;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    const CUresult result = FG_DRIVER(cuCtxDisablePeerAccess)(to_driver(peer));
    if (result == CUDA_SUCCESS)
        set(current_context(), I_cuCtxEnablePeerAccess, number_of(peer), nullptr);
    return result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
    CUcontext made = nullptr;
    CUresult result = FG_DRIVER(cuDevicePrimaryCtxRetain)(pctx ? &made : nullptr, dev);
    if (result != CUDA_SUCCESS)
        return result;
    *pctx = note_primary(made, dev, true);
    return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
    return end_primary(dev, FG_DRIVER(cuDevicePrimaryCtxRelease), true);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    return end_primary(dev, FG_DRIVER(cuDevicePrimaryCtxRelease_v2), true);
}

CUresult cuDevicePrimaryCtxReset(CUdevice dev) {
    return end_primary(dev, FG_DRIVER(cuDevicePrimaryCtxReset), false);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    return end_primary(dev, FG_DRIVER(cuDevicePrimaryCtxReset_v2), false);
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned flags) {
    return set_primary(dev, flags, FG_DRIVER(cuDevicePrimaryCtxSetFlags));
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned flags) {
    return set_primary(dev, flags, FG_DRIVER(cuDevicePrimaryCtxSetFlags_v2));
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    const CUstreamCaptureMode wanted = mode ? *mode : CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUresult result = FG_DRIVER(cuThreadExchangeStreamCaptureMode)(mode);
    if (ThreadState* thread = result == CUDA_SUCCESS ? this_thread() : nullptr)
        thread->capture_mode = wanted;
    return result;
}

} // namespace recorded

} // namespace flowgpu::replay
