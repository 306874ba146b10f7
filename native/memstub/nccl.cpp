// NCCL: libraries that are linked with libnccl (PyTorch's is), or look its functions up (JAX's
// does), make and end their communicators through these functions, whose real ones are called.
// Communicators that live are counted, because no engine brings one back. Signatures and results as
// in nccl.h of NCCL 2.27.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "flowgpu/live.h"
#include "memstub.h"

namespace flowgpu::memstub {

namespace {

struct UniqueId {
    char bytes[128];
};
enum Result : int { kSuccess = 0, kSystemError = 2, kInProgress = 7 };

std::atomic<uint32_t> communicators{0};
// One function of NCCL's may be made of another.
__thread unsigned depth __attribute__((tls_model("initial-exec")));

bool made(Result result) {
    return result == kSuccess || result == kInProgress;
}

uint32_t count(void* const* first, int number) {
    uint32_t found = 0;
    for (int i = 0; first && i < number; i++)
        found += first[i] != nullptr;
    return found;
}

using Real = std::atomic<void*>;

// Calls the real function of `name`; in the outermost call, true.
template <class F, class... A>
bool call(Result* result, Real& real, const char* name, F ours, A... arguments) {
    void* function = real.load(std::memory_order_relaxed);
    if (!function) {
        function = next_definition(name, reinterpret_cast<void*>(ours));
        real.store(function, std::memory_order_relaxed);
    }
    depth++;
    *result = function ? reinterpret_cast<F>(function)(arguments...) : kSystemError;
    return --depth == 0;
}

} // namespace

} // namespace flowgpu::memstub

using flowgpu::memstub::Result;
using flowgpu::memstub::UniqueId;

// `first`, `number`: where the new communicators are.
#define FGM_MAKES(name, parameters, arguments, first, number)                                      \
    static flowgpu::memstub::Real real_##name{nullptr};                                            \
    FGM_EXPORT Result name parameters {                                                            \
        using namespace flowgpu::memstub;                                                          \
        Result result;                                                                             \
        if (call(&result, real_##name, #name, &::name, FGM_UNPACK arguments) && made(result))      \
            communicators.fetch_add(count(first, number));                                         \
        return result;                                                                             \
    }
#define FGM_UNPACK(...) __VA_ARGS__

FGM_MAKES(ncclCommInitRank, (void** made_one, int ranks, UniqueId id, int rank),
          (made_one, ranks, id, rank), made_one, 1)
FGM_MAKES(ncclCommInitRankConfig, (void** made_one, int ranks, UniqueId id, int rank, void* config),
          (made_one, ranks, id, rank, config), made_one, 1)
FGM_MAKES(ncclCommInitRankScalable,
          (void** made_one, int ranks, int rank, int ids, UniqueId* id, void* config),
          (made_one, ranks, rank, ids, id, config), made_one, 1)
FGM_MAKES(ncclCommInitAll, (void** made_all, int devices, const int* list),
          (made_all, devices, list), made_all, devices)
FGM_MAKES(ncclCommSplit, (void* from, int color, int key, void** made_one, void* config),
          (from, color, key, made_one, config), made_one, 1)
FGM_MAKES(ncclCommShrink,
          (void* from, int* left_out, int number, void** made_one, void* config, int flags),
          (from, left_out, number, made_one, config, flags), made_one, 1)

#define FGM_ENDS(name)                                                                             \
    static flowgpu::memstub::Real real_##name{nullptr};                                            \
    FGM_EXPORT Result name(void* communicator) {                                                   \
        using namespace flowgpu::memstub;                                                          \
        Result result;                                                                             \
        const bool outermost = call(&result, real_##name, #name, &::name, communicator);           \
        uint32_t living = communicators.load();                                                    \
        while (outermost && communicator && made(result) && living &&                              \
               !communicators.compare_exchange_weak(living, living - 1)) {                         \
        }                                                                                          \
        return result;                                                                             \
    }

FGM_ENDS(ncclCommDestroy)
FGM_ENDS(ncclCommAbort)

// Of two copies of NCCL in a process, only the one that was used first is seen.
void* flowgpu::memstub::ours_of_nccl(const char* name, void* found) {
#define FGM_ENTRY(name)                                                                            \
    {                                                                                              \
        #name, reinterpret_cast<void*>(&::name), &real_##name                                      \
    }
    static const struct {
        const char* name;
        void* ours;
        Real* real;
    } kOurs[] = {
        FGM_ENTRY(ncclCommInitRank),
        FGM_ENTRY(ncclCommInitRankConfig),
        FGM_ENTRY(ncclCommInitRankScalable),
        FGM_ENTRY(ncclCommInitAll),
        FGM_ENTRY(ncclCommSplit),
        FGM_ENTRY(ncclCommShrink),
        FGM_ENTRY(ncclCommDestroy),
        FGM_ENTRY(ncclCommAbort),
    };
    for (const auto& one : kOurs) {
        if (strcmp(name, one.name) != 0 || found == one.ours)
            continue;
        void* before = nullptr;
        if (one.real->compare_exchange_strong(before, found) || before == found)
            return one.ours;
    }
    return found;
}

FGM_EXPORT uint32_t flowgpu_memstub_communicators() {
    return flowgpu::memstub::communicators.load();
}
