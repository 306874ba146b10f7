// The driver's functions, resolved at run time: the library given is the real driver or the
// emulated one.
#pragma once

#include "failure.h"

#include <cuda.h>

namespace fgg {

#define FGG_DRIVER_FUNCTIONS(X)                                                                    \
    X(cuCtxSetCurrent)                                                                             \
    X(cuMemcpyDtoHAsync_v2)                                                                        \
    X(cuMemcpyHtoDAsync_v2)                                                                        \
    X(cuStreamCreate)                                                                              \
    X(cuStreamDestroy_v2)                                                                          \
    X(cuStreamSynchronize)                                                                         \
    X(cuEventCreate)                                                                               \
    X(cuEventRecord)                                                                               \
    X(cuEventSynchronize)                                                                          \
    X(cuEventDestroy_v2)                                                                           \
    X(cuMemHostRegister_v2)                                                                        \
    X(cuMemHostUnregister)                                                                         \
    X(cuMemHostAlloc)                                                                              \
    X(cuMemFreeHost)                                                                               \
    X(cuMemAlloc_v2)                                                                               \
    X(cuMemFree_v2)                                                                                \
    X(cuModuleLoadData)                                                                            \
    X(cuModuleGetFunction)                                                                         \
    X(cuModuleUnload)                                                                              \
    X(cuLaunchKernel)                                                                              \
    X(cuGetErrorName)

struct Driver {
#define X(name) decltype(&::name) name = nullptr;
    FGG_DRIVER_FUNCTIONS(X)
#undef X
};

// Throws FGG_SYSTEM when the library or one of the functions is not there.
void load_driver(const char* path);
// Throws FGG_ARGUMENT before load_driver.
const Driver& driver();
// Throws FGG_DRIVER, with the call's name and the driver's name for the error, unless result is
// success.
void check(CUresult result, const char* call);

} // namespace fgg
