// Compiled once a vector width (FGG_DIGEST_VARIANT names the table). Debian's libxxhash.a holds
// the SSE2 form alone, so the header's inline form is used. Include nothing with inline functions
// of its own here: the linker could keep this file's copy, with instructions that the processor may
// lack, for the whole library.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "digest.h"

namespace fgg {
namespace {

static_assert(sizeof(DigestState) >= sizeof(XXH3_state_t));
static_assert(alignof(DigestState) >= alignof(XXH3_state_t));

void write(XXH128_hash_t hash, uint8_t* out) {
    XXH128_canonicalFromHash(reinterpret_cast<XXH128_canonical_t*>(out), hash);
}

XXH3_state_t* state_of(DigestState& state) {
    return reinterpret_cast<XXH3_state_t*>(&state);
}

void whole(const void* data, size_t bytes, uint8_t* out) {
    write(XXH3_128bits(data, bytes), out);
}

void begin(DigestState& state) {
    XXH3_INITSTATE(state_of(state));
    XXH3_128bits_reset(state_of(state));
}

void add(DigestState& state, const void* data, size_t bytes) {
    XXH3_128bits_update(state_of(state), data, bytes);
}

void end(const DigestState& state, uint8_t* out) {
    write(XXH3_128bits_digest(reinterpret_cast<const XXH3_state_t*>(&state)), out);
}

} // namespace

extern const DigestFunctions FGG_DIGEST_VARIANT = {whole, begin, add, end};

} // namespace fgg
