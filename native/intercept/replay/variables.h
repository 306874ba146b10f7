// The bytes of variables of modules and libraries while the driver is away. The registry is locked.
#ifndef FLOWGPU_INTERCEPT_REPLAY_VARIABLES_H
#define FLOWGPU_INTERCEPT_REPLAY_VARIABLES_H

#include "failure.h"

namespace flowgpu::replay::variables {

// Reads what may have changed. False: nothing is kept.
bool keep(FirstFailure& fail);
void forget();
// Writes what was kept, and finds the constants of which the program has addresses.
bool write(FirstFailure& fail);
// The program's memory is back: the addresses of functions in its variables become the present
// ones.
bool finish(FirstFailure& fail);

} // namespace flowgpu::replay::variables

#endif
