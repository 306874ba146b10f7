// Compiled once a vector width (FGG_DIGEST_VARIANT names the function). Debian's libxxhash.a holds
// the SSE2 form alone, so the header's inline form is used. Include nothing with inline functions
// of its own here: the linker could keep this file's copy, with instructions that the processor may
// lack, for the whole library.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "digest.h"

namespace fgg {

void FGG_DIGEST_VARIANT(const void* data, size_t bytes, uint8_t* out) {
    const XXH128_hash_t hash = XXH3_128bits(data, bytes);
    XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(out), hash);
}

} // namespace fgg
