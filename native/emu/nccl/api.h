// Types of NCCL's interface, from its public documentation ("NCCL API", 2.28).
#ifndef FLOWGPU_EMU_NCCL_API_H
#define FLOWGPU_EMU_NCCL_API_H

#include <cstddef>
#include <cstdint>

namespace flowgpu::nccl {

constexpr int kVersion = 22809;

enum Result : int {
    kSuccess,
    kUnhandledCudaError,
    kSystemError,
    kInternalError,
    kInvalidArgument,
    kInvalidUsage,
    kRemoteError,
    kInProgress,
};

struct UniqueId {
    char bytes[128];
};

// ncclConfig_t as far as it is obeyed. `size` says how much of it the caller knows.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};
constexpr unsigned kConfigMagic = 0xcafebeef;

// What a failed step leaves for ncclGetLastError, and the result that it returns.
Result failed(Result result, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* last_error();

#define FN_TRY(call)                                                                               \
    do {                                                                                           \
        if (const Result result_ = (call); result_ != kSuccess)                                    \
            return result_;                                                                        \
    } while (false)

} // namespace flowgpu::nccl

#endif
