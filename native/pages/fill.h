// Writes the pages that a view left out into the restored, stopped processes.
#pragma once

#include "view.h"

namespace pages {

// Writes all with so many threads. Throws PagesFailure.
void fill(const std::vector<Fill>& fills, unsigned threads);

} // namespace pages
