// Digests of files that do not pass through a GPU: what CRIU wrote, and whole images that are
// verified.
#pragma once

#include "fgg.h"

namespace fgg {

// See fgg_digest_files.
void digest_files(const fgg_file* files, uint64_t count, uint64_t step, uint32_t threads,
                  uint8_t* digests, fgg_digest_progress& progress);

} // namespace fgg
