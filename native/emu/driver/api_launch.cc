// Launches, parameter layouts and occupancy.
#include "client.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

template <class Handle> uint64_t id(Handle handle) {
    return reinterpret_cast<uint64_t>(handle);
}

// Layout of a function's parameters; cached for good, since a handle is never used again.
CUresult layout_of(uint64_t function, FunctionLayout* out) {
    Process& p = process();
    {
        std::lock_guard<std::mutex> lock(p.mutex);
        const auto found = p.layouts.find(function);
        if (found != p.layouts.end()) {
            *out = found->second;
            return CUDA_SUCCESS;
        }
    }
    Call call(Op::FuncInfo);
    call.in(function);
    if (const CUresult r = call.go(); r != CUDA_SUCCESS) {
        return r;
    }
    call.take_string();
    out->kernel = call.take<uint8_t>() != 0;
    out->bytes = call.take<uint32_t>();
    out->params.resize(call.take<uint32_t>());
    for (FunctionLayout::Param& param : out->params) {
        param.offset = call.take<uint32_t>();
        param.size = call.take<uint32_t>();
    }
    std::lock_guard<std::mutex> lock(p.mutex);
    p.layouts[function] = *out;
    return CUDA_SUCCESS;
}

CUresult pack_parameters(const FunctionLayout& layout, void** params, void** extra,
                         std::vector<uint8_t>* packed) {
    packed->assign(layout.bytes, 0);
    if (extra != nullptr) {
        const void* buffer = nullptr;
        size_t size = 0;
        for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
            if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
                buffer = extra[i + 1];
            } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
                size = *static_cast<size_t*>(extra[i + 1]);
            } else {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        if (params != nullptr || size < layout.bytes || (size != 0 && buffer == nullptr)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        std::memcpy(packed->data(), buffer, layout.bytes);
        return CUDA_SUCCESS;
    }
    if (params == nullptr && !layout.params.empty()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < layout.params.size(); ++i) {
        if (params[i] == nullptr) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        std::memcpy(packed->data() + layout.params[i].offset, params[i], layout.params[i].size);
    }
    return CUDA_SUCCESS;
}

CUresult launch(CUfunction function, const LaunchShape& shape, CUstream stream, void** params,
                void** extra) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    FunctionLayout layout;
    std::vector<uint8_t> packed;
    if (const CUresult r = pack_arguments(id(function), params, extra, &layout, &packed);
        r != CUDA_SUCCESS) {
        Call there(Op::FuncInfo); // the layout is kept when a function ends
        const CUresult ended = there.in(id(function)).go();
        return ended != CUDA_SUCCESS ? ended : r;
    }
    Call call(Op::Launch);
    call.in(id(function)).in(shape).in(id(stream)).in_blob(packed.data(), packed.size());
    return call.go();
}

CUresult param_info(uint64_t function, size_t index, size_t* offset, size_t* size) {
    FunctionLayout layout;
    if (offset == nullptr || function == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (const CUresult r = layout_of(function, &layout); r != CUDA_SUCCESS) {
        return r;
    }
    if (index >= layout.params.size()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *offset = layout.params[index].offset;
    if (size != nullptr) {
        *size = layout.params[index].size;
    }
    return CUDA_SUCCESS;
}

CUresult occupancy(int which, CUfunction function, int block, size_t dynamic, uint64_t* out) {
    return rpc(Op::Occupancy, outs(out), which, id(function), block, uint64_t{dynamic});
}

} // namespace

CUresult pack_arguments(uint64_t function, void** params, void** extra, FunctionLayout* layout,
                        std::vector<uint8_t>* packed) {
    const CUresult r = layout_of(function, layout);
    return r != CUDA_SUCCESS || packed == nullptr ? r
                                                  : pack_parameters(*layout, params, extra, packed);
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
    return param_info(id(kernel), index, offset, size);
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset,
                                    size_t* size) {
    FunctionLayout layout;
    Entry entry;
    if (entry.status() == CUDA_SUCCESS && function != nullptr &&
        layout_of(id(function), &layout) == CUDA_SUCCESS && layout.kernel) {
        return CUDA_ERROR_INVALID_HANDLE; // measured: a kernel can be launched as it is, no more
    }
    return param_info(id(function), index, offset, size);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared, CUstream stream,
                                void** params, void** extra) {
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, 0};
    return launch(function, shape, stream, params, extra);
}

CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x,
                                           unsigned int grid_y, unsigned int grid_z,
                                           unsigned int block_x, unsigned int block_y,
                                           unsigned int block_z, unsigned int shared,
                                           CUstream stream, void** params) {
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, 1};
    return launch(function, shape, stream, params, nullptr);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                                  void** extra) {
    if (config == nullptr || (config->numAttrs != 0 && config->attrs == nullptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    LaunchShape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                      {config->blockDimX, config->blockDimY, config->blockDimZ},
                      config->sharedMemBytes,
                      0};
    std::vector<CUevent> events;
    for (unsigned int i = 0; i < config->numAttrs; ++i) {
        const CUlaunchAttribute& attribute = config->attrs[i];
        switch (attribute.id) {
        case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            shape.cooperative = attribute.value.cooperative != 0;
            break;
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            if (attribute.value.clusterDim.x * attribute.value.clusterDim.y *
                    attribute.value.clusterDim.z !=
                1) {
                return CUDA_ERROR_NOT_SUPPORTED; // as on a real device of compute capability 8.0
            }
            break;
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
            events.push_back(attribute.value.programmaticEvent.event);
            break;
        case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
            events.push_back(attribute.value.launchCompletionEvent.event);
            break;
        default:
            break; // scheduling and cache hints
        }
    }
    CUresult r = launch(function, shape, config->hStream, params, extra);
    for (size_t i = 0; r == CUDA_SUCCESS && i < events.size(); ++i) {
        r = cuEventRecord(events[i], config->hStream); // when the kernel has ended, not before
    }
    return r;
}

CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS* list, unsigned int count,
                                                      unsigned int flags) {
    constexpr unsigned int kKnown = CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC |
                                    CUDA_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_POST_LAUNCH_SYNC;
    int devices = 0;
    if (const CUresult r = cuDeviceGetCount(&devices); r != CUDA_SUCCESS) {
        return r;
    }
    if (list == nullptr || count == 0 || (flags & ~kKnown) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (count > 1) { // their kernels would wait for each other
        return unsupported("cuLaunchCooperativeKernelMultiDevice on several devices");
    }
    if (list->hStream == nullptr || list->hStream == CU_STREAM_LEGACY ||
        list->hStream == CU_STREAM_PER_THREAD) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return cuLaunchCooperativeKernel(list->function, list->gridDimX, list->gridDimY, list->gridDimZ,
                                     list->blockDimX, list->blockDimY, list->blockDimZ,
                                     list->sharedMemBytes, list->hStream, list->kernelParams);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function,
                                                             int block_size, size_t dynamic) {
    uint64_t value = 0;
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (blocks == nullptr || block_size <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = occupancy(0, function, block_size, dynamic, &value);
    if (r == CUDA_SUCCESS) {
        *blocks = static_cast<int>(value);
    }
    return r;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, CUfunction function, int block_size, size_t dynamic, unsigned int flags) {
    return flags > CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE
               ? CUDA_ERROR_INVALID_VALUE
               : cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, dynamic);
}

CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction function,
                                                         int blocks, int block_size) {
    uint64_t value = 0;
    if (bytes == nullptr || blocks <= 0 || block_size <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = occupancy(1, function, blocks, 0, &value);
    if (r == CUDA_SUCCESS) {
        *bytes = value;
    }
    return r;
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction function,
                                                  CUoccupancyB2DSize dynamic_of, size_t dynamic,
                                                  int limit) {
    Entry entry;
    if (grid == nullptr || block == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int maximum = 0;
    if (const CUresult r =
            cuFuncGetAttribute(&maximum, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function);
        r != CUDA_SUCCESS) {
        return r;
    }
    maximum = limit > 0 ? std::min(limit, maximum) : maximum;
    int best = 0;
    *block = 0;
    for (int size = maximum / 32 * 32; size > 0; size -= 32) {
        int active = 0;
        const size_t bytes = dynamic_of != nullptr ? dynamic_of(size) : dynamic;
        const CUresult r =
            cuOccupancyMaxActiveBlocksPerMultiprocessor(&active, function, size, bytes);
        if (r != CUDA_SUCCESS) {
            return r;
        }
        if (active * size > best) {
            best = active * size;
            *block = size;
        }
    }
    int processors = 0;
    const CUresult r =
        cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    *grid = *block > 0 ? best / *block * processors : 0;
    return r;
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    return clusters == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
}

} // extern "C"
