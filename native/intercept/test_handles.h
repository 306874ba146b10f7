// What the program and the driver of test_handles.cpp agree on.
#ifndef FLOWGPU_INTERCEPT_TEST_HANDLES_H
#define FLOWGPU_INTERCEPT_TEST_HANDLES_H

#include <cstddef>

#include "driver.h"

// How many of a type a pointer to it leads to.
template <class T> constexpr size_t kListed = 1;
template <> inline constexpr size_t kListed<const CUgraphNode> = 2;
template <> inline constexpr size_t kListed<CUDA_MEMCPY3D_BATCH_OP> = 2;

// The driver's name for a node that a device may update.
inline const auto kDeviceNode = reinterpret_cast<CUgraphDeviceNode>(uintptr_t{0x40});

#endif
