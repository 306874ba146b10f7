#include "digest.h"

namespace fgg {

const DigestFunctions& digest_functions() {
#if defined(__x86_64__)
    static const DigestFunctions& chosen = __builtin_cpu_supports("avx512f") ? digest_avx512
                                           : __builtin_cpu_supports("avx2")  ? digest_avx2
                                                                             : digest_baseline;
    return chosen;
#else
    return digest_baseline;
#endif
}

} // namespace fgg
