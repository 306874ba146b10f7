#pragma once

#include <cuda.h>

#include <cstdint>

namespace flowgpu::emu {

// Bytes of an element of an array; 0 where there are no such here.
inline uint32_t element_bytes(CUarray_format format, unsigned int channels) {
    if (channels != 1 && channels != 2 && channels != 4) {
        return 0;
    }
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4 * channels;
    default:
        return 0;
    }
}

} // namespace flowgpu::emu
