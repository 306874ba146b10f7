#include "watch.h"

#include <algorithm>
#include <atomic>

#include <sched.h>
#include <sys/mman.h>

#include "channel.h"
#include "driver.h"
#include "task.h"

namespace flowgpu::watch {

namespace {

constexpr uint64_t kWrites = 1 << 16;

// Zero pages are a log without anything in it.
struct Log {
    std::atomic<uint64_t> launches, calls, frees, arrays, missed;
    std::atomic<uint64_t> next; // of `writes`; may count further than there are
    flowgpu_write writes[kWrites];
};

Log* made = nullptr; // behind a closed gate; never freed, as a thread may be about to use it

std::atomic<What> what_is_noted{What::all};

bool is_wanted(const flowgpu_write& write) {
    constexpr Kinds kOfDevices = ~only(MemoryKind::pinned);
    Region found;
    return write.bytes && write.rows && write.slices &&
           (what_is_noted.load(std::memory_order_relaxed) == What::all ||
            !address_map().find(write.address, kOfDevices, &found));
}

void add(const flowgpu_write& write) {
    if (!is_wanted(write))
        return;
    const uint64_t at = made->next.fetch_add(1, std::memory_order_relaxed);
    if (at >= kWrites) {
        made->missed.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    flowgpu_write& row = made->writes[at];
    row.address = write.address;
    row.pitch = write.pitch;
    row.rows = write.rows;
    row.slice = write.slice;
    row.slices = write.slices;
    __atomic_store_n(&row.bytes, write.bytes, __ATOMIC_RELEASE); // now it is whole
}

void add_line(uint64_t address, uint64_t bytes) {
    add({address, bytes, 0, 1, 0, 1});
}

// A structure of a shaped copy. Two dimensions are three of one slice. No pitch and no height mean
// those of the copy.
template <class Copy> void add_copy(const Copy* copy, uint64_t z, uint64_t height, uint64_t depth) {
    if (copy->dstMemoryType == CU_MEMORYTYPE_ARRAY) {
        made->arrays.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    const bool host = copy->dstMemoryType == CU_MEMORYTYPE_HOST;
    const uint64_t base = host ? reinterpret_cast<uint64_t>(copy->dstHost) : copy->dstDevice;
    const uint64_t pitch = copy->dstPitch ? copy->dstPitch : copy->WidthInBytes;
    const uint64_t slice = pitch * (height ? height : copy->Height);
    add({base + z * slice + copy->dstY * pitch + copy->dstXInBytes, copy->WidthInBytes, pitch,
         copy->Height, slice, depth});
}

template <class Copy> void add_2d(const void* argument) {
    if (auto* copy = static_cast<const Copy*>(argument))
        add_copy(copy, 0, 0, 1);
}

template <class Copy> void add_3d(const void* argument) {
    if (auto* copy = static_cast<const Copy*>(argument))
        add_copy(copy, copy->dstZ, copy->dstHeight, copy->Depth);
}

// An element is a byte, unless one of the two is an array.
void add_copy_of_a_list(const CUDA_MEMCPY3D_BATCH_OP& copy) {
    if (copy.dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        made->arrays.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    if (copy.src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
        made->missed.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    const auto& to = copy.dst.op.ptr;
    const uint64_t pitch = to.rowLength ? to.rowLength : copy.extent.width;
    const uint64_t height = to.layerHeight ? to.layerHeight : copy.extent.height;
    add({to.ptr, copy.extent.width, pitch, copy.extent.height, pitch * height, copy.extent.depth});
}

void add_operation(const CUstreamBatchMemOpParams& one) {
    if (one.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32)
        add_line(one.writeValue.address, sizeof(cuuint32_t));
    if (one.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64)
        add_line(one.writeValue.address, sizeof(cuuint64_t));
}

void add_writes(const gate::Call& call) {
    const Effect& effect = effects[call.symbol];
    const auto argument = [&](unsigned place) { return call.arguments[effect.places[place]]; };
    const auto pointer = [&](unsigned place) {
        return reinterpret_cast<const void*>(argument(place));
    };
    switch (effect.form) {
    case Form::line: {
        const uint64_t elements = effect.places[1] == kNoArgument ? 1 : argument(1);
        return add_line(argument(0), elements * effect.unit);
    }
    case Form::rows:
        return add({argument(0), argument(2) * effect.unit, argument(1), argument(3), 0, 1});
    case Form::list: {
        auto* addresses = static_cast<const CUdeviceptr*>(pointer(0));
        auto* bytes = static_cast<const size_t*>(pointer(1));
        for (uint64_t i = 0; addresses && bytes && i < argument(2); i++)
            add_line(addresses[i], bytes[i]);
        return;
    }
    case Form::array:
        made->arrays.fetch_add(1, std::memory_order_relaxed);
        return;
    case Form::copy_2d_v1:
        return add_2d<CUDA_MEMCPY2D_v1>(pointer(0));
    case Form::copy_2d:
        return add_2d<CUDA_MEMCPY2D>(pointer(0));
    case Form::copy_3d_v1:
        return add_3d<CUDA_MEMCPY3D_v1>(pointer(0));
    case Form::copy_3d:
        return add_3d<CUDA_MEMCPY3D>(pointer(0));
    case Form::copy_3d_peer:
        return add_3d<CUDA_MEMCPY3D_PEER>(pointer(0));
    case Form::copies_3d: {
        auto* copies = static_cast<const CUDA_MEMCPY3D_BATCH_OP*>(pointer(0));
        for (uint64_t i = 0; copies && i < argument(1); i++)
            add_copy_of_a_list(copies[i]);
        return;
    }
    case Form::operations: {
        auto* operations = static_cast<const CUstreamBatchMemOpParams*>(pointer(0));
        for (uint64_t i = 0; operations && i < argument(1); i++)
            add_operation(operations[i]);
        return;
    }
    case Form::unknown:
    case Form::address:
    case Form::none:
        made->missed.fetch_add(1, std::memory_order_relaxed);
    }
}

} // namespace

bool begin(What what) {
    what_is_noted = what;
    if (made)
        return madvise(made, sizeof *made, MADV_DONTNEED) == 0;
    void* memory =
        mmap(nullptr, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    made = static_cast<Log*>(memory);
    return true;
}

void note(const gate::Call& call) {
    switch (does(call.symbol)) {
    case Does::launches:
        made->launches.fetch_add(1, std::memory_order_relaxed);
        return;
    case Does::writes:
        made->calls.fetch_add(1, std::memory_order_relaxed);
        return add_writes(call);
    case Does::frees:
        made->frees.fetch_add(1, std::memory_order_relaxed);
        return;
    case Does::nothing:
        return;
    }
}

flowgpu_watched noted(std::vector<flowgpu_write>* writes) {
    const uint64_t count = std::min(made->next.load(), kWrites);
    for (uint64_t i = 0; i < count; i++) {
        while (!__atomic_load_n(&made->writes[i].bytes, __ATOMIC_ACQUIRE))
            sched_yield(); // its thread is about to write it
        writes->push_back(made->writes[i]);
    }
    flowgpu_watched all = {};
    all.header = make_header(FLOWGPU_WATCHED, sizeof all);
    all.launches = made->launches;
    all.writes = made->calls;
    all.frees = made->frees;
    all.arrays = made->arrays;
    all.missed = made->missed;
    return all;
}

} // namespace flowgpu::watch
