// A driver for tests, as strict as the real one about granularity, reservations, double maps,
// partial unmaps and handles, and able to fail on demand. What a real driver refuses the program's
// calls is an error code; what only FlowGPU's own calls could get wrong ends the test. Laxer in one
// point: it maps from any offset, which cuda.h 13.0 keeps for later.
#ifndef FLOWGPU_VMM_FAKE_DRIVER_H
#define FLOWGPU_VMM_FAKE_DRIVER_H

#include "memory.h"

#include <cstdio>
#include <cstdlib>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fake_driver {

inline unsigned current_seed;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s (seed %u)\n", __FILE__, __LINE__, #condition,       \
                    fake_driver::current_seed);                                                    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

constexpr uint64_t kGranularity = 2u << 20;

struct Physical {
    uint64_t bytes;
    int references = 0; // handles, mappings and exported descriptors
};
struct Mapping {
    uint64_t bytes;
    uint64_t offset;
    ino_t memory;
    std::map<int, CUmemAccess_flags> access; // by device
};

struct FakeDriver {
    std::map<uint64_t, uint64_t> reserved;
    std::map<CUmemGenericAllocationHandle, std::pair<ino_t, bool>> handles; // -> memory, imported
    std::map<ino_t, Physical> memory;
    std::map<uint64_t, Mapping> mappings;
    CUmemGenericAllocationHandle next_handle = 100;
    ino_t next_memory = 1;
    uint64_t capacity = 1ull << 40;
    uint64_t in_use = 0;
    int rdma = 1;                    // whether devices offer it for memory that is created
    int capable = 0;                 // memory that was created with it
    std::map<ino_t, ino_t> exported; // inode of the exported file -> memory
    // The nth call from now fails.
    int fail_map = 0;
    int fail_unmap = 0;
    int fail_access = 0;

    void drop(ino_t id) {
        if (--memory.at(id).references == 0) {
            in_use -= memory.at(id).bytes;
            memory.erase(id);
        }
    }
    // The whole mappings that fill the range exactly; none otherwise.
    std::vector<uint64_t> exactly(uint64_t address, uint64_t bytes) const {
        std::vector<uint64_t> found;
        uint64_t at = address;
        for (auto it = mappings.find(address); it != mappings.end() && it->first == at; ++it) {
            found.push_back(it->first);
            at += it->second.bytes;
            if (at == address + bytes)
                return found;
        }
        return {};
    }
};
inline FakeDriver fake;

inline bool fails(int& countdown) {
    return countdown && --countdown == 0;
}

inline CUresult address_reserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr hint,
                                unsigned long long) {
    CHECK(bytes % kGranularity == 0);
    *out = hint;
    fake.reserved[hint] = bytes;
    return CUDA_SUCCESS;
}
inline CUresult address_free(CUdeviceptr, size_t) {
    return CUDA_SUCCESS;
}
inline CUresult create(CUmemGenericAllocationHandle* out, size_t bytes,
                       const CUmemAllocationProp* prop, unsigned long long) {
    CHECK(bytes && bytes % kGranularity == 0);
    CHECK(prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (fake.in_use + bytes > fake.capacity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.in_use += bytes;
    fake.capable += prop->allocFlags.gpuDirectRDMACapable;
    ino_t id = fake.next_memory++;
    fake.memory[id] = Physical{bytes, 1};
    *out = fake.next_handle++;
    fake.handles[*out] = {id, false};
    return CUDA_SUCCESS;
}
inline CUresult release(CUmemGenericAllocationHandle handle) {
    auto it = fake.handles.find(handle);
    CHECK(it != fake.handles.end());
    ino_t id = it->second.first;
    fake.handles.erase(it);
    fake.drop(id);
    return CUDA_SUCCESS;
}
inline CUresult map(CUdeviceptr address, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
    if (fails(fake.fail_map))
        return CUDA_ERROR_UNKNOWN;
    CHECK(fake.handles.count(handle));
    ino_t id = fake.handles.at(handle).first;
    uint64_t end = address + bytes;
    auto window = fake.reserved.upper_bound(address);
    if (flags || !bytes || address % kGranularity || bytes % kGranularity ||
        offset % kGranularity || offset + bytes > fake.memory.at(id).bytes ||
        window == fake.reserved.begin() ||
        end > std::prev(window)->first + std::prev(window)->second)
        return CUDA_ERROR_INVALID_VALUE;
    for (auto& [start, mapping] : fake.mappings)
        if (end > start && start + mapping.bytes > address)
            return CUDA_ERROR_INVALID_VALUE;
    fake.memory.at(id).references++;
    fake.mappings[address] = Mapping{bytes, offset, id, {}};
    return CUDA_SUCCESS;
}
inline CUresult unmap(CUdeviceptr address, size_t bytes) {
    if (fails(fake.fail_unmap))
        return CUDA_ERROR_UNKNOWN;
    std::vector<uint64_t> whole = fake.exactly(address, bytes);
    for (uint64_t start : whole) {
        ino_t id = fake.mappings.at(start).memory;
        fake.mappings.erase(start);
        fake.drop(id);
    }
    return whole.empty() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
inline CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descs,
                           size_t count) {
    if (fails(fake.fail_access))
        return CUDA_ERROR_UNKNOWN;
    std::vector<uint64_t> whole = fake.exactly(address, bytes);
    for (uint64_t start : whole)
        for (size_t i = 0; i < count; i++) {
            auto& access = fake.mappings.at(start).access;
            if (descs[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
                access.erase(descs[i].location.id);
            else
                access[descs[i].location.id] = descs[i].flags;
        }
    return whole.empty() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
inline CUresult export_handle(void* out, CUmemGenericAllocationHandle handle,
                              CUmemAllocationHandleType type, unsigned long long) {
    auto [id, imported] = fake.handles.at(handle);
    if (imported || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE; // E2
    int fd = memfd_create("exported", MFD_CLOEXEC);
    struct stat status;
    CHECK(fd >= 0 && fstat(fd, &status) == 0);
    fake.exported[status.st_ino] = id;
    fake.memory.at(id).references++; // the descriptor keeps the memory; tests never give it back
    *static_cast<int*>(out) = fd;
    return CUDA_SUCCESS;
}
inline CUresult import_handle(CUmemGenericAllocationHandle* out, void* fd,
                              CUmemAllocationHandleType) {
    struct stat status;
    if (fstat(static_cast<int>(reinterpret_cast<intptr_t>(fd)), &status) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    ino_t id = fake.exported.at(status.st_ino);
    fake.memory.at(id).references++;
    *out = fake.next_handle++;
    fake.handles[*out] = {id, true};
    return CUDA_SUCCESS;
}
inline CUresult properties(CUmemAllocationProp* out, CUmemGenericAllocationHandle handle) {
    CHECK(fake.handles.count(handle));
    *out = {};
    out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    out->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (!fake.handles.at(handle).second)
        out->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return CUDA_SUCCESS;
}
inline CUresult granularity(size_t* out, const CUmemAllocationProp*,
                            CUmemAllocationGranularity_flags) {
    *out = kGranularity;
    return CUDA_SUCCESS;
}

inline CUresult total(size_t* out, CUdevice) {
    *out = fake.capacity;
    return CUDA_SUCCESS;
}

inline CUresult attribute(int* out, CUdevice_attribute asked, CUdevice) {
    CHECK(asked == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    *out = fake.rdma;
    return CUDA_SUCCESS;
}

inline flowgpu::VmmDriver driver() {
    return {address_reserve, address_free,  create,     release,     map,   unmap,    set_access,
            export_handle,   import_handle, properties, granularity, total, attribute};
}

inline CUcontext context(uintptr_t n) {
    return reinterpret_cast<CUcontext>(n);
}

} // namespace fake_driver

#endif
