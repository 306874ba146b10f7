#include "task.h"

#include <algorithm>
#include <cerrno>
#include <ctime>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "descriptor.h"
#include "managed.h"
#include "pools.h"
#include "replay/record.h"

namespace flowgpu {

namespace {

constexpr timespec kDrainLook = {0, 1'000'000};
constexpr int kDrainLooks = 60'000; // a minute: the ghost drains tens of GB a second

// Memory that the ghost of a checkpoint has for a moment is not missing to the program.
CUresult CUDAAPI create_or_wait(CUmemGenericAllocationHandle* handle, size_t bytes,
                                const CUmemAllocationProp* prop, unsigned long long flags) {
    CUresult result = FG_REAL(cuMemCreate)(handle, bytes, prop, flags);
    const int error = errno;
    for (int i = 0; result == CUDA_ERROR_OUT_OF_MEMORY && task().draining() && i < kDrainLooks;
         i++) {
        nanosleep(&kDrainLook, nullptr);
        result = FG_REAL(cuMemCreate)(handle, bytes, prop, flags);
    }
    errno = error;
    return result;
}

VmmDriver vmm_driver() {
    return VmmDriver{
        FG_REAL(cuMemAddressReserve),
        FG_REAL(cuMemAddressFree),
        create_or_wait,
        FG_REAL(cuMemRelease),
        FG_REAL(cuMemMap),
        FG_REAL(cuMemUnmap),
        FG_REAL(cuMemSetAccess),
        FG_REAL(cuMemExportToShareableHandle),
        FG_REAL(cuMemImportFromShareableHandle),
        FG_REAL(cuMemGetAllocationPropertiesFromHandle),
        FG_REAL(cuMemGetAllocationGranularity),
        FG_REAL(cuDeviceTotalMem_v2),
        FG_REAL(cuDeviceGetAttribute),
    };
}

flowgpu_control_page private_page;
constexpr size_t kPageBytes = 4096;

} // namespace

Task::Task() : memory(vmm_driver()), page(&private_page) {}

bool Task::make_page() {
    int fd = memfd_create("flowgpu-control", MFD_CLOEXEC);
    if (fd < 0)
        return false;
    fd = move_high(fd);
    void* mapped = MAP_FAILED;
    if (ftruncate(fd, kPageBytes) == 0)
        mapped = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        close(fd);
        return false;
    }
    auto* made = static_cast<flowgpu_control_page*>(mapped);
    made->magic = FLOWGPU_WIRE_MAGIC;
    made->version = FLOWGPU_WIRE_VERSION;
    page_fd = fd;
    page.store(made);
    update_page();
    return true;
}

bool Task::draining() const {
    return __atomic_load_n(&page.load()->draining, __ATOMIC_RELAXED);
}

void Task::forget_drain() {
    __atomic_store_n(&page.load()->draining, 0, __ATOMIC_RELAXED);
}

void Task::update_page() {
    MemoryTotals totals = memory.totals();
    flowgpu_control_page* p = page.load();
    p->allocations = totals.allocations;
    p->allocation_bytes = totals.allocation_bytes;
    p->blocks = totals.blocks;
    p->block_bytes = totals.block_bytes;
    p->devices = totals.devices;
    std::lock_guard<std::mutex> lock(mutex);
    count_driver_memory();
    p->unknown_symbols = unknown_functions.size();
}

// The lock is held, so that the last one to write has seen all changes.
void Task::count_driver_memory() {
    const uint64_t managed = memory.map().bytes(only(MemoryKind::managed));
    page.load()->foreign_bytes = memory.map().bytes(kOfTheDriver) + managed + not_plain_bytes;
    page.load()->managed_bytes = managed;
}

void Task::driver_memory_changed() {
    std::lock_guard<std::mutex> lock(mutex);
    count_driver_memory();
}

void Task::add_not_plain(CUmemGenericAllocationHandle handle, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    not_plain[handle] = bytes;
    not_plain_bytes += bytes;
    count_driver_memory();
}

void Task::remove_not_plain(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = not_plain.find(handle);
    if (it == not_plain.end())
        return;
    not_plain_bytes -= it->second;
    not_plain.erase(it);
    count_driver_memory();
}

bool Task::has_not_plain() {
    std::lock_guard<std::mutex> lock(mutex);
    return !not_plain.empty();
}

bool Task::has_managed_variables(bool ours_too) {
    std::set<uint64_t> asked;
    {
        std::lock_guard<std::mutex> lock(mutex);
        asked = managed_variables;
    }
    return std::any_of(asked.begin(), asked.end(), is_managed) ||
           replay::has_managed_variables(ours_too);
}

bool is_managed(CUdeviceptr address) {
    unsigned managed = 0;
    return FG_REAL(cuPointerGetAttribute)(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address) ==
               CUDA_SUCCESS &&
           managed;
}

void release_deferred() {
    Task& t = task();
    std::vector<CUdeviceptr> addresses;
    {
        std::lock_guard<std::mutex> lock(t.mutex);
        if (t.deferred_frees.empty() || t.captures.load())
            return;
        addresses.swap(t.deferred_frees);
    }
    if (FG_REAL(cuCtxSynchronize)() != CUDA_SUCCESS) {
        std::lock_guard<std::mutex> lock(t.mutex);
        t.deferred_frees.insert(t.deferred_frees.end(), addresses.begin(), addresses.end());
        return;
    }
    for (CUdeviceptr address : addresses)
        if (t.memory.release(address) == CUDA_ERROR_INVALID_VALUE &&
            pools::release(address) == CUDA_ERROR_INVALID_VALUE)
            managed::release(address);
    t.update_page();
}

} // namespace flowgpu
