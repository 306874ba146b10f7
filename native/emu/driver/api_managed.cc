// Managed memory: where it lies in the program's address space, and its calls. As the real driver:
// regions of whole places are reserved, memory of the device is mapped over parts of them, what is
// small shares such a part, and a region goes with its last part. A forked child has none of it.
#include "client.h"

#include <sys/mman.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

uint64_t align_to(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// Small allocations share a piece of this size.
bool is_small(uint64_t size) {
    return size < kGranularity;
}

uint64_t piece_size(uint64_t size) {
    return is_small(size) ? kGranularity
                          : align_to(size, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
}

// A place in a region for a piece; 0 if no addresses are left.
uint64_t take_piece(uint64_t size, bool variables) {
    Process& p = process();
    const uint64_t whole = piece_size(size);
    uint64_t at = 0;
    for (const auto& [begin, end] : p.managed_regions) {
        at = begin;
        for (auto piece = p.managed_pieces.lower_bound(begin);
             piece != p.managed_pieces.end() && piece->first < at + whole; ++piece) {
            at = align_to(piece->first + piece->second.size, kGranularity);
        }
        if (at + whole <= end) {
            break;
        }
        at = 0;
    }
    if (at == 0) {
        const uint64_t region = align_to(whole, kPlaces);
        at = reinterpret_cast<uint64_t>(reserve_addresses(region, kPlaces, 0));
        if (at == 0) {
            return 0;
        }
        p.managed_regions[at] = at + region;
    }
    p.managed_pieces[at] = {whole, variables, {}};
    return at;
}

// As of /dev/nvidia-uvm, of the descriptor that the process keeps for it: the address is the
// offset.
bool map_piece(uint64_t at, UniqueFd& file) {
    Process& p = process();
    if (p.managed_file < 0) {
        p.managed_file = file.release();
    }
    const uint64_t size = p.managed_pieces.at(at).size;
    void* place = reinterpret_cast<void*>(at);
    return ::mmap(place, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p.managed_file,
                  static_cast<off_t>(at)) == place &&
           ::madvise(place, size, MADV_DONTFORK) == 0;
}

void close_file_if_unused() {
    Process& p = process();
    if (p.managed_regions.empty() && p.managed_file >= 0) {
        ::close(p.managed_file);
        p.managed_file = -1;
    }
}

void drop_piece(uint64_t at) {
    Process& p = process();
    const auto piece = p.managed_pieces.find(at);
    const auto region = std::prev(p.managed_regions.upper_bound(at));
    ::mmap(reinterpret_cast<void*>(at), piece->second.size, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    const auto next = p.managed_pieces.erase(piece);
    const bool alone = (next == p.managed_pieces.end() || next->first >= region->second) &&
                       (next == p.managed_pieces.begin() || std::prev(next)->first < region->first);
    if (alone) {
        ::munmap(reinterpret_cast<void*>(region->first), region->second - region->first);
        p.managed_regions.erase(region);
        close_file_if_unused();
    }
}

// The first gap among small allocations, or a piece of its own.
uint64_t take_block(uint64_t size, uint64_t* piece) {
    Process& p = process();
    for (auto& [begin, one] : p.managed_pieces) {
        if (!is_small(size) || one.variables || one.used.empty() || one.size != kGranularity) {
            continue;
        }
        uint64_t at = begin;
        for (const auto& [start, end] : one.used) {
            if (start - at >= size) {
                break;
            }
            at = align_to(end, kSmallAlignment);
        }
        if (at + size <= begin + one.size) {
            *piece = begin;
            return at;
        }
    }
    return *piece = take_piece(size, false);
}

void give_back(std::map<uint64_t, ManagedBlock>::iterator block) {
    Process& p = process();
    const uint64_t at = block->second.piece;
    ManagedPiece& piece = p.managed_pieces.at(at);
    piece.used.erase(block->first);
    if (piece.used.empty()) {
        drop_piece(at);
    }
    p.managed.erase(block);
}

CUresult allocate(uint64_t size, CUdeviceptr* pointer, uint64_t pool = 0) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    uint64_t piece = 0;
    const uint64_t at = take_block(size, &piece);
    if (at == 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const bool fresh = p.managed_pieces[piece].used.empty();
    p.managed_pieces[piece].used[at] = at + size;
    const ManagedBlock made{piece, thread_state().current(), size, pool};
    const auto block = p.managed.emplace(at, made).first;
    Call call(Op::ManagedAlloc);
    call.in(piece).in(p.managed_pieces[piece].size).in(at).in(size);
    CUresult r = call.go();
    if (r == CUDA_SUCCESS && fresh && !map_piece(piece, call.received_fd())) {
        rpc(Op::MemFree, outs(), at);
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (r != CUDA_SUCCESS) {
        give_back(block);
        return r;
    }
    *pointer = at;
    return CUDA_SUCCESS;
}

std::pair<int, int> key_of(const CUmemLocation& location) {
    const bool numbered = location.type == CU_MEM_LOCATION_TYPE_DEVICE ||
                          location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    return {location.type, numbered ? location.id : 0};
}

// A wrong argument, which a driver finds after it has found the context.
CUresult invalid() {
    const CUresult r = rpc(Op::MemGetInfo, outs());
    return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
}

// A device, as cuMemAdvise and cuMemPrefetchAsync had it before they had locations.
CUmemLocation location_of(CUdevice device) {
    CUmemLocation location{};
    location.type =
        device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device == CU_DEVICE_CPU ? 0 : device;
    return location;
}

struct RangeFacts {
    bool read_mostly;
    CUmemLocation preferred;
    CUmemLocation prefetched;
    std::vector<int32_t> accessed_by;
};

CUresult range_facts(CUdeviceptr pointer, size_t size, RangeFacts* facts) {
    Call call(Op::ManagedAttribute);
    const CUresult r = call.in(uint64_t{pointer}).in(uint64_t{size}).go();
    if (r == CUDA_SUCCESS) {
        facts->read_mostly = call.take<uint8_t>() != 0;
        facts->preferred = call.take<CUmemLocation>();
        facts->prefetched = call.take<CUmemLocation>();
        const std::string_view list = call.take_blob();
        facts->accessed_by.resize(list.size() / sizeof(int32_t));
        std::memcpy(facts->accessed_by.data(), list.data(), list.size());
    }
    return r;
}

int32_t device_of(const CUmemLocation& location) {
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE    ? location.id
           : location.type == CU_MEM_LOCATION_TYPE_INVALID ? CU_DEVICE_INVALID
                                                           : CU_DEVICE_CPU;
}

CUresult range_attribute(const RangeFacts& facts, void* data, size_t size,
                         CUmem_range_attribute attribute) {
    if (data == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto* words = static_cast<int32_t*>(data);
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
        if (size == 0 || size % sizeof *words != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (size_t i = 0; i < size / sizeof *words; ++i) {
            words[i] =
                i < facts.accessed_by.size() ? facts.accessed_by[i] : int32_t{CU_DEVICE_INVALID};
        }
        return CUDA_SUCCESS;
    }
    if (size != sizeof *words) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        *words = facts.read_mostly;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        *words = device_of(facts.preferred);
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
        *words = device_of(facts.prefetched);
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
        *words = facts.preferred.type;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
        *words = facts.preferred.id;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
        *words = facts.prefetched.type;
        return CUDA_SUCCESS;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID:
        *words = facts.prefetched.id;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

} // namespace

CUresult give_managed_piece(uint64_t size) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    const uint64_t at = take_piece(size, true);
    if (at == 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Call call(Op::ManagedPiece);
    call.in(at).in(p.managed_pieces[at].size);
    CUresult r = call.go_ungated();
    if (r == CUDA_SUCCESS && !map_piece(at, call.received_fd())) {
        rpc(Op::ManagedPiece, outs(), at, uint64_t{0});
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (r != CUDA_SUCCESS) {
        drop_piece(at);
    }
    return r;
}

void drop_managed(uint64_t address) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    const auto block = p.managed.find(address);
    if (block != p.managed.end()) {
        give_back(block);
    }
}

void drop_managed_of(uint64_t context) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    for (auto at = p.managed.begin(); at != p.managed.end();) {
        const auto block = at++;
        if (block->second.context == context) {
            give_back(block);
        }
    }
}

bool is_managed_pool(uint64_t pool) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    return p.managed_pools.count(pool) != 0;
}

CUresult make_managed_pool(const CUmemPoolProps& props, CUmemoryPool* pool) {
    const CUmemLocation location = props.location;
    if (props.handleTypes != CU_MEM_HANDLE_TYPE_NONE || props.maxSize != 0 ||
        location.type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUmemLocation of_pool{CU_MEM_LOCATION_TYPE_DEVICE, {0}}; // its memory is not the device's
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        of_pool.id = location.id;
    }
    const CUresult r = rpc(Op::PoolCreate, outs(pool), of_pool);
    if (r == CUDA_SUCCESS) {
        std::lock_guard<std::mutex> lock(process().managed_mutex);
        process().managed_pools[reinterpret_cast<uint64_t>(*pool)] = location;
    }
    return r;
}

CUresult default_managed_pool(CUmemLocation location, CUmemoryPool* pool) {
    Process& p = process();
    const auto key = key_of(location);
    if (location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    {
        std::lock_guard<std::mutex> lock(p.managed_mutex);
        const auto known = p.managed_default.find(key);
        if (known != p.managed_default.end()) {
            *pool = reinterpret_cast<CUmemoryPool>(known->second);
            return CUDA_SUCCESS;
        }
    }
    CUmemPoolProps props{};
    props.location = location;
    const CUresult r = make_managed_pool(props, pool);
    if (r == CUDA_SUCCESS) {
        std::lock_guard<std::mutex> lock(p.managed_mutex);
        p.managed_default[key] = reinterpret_cast<uint64_t>(*pool);
    }
    return r;
}

bool end_managed_pool(uint64_t pool) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    for (const auto& [location, one] : p.managed_default) {
        if (one == pool) {
            return false;
        }
    }
    p.managed_pools.erase(pool);
    for (auto set = p.managed_set.begin(); set != p.managed_set.end();) {
        set = set->second == pool ? p.managed_set.erase(set) : std::next(set);
    }
    return true;
}

CUresult current_managed_pool(CUmemLocation location, CUmemoryPool* pool) {
    Process& p = process();
    {
        std::lock_guard<std::mutex> lock(p.managed_mutex);
        const auto set = p.managed_set.find(key_of(location));
        if (set != p.managed_set.end()) {
            *pool = reinterpret_cast<CUmemoryPool>(set->second);
            return CUDA_SUCCESS;
        }
    }
    return default_managed_pool(location, pool);
}

CUresult set_managed_pool(CUmemLocation location, uint64_t pool) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    const auto known = p.managed_pools.find(pool);
    if (known == p.managed_pools.end() || key_of(known->second) != key_of(location)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    p.managed_set[key_of(location)] = pool;
    return CUDA_SUCCESS;
}

CUresult allocate_from_managed_pool(uint64_t size, uint64_t pool, CUstream stream,
                                    CUdeviceptr* pointer) {
    CUmemLocation location{};
    {
        std::lock_guard<std::mutex> lock(process().managed_mutex);
        location = process().managed_pools[pool];
    }
    CUstreamCaptureStatus capturing{};
    CUresult r = cuStreamIsCapturing(stream, &capturing);
    if (r == CUDA_SUCCESS && capturing != CU_STREAM_CAPTURE_STATUS_NONE) {
        if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) { // a node, as of any pool of a device's
            return rpc(Op::MemAllocAsync, outs(pointer), size, pool, handle_of(stream));
        }
        const bool on_host = location.type == CU_MEM_LOCATION_TYPE_HOST ||
                             location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
        r = capturing == CU_STREAM_CAPTURE_STATUS_INVALIDATED
                ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            : on_host ? CUDA_ERROR_NOT_SUPPORTED
                      : CUDA_ERROR_INVALID_VALUE;
    }
    if (r != CUDA_SUCCESS || size == 0) {
        *pointer = 0;
        return r;
    }
    r = allocate(size, pointer, pool);
    if (r == CUDA_SUCCESS && location.type != CU_MEM_LOCATION_TYPE_NONE) {
        cuMemAdvise_v2(*pointer, size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, location);
    }
    return r;
}

uint64_t managed_pool_of(uint64_t address) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    const auto next = p.managed.upper_bound(address);
    if (next == p.managed.begin()) {
        return 0;
    }
    const auto& [start, block] = *std::prev(next);
    return address < start + block.size ? block.pool : 0;
}

uint64_t bytes_of_managed_pool(uint64_t pool, bool reserved) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    uint64_t sum = 0;
    for (const auto& [start, block] : p.managed) {
        sum += block.pool == pool ? block.size : 0;
    }
    return reserved ? align_to(sum, kPlaces) : sum;
}

void drop_all_managed() {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.managed_mutex);
    for (const auto& [begin, end] : p.managed_regions) {
        ::munmap(reinterpret_cast<void*>(begin), end - begin);
    }
    p.managed_regions.clear();
    p.managed_pieces.clear();
    p.managed.clear();
    close_file_if_unused();
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* pointer, size_t size, unsigned int flags) {
    constexpr uint64_t kLargest = uint64_t{1} << 46;
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (pointer == nullptr || size == 0 ||
        (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
        return invalid();
    }
    return size > kLargest ? CUDA_ERROR_OUT_OF_MEMORY : allocate(size, pointer);
}

CUresult CUDAAPI cuMemPrefetchAsync_v2(CUdeviceptr pointer, size_t size, CUmemLocation location,
                                       unsigned int flags, CUstream stream) {
    return flags != 0 ? invalid()
                      : rpc(Op::ManagedPrefetch, outs(), uint64_t{pointer}, uint64_t{size},
                            location, handle_of(stream));
}

CUresult CUDAAPI cuMemPrefetchAsync(CUdeviceptr pointer, size_t size, CUdevice device,
                                    CUstream stream) {
    return cuMemPrefetchAsync_v2(pointer, size, location_of(device), 0, stream);
}

CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr pointer, size_t size, CUmem_advise advice,
                                CUmemLocation location) {
    return rpc(Op::ManagedAdvise, outs(), uint64_t{pointer}, uint64_t{size},
               static_cast<int32_t>(advice), location);
}

CUresult CUDAAPI cuMemAdvise(CUdeviceptr pointer, size_t size, CUmem_advise advice,
                             CUdevice device) {
    return cuMemAdvise_v2(pointer, size, advice, location_of(device));
}

CUresult CUDAAPI cuMemRangeGetAttribute(void* data, size_t data_size,
                                        CUmem_range_attribute attribute, CUdeviceptr pointer,
                                        size_t size) {
    RangeFacts facts{};
    const CUresult r = range_facts(pointer, size, &facts);
    return r != CUDA_SUCCESS ? r : range_attribute(facts, data, data_size, attribute);
}

CUresult CUDAAPI cuMemRangeGetAttributes(void** data, size_t* data_sizes,
                                         CUmem_range_attribute* attributes, size_t count,
                                         CUdeviceptr pointer, size_t size) {
    RangeFacts facts{};
    if (data == nullptr || data_sizes == nullptr || attributes == nullptr || count == 0) {
        return invalid();
    }
    CUresult r = range_facts(pointer, size, &facts);
    for (size_t i = 0; i < count && r == CUDA_SUCCESS; ++i) {
        r = range_attribute(facts, data[i], data_sizes[i], attributes[i]);
    }
    return r;
}

CUresult CUDAAPI cuStreamAttachMemAsync(CUstream stream, CUdeviceptr pointer, size_t size,
                                        unsigned int flags) {
    return rpc(Op::ManagedAttach, outs(), uint64_t{pointer}, uint64_t{size}, uint32_t{flags},
               handle_of(stream));
}

} // extern "C"
