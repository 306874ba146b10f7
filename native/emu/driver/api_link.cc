// The linker. It takes one PTX text; what it makes is the form of daemon/cubin.cc.
#include "jit.h"

namespace flowgpu::emu {

struct Link {
    Link(unsigned int count, const CUjit_option* options, void** values)
        : logs(count, options, values) {}
    const JitLogs logs;
    std::mutex mutex;  // guards what follows
    std::string cubin; // empty before the input
    bool complete = false;
};

namespace {

uint64_t id(CUlinkState state) {
    return reinterpret_cast<uint64_t>(state);
}

bool bad_options(unsigned int count, const CUjit_option* options, void* const* values) {
    return count != 0 && (options == nullptr || values == nullptr);
}

std::shared_ptr<Link> find(CUlinkState state) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    const auto found = p.links.find(id(state));
    return found == p.links.end() ? nullptr : found->second;
}

// Cubins and fat binaries as a driver 580 on an H200 refuses those that are not relocatable.
// Objects, which may be either, answer as fat binaries do.
CUresult accepted(CUjitInputType type) {
    switch (type) {
    case CU_JIT_INPUT_PTX:
        return CUDA_SUCCESS;
    case CU_JIT_INPUT_CUBIN:
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    case CU_JIT_INPUT_FATBINARY:
    case CU_JIT_INPUT_OBJECT:
        return CUDA_ERROR_UNKNOWN;
    case CU_JIT_INPUT_LIBRARY:
    case CU_JIT_INPUT_NVVM:
        return CUDA_ERROR_NOT_SUPPORTED;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult add(Link& link, CUjitInputType type, std::string_view data, const JitLogs& own) {
    std::lock_guard<std::mutex> lock(link.mutex);
    if (link.complete) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = accepted(type); r != CUDA_SUCCESS) {
        return r;
    }
    if (!link.cubin.empty()) {
        return unsupported("cuLinkAddData of a second input");
    }
    Call call(Op::LinkPtx);
    call.in_blob(data.data(), data.size());
    const CUresult r = call.go();
    if (r == CUDA_SUCCESS) {
        link.cubin = call.take_blob();
    }
    const JitLog& error = own.error.buffer != nullptr ? own.error : link.logs.error;
    const JitLog& info = own.info.buffer != nullptr ? own.info : link.logs.info;
    error.write(r == CUDA_SUCCESS ? "" : call.take_string());
    info.write("");
    return r;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values,
                                 CUlinkState* state) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (state == nullptr || bad_options(count, options, values)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t handle = 0;
    const CUresult r = rpc(Op::LinkCreate, outs(&handle));
    if (r == CUDA_SUCCESS) {
        Process& p = process();
        std::lock_guard<std::mutex> lock(p.mutex);
        p.links[handle] = std::make_shared<Link>(count, options, values);
        *state = reinterpret_cast<CUlinkState>(handle);
    }
    return r;
}

CUresult CUDAAPI cuLinkCreate(unsigned int count, CUjit_option* options, void** values,
                              CUlinkState* state) {
    return cuLinkCreate_v2(count, options, values, state);
}

CUresult CUDAAPI cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size,
                                  const char*, unsigned int count, CUjit_option* options,
                                  void** values) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (data == nullptr || size == 0 || bad_options(count, options, values)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto link = find(state);
    return link == nullptr ? CUDA_ERROR_INVALID_HANDLE
                           : add(*link, type, {static_cast<const char*>(data), size},
                                 JitLogs(count, options, values));
}

CUresult CUDAAPI cuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t size,
                               const char* name, unsigned int count, CUjit_option* options,
                               void** values) {
    return cuLinkAddData_v2(state, type, data, size, name, count, options, values);
}

CUresult CUDAAPI cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path,
                                  unsigned int count, CUjit_option* options, void** values) {
    std::string content;
    if (path == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return read_file(path, &content) ? cuLinkAddData_v2(state, type, content.data(), content.size(),
                                                        path, count, options, values)
                                     : CUDA_ERROR_FILE_NOT_FOUND;
}

CUresult CUDAAPI cuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path,
                               unsigned int count, CUjit_option* options, void** values) {
    return cuLinkAddFile_v2(state, type, path, count, options, values);
}

// The memory is the state's, until cuLinkDestroy.
CUresult CUDAAPI cuLinkComplete(CUlinkState state, void** cubin, size_t* size) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (cubin == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto link = find(state);
    if (link == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    std::lock_guard<std::mutex> lock(link->mutex);
    if (link->cubin.empty()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    link->complete = true;
    *cubin = link->cubin.data();
    if (size != nullptr) {
        *size = link->cubin.size();
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLinkDestroy(CUlinkState state) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    return p.links.erase(id(state)) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

} // extern "C"
