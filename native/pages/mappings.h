// Cuts mappings of which CRIU would ask the kernel for more memory than it gives.
//
// CRIU maps a mapping in one piece and writable, unless it is of no other process and has no page:
// also what nobody may touch (PROT_NONE), as runtimes (V8, .NET, Go) reserve hundreds of GiB of
// which they use little. The kernel refuses a writable piece that is larger than memory and swap,
// or, where it is strict (vm.overcommit_memory 2), all that is more than its limit in sum. So
//
// * parts without a page of a mapping that nobody may write to, or that is not counted, become what
//   CRIU maps as it is, and takes for no memory that two processes may share: no private mapping by
//   its status;
// * any other that is too large is cut at multiples of a power of two, the same in each process.
//
// And CRIU makes a process share pages with its parent only where both have mappings of the same
// range. So both are cut where the other's mapping begins or ends.
//
// The kernel joins the parts again, unless it counts their memory otherwise.
// Sources: criu/mem.c and criu/pie/restorer.c of CRIU 4.2; __vm_enough_memory of Linux.
#pragma once

#include "images.h"

#include <set>

namespace pages {

// The size from which on a mapping is too large for this machine; a power of two.
uint64_t too_large();

// Says whether something of a process's mappings is to be cut. `shares`: CRIU may take some for
// those of another process.
bool is_to_be_cut(const Memory& memory, bool shares, uint64_t too_large);

// Says whether a mapping may be cut anywhere: private memory of no file.
bool is_plain(const Vma& vma);

// Cuts plain mappings at these addresses. False: there is nothing to cut, or too much.
bool cut_at(Memory& memory, const std::set<uint64_t>& places);

// Cuts them. Throws PagesFailure.
void cut(Memory& memory, const Pagemap& pagemap, bool shares, uint64_t too_large);

} // namespace pages
