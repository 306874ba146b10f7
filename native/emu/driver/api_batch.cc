// Batches of copies: one after the other, as any order will do.
#include "client.h"
#include "element.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

bool is_default(CUstream stream) {
    return stream == CU_STREAM_LEGACY ||
           (stream == nullptr && thread_state().per_thread_stream == 0);
}

bool is_order(CUmemcpySrcAccessOrder order) {
    return order > CU_MEMCPY_SRC_ACCESS_ORDER_INVALID && order <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
}

// The bytes of an element of the operand, if it is an array; 0: it is not one.
CUresult element_of(const CUmemcpy3DOperand& operand, uint32_t* bytes) {
    if (operand.type != CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        return operand.type == CU_MEMCPY_OPERAND_TYPE_POINTER ? CUDA_SUCCESS
                                                              : CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_ARRAY3D_DESCRIPTOR about{};
    const CUresult r = cuArray3DGetDescriptor_v2(&about, operand.op.array.array);
    *bytes = r == CUDA_SUCCESS ? element_bytes(about.Format, about.NumChannels) : 0;
    return r;
}

CUresult copy_one(const CUDA_MEMCPY3D_BATCH_OP& one, CUstream stream) {
    uint32_t bytes = 0;
    if (!is_order(one.srcAccessOrder) || one.extent.width == 0 || one.extent.height == 0 ||
        one.extent.depth == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (CUresult r = element_of(one.src, &bytes); r != CUDA_SUCCESS) {
        return r;
    }
    if (CUresult r = element_of(one.dst, &bytes); r != CUDA_SUCCESS) {
        return r;
    }
    bytes = bytes == 0 ? 1 : bytes; // between pointers an element is a byte
    CUDA_MEMCPY3D what{};
    what.WidthInBytes = one.extent.width * bytes;
    what.Height = one.extent.height;
    what.Depth = one.extent.depth;
    const auto pitch = [&](const CUmemcpy3DOperand& operand) {
        const size_t length = operand.op.ptr.rowLength;
        return (length != 0 ? length : one.extent.width) * bytes;
    };
    const auto height = [&](const CUmemcpy3DOperand& operand) {
        const size_t rows = operand.op.ptr.layerHeight;
        return rows != 0 ? rows : one.extent.height;
    };
    if (one.src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        what.srcMemoryType = CU_MEMORYTYPE_ARRAY;
        what.srcArray = one.src.op.array.array;
        what.srcXInBytes = one.src.op.array.offset.x * bytes;
        what.srcY = one.src.op.array.offset.y;
        what.srcZ = one.src.op.array.offset.z;
    } else {
        what.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
        what.srcDevice = one.src.op.ptr.ptr;
        what.srcPitch = pitch(one.src);
        what.srcHeight = height(one.src);
    }
    if (one.dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        what.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        what.dstArray = one.dst.op.array.array;
        what.dstXInBytes = one.dst.op.array.offset.x * bytes;
        what.dstY = one.dst.op.array.offset.y;
        what.dstZ = one.dst.op.array.offset.z;
    } else {
        what.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
        what.dstDevice = one.dst.op.ptr.ptr;
        what.dstPitch = pitch(one.dst);
        what.dstHeight = height(one.dst);
    }
    return cuMemcpy3DAsync_v2(&what, stream);
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes,
                                       size_t count, CUmemcpyAttributes* attributes, size_t* firsts,
                                       size_t attribute_count, CUstream stream) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (dsts == nullptr || srcs == nullptr || sizes == nullptr || count == 0 ||
        attributes == nullptr || firsts == nullptr || attribute_count == 0 ||
        attribute_count > count || firsts[0] != 0 || is_default(stream)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < attribute_count; ++i) {
        if (!is_order(attributes[i].srcAccessOrder) || firsts[i] >= count ||
            (i > 0 && firsts[i] <= firsts[i - 1])) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (std::find(sizes, sizes + count, 0) != sizes + count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; ++i) {
        if (const CUresult r = cuMemcpyAsync(dsts[i], srcs[i], sizes[i], stream);
            r != CUDA_SUCCESS) {
            return r;
        }
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes,
                                    size_t count, CUmemcpyAttributes* attributes, size_t* firsts,
                                    size_t attribute_count, size_t* failed, CUstream stream) {
    const CUresult r = cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, attributes, firsts,
                                             attribute_count, stream);
    if (r != CUDA_SUCCESS && failed != nullptr) {
        *failed = SIZE_MAX; // no one copy's
    }
    return r;
}

CUresult CUDAAPI cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP* operations,
                                         unsigned long long flags, CUstream stream) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (count == 0 || operations == nullptr || flags != 0 || is_default(stream)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; ++i) {
        if (const CUresult r = copy_one(operations[i], stream); r != CUDA_SUCCESS) {
            return r;
        }
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP* operations,
                                      size_t* failed, unsigned long long flags, CUstream stream) {
    const CUresult r = cuMemcpy3DBatchAsync_v2(count, operations, flags, stream);
    if (r != CUDA_SUCCESS && failed != nullptr) {
        *failed = SIZE_MAX;
    }
    return r;
}

} // extern "C"
