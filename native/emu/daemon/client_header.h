// cuda.h as the daemon needs it: types and constants, no entry points.
#pragma once

#include <cuda.h>
