// Runs the lanes of one CTA.
#pragma once

#include "code.h"

namespace flowgpu::emu::ptx {

enum class Status { done, yielded, stopped };

// Until the CTA ends, or faults (`stopped`, see Machine::fault), or has waited for other CTAs for a
// whole time slice.
Status run_cta(Cta& c);

} // namespace flowgpu::emu::ptx
