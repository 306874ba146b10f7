// XXH3-128 in the widest vector form that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fgg {

using DigestFunction = void (*)(const void* data, size_t bytes, uint8_t* out);

// Holds an XXH3_state_t.
struct DigestState {
    alignas(64) unsigned char room[576];
};

struct DigestFunctions {
    DigestFunction whole;
    // The same of bytes that come one behind another.
    void (*begin)(DigestState& state);
    void (*add)(DigestState& state, const void* data, size_t bytes);
    void (*end)(const DigestState& state, uint8_t* out);
};

// Fastest of the variants below on this processor.
const DigestFunctions& digest_functions();

extern const DigestFunctions digest_baseline, digest_avx2, digest_avx512;

} // namespace fgg
