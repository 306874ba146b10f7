// XXH3-128 of chunks, in the widest vector form that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fgg {

using DigestFunction = void (*)(const void* data, size_t bytes, uint8_t* out);

// Fastest of the variants below on this processor.
DigestFunction digest_function();

void digest_baseline(const void* data, size_t bytes, uint8_t* out);
void digest_avx2(const void* data, size_t bytes, uint8_t* out);
void digest_avx512(const void* data, size_t bytes, uint8_t* out);

} // namespace fgg
