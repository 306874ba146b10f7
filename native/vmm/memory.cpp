#include "memory.h"

#include <algorithm>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "descriptor.h"
#include "fault.h"

namespace flowgpu {

CUmemAccessDesc access_of(int device, bool enabled) {
    CUmemAccessDesc desc = {};
    desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    desc.location.id = device;
    desc.flags = enabled ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return desc;
}

CUmemAllocationProp Memory::properties(int device) const {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // What cuMemAlloc gives always has it; the driver has to be asked where memory is created
    // (P14).
    int rdma = 0;
    if (driver_.attribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                          device) == CUDA_SUCCESS)
        prop.allocFlags.gpuDirectRDMACapable = rdma != 0;
    return prop;
}

CUresult Memory::open_window(int device, Window** window) {
    auto it = windows_.find(device);
    if (it != windows_.end()) {
        *window = &it->second;
        return CUDA_SUCCESS;
    }
    if (device < 0 || device >= kMaxDevices)
        return CUDA_ERROR_INVALID_DEVICE;
    CUmemAllocationProp prop = properties(device);
    size_t granularity = 0;
    CUresult result =
        driver_.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t base = kWindowBase + static_cast<uint64_t>(device) * kWindowBytes;
    CUdeviceptr address = 0;
    result = driver_.address_reserve(&address, kWindowBytes, granularity, base, 0);
    if (result != CUDA_SUCCESS)
        return result;
    // The hint is only a hint (P11). Any address serves: the image records it and a restore keeps
    // the reservation.
    Window made;
    made.base = address;
    made.ranges = std::make_unique<Ranges>(address, kWindowBytes);
    made.granularity = granularity;
    totals_.devices |= uint64_t{1} << device;
    map_.put(Region{address, kWindowBytes, MemoryKind::window, device});
    *window = &windows_.emplace(device, std::move(made)).first->second;
    return CUDA_SUCCESS;
}

CUresult Memory::map_block(Block& block, const Window& window) {
    CUresult result = driver_.map(block.address, block.bytes, 0, block.handle, 0);
    if (result != CUDA_SUCCESS)
        return result;
    std::vector<CUmemAccessDesc> descs = {access_of(block.device, true)};
    for (int peer : window.peers)
        descs.push_back(access_of(peer, true));
    result = driver_.set_access(block.address, block.bytes, descs.data(), descs.size());
    if (result != CUDA_SUCCESS)
        driver_.unmap(block.address, block.bytes);
    return result;
}

CUresult Memory::make_block(int device, Window& window, uint64_t bytes, Block** made) {
    auto block = std::make_unique<Block>();
    block->id = next_id_;
    block->bytes = bytes;
    block->device = device;
    block->address = window.ranges->claim(bytes);
    if (!block->address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUmemAllocationProp prop = properties(device);
    CUresult result = driver_.create(&block->handle, bytes, &prop, 0);
    if (result == CUDA_SUCCESS) {
        result = map_block(*block, window);
        if (result != CUDA_SUCCESS)
            driver_.release(block->handle);
    }
    if (result != CUDA_SUCCESS) {
        window.ranges->release(block->address, bytes);
        return result;
    }
    next_id_++;
    totals_.blocks++;
    totals_.block_bytes += bytes;
    *made = block.get();
    blocks_.emplace(block->id, std::move(block));
    return CUDA_SUCCESS;
}

CUresult Memory::drop_block(Block* block) {
    CUresult result = CUDA_SUCCESS;
    if (block->present) {
        result = driver_.unmap(block->address, block->bytes);
        if (result != CUDA_SUCCESS)
            return result;
        result = driver_.release(block->handle);
    }
    if (block->fd >= 0)
        close(block->fd);
    Window& window = windows_.at(block->device);
    window.ranges->release(block->address, block->bytes);
    totals_.blocks--;
    totals_.block_bytes -= block->bytes;
    blocks_.erase(block->id);
    return result;
}

CUresult Memory::allocate_small(int device, Window& window, uint64_t bytes, Block** block,
                                uint64_t* address) {
    uint64_t piece = round_up(bytes, kSmallGranule);
    for (Block* candidate : window.small_blocks) {
        if (candidate->pieces->free_bytes() < piece)
            continue;
        *address = candidate->pieces->claim(piece);
        if (*address) {
            *block = candidate;
            return CUDA_SUCCESS;
        }
    }
    CUresult result = make_block(device, window, window.granularity, block);
    if (result != CUDA_SUCCESS)
        return result;
    (*block)->small = true;
    (*block)->pieces = std::make_unique<Ranges>((*block)->address, (*block)->bytes);
    window.small_blocks.push_back(*block);
    *address = (*block)->pieces->claim(piece);
    return CUDA_SUCCESS;
}

CUresult Memory::allocate(int device, CUcontext context, uint64_t bytes, CUdeviceptr* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    Window* window = nullptr;
    CUresult result = open_window(device, &window);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes > kWindowBytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    drop_given();
    make_room(device);
    Block* block = nullptr;
    uint64_t start = 0;
    if (bytes < window->granularity) {
        result = allocate_small(device, *window, bytes, &block, &start);
    } else {
        result = make_block(device, *window, round_up(bytes, window->granularity), &block);
        start = block ? block->address : 0;
    }
    if (result != CUDA_SUCCESS)
        return result;
    map_.put(Region{start, bytes, MemoryKind::allocation, device, context, block});
    totals_.allocations++;
    totals_.allocation_bytes += bytes;
    *address = start;
    return CUDA_SUCCESS;
}

// It is in the map no more. One whose block the driver does not let go of is entered again, as the
// driver's own would stay.
CUresult Memory::release_locked(const Region& allocation) {
    Block* block = allocation.block;
    CUresult result = CUDA_SUCCESS;
    if (block->small) {
        block->pieces->release(allocation.address, round_up(allocation.bytes, kSmallGranule));
        // One is kept, or a lone small buffer would be mapped anew each time.
        if (block->pieces->all_free() && windows_.at(block->device).small_blocks.size() > 1)
            result = drop_small(block);
    } else {
        const uint64_t id = block->id;
        result = drop_block(block);
        if (blocks_.count(id)) {
            map_.put(allocation);
            return result;
        }
    }
    totals_.allocations--;
    totals_.allocation_bytes -= allocation.bytes;
    return result;
}

// One that the driver does not let go of goes on to be used for small allocations.
CUresult Memory::drop_small(Block* block) {
    auto& small = windows_.at(block->device).small_blocks;
    const uint64_t id = block->id;
    const CUresult result = drop_block(block);
    if (blocks_.count(id))
        return CUDA_SUCCESS;
    small.erase(std::find(small.begin(), small.end(), block));
    return result;
}

CUresult Memory::release(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(mutex_);
    Region allocation;
    return map_.remove(address, only(MemoryKind::allocation), &allocation)
               ? release_locked(allocation)
               : CUDA_ERROR_INVALID_VALUE;
}

void Memory::release_context(CUcontext context) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Region& allocation : map_.all(only(MemoryKind::allocation))) {
        if (allocation.context != context)
            continue;
        map_.remove(allocation.address, only(MemoryKind::allocation));
        allocation.context = nullptr; // where the driver does not let go of it
        release_locked(allocation);
    }
    // The spare goes as well: a program that ends its contexts expects all of its memory back.
    for (auto& [device, window] : windows_)
        for (Block* block : std::vector<Block*>(window.small_blocks))
            if (block->pieces->all_free())
                drop_small(block);
    for (auto& [handle, block] : program_blocks_) // bound to no context: it stays
        if (block->program->context == context)
            block->program->context = nullptr;
    drop_unused_rooms();
}

CUresult Memory::set_peer(int device, int accessor, bool enabled) {
    std::lock_guard<std::mutex> lock(mutex_);
    Window* window = nullptr;
    CUresult result = open_window(device, &window);
    if (result != CUDA_SUCCESS)
        return result;
    if (enabled)
        window->peers.insert(accessor);
    else
        window->peers.erase(accessor);
    CUmemAccessDesc desc = access_of(accessor, enabled);
    for (auto& [id, block] : blocks_) {
        // The program itself says who may use what it maps.
        if (block->device != device || !block->present || block->program)
            continue;
        result = driver_.set_access(block->address, block->bytes, &desc, 1);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

MemoryTotals Memory::totals() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return totals_;
}

CUresult Memory::map_all_of(Block& block) {
    return block.program ? map_program_block(block) : map_block(block, windows_.at(block.device));
}

CUresult Memory::unmap_all_of(Block& block) {
    return block.program ? unmap_program_block(block) : driver_.unmap(block.address, block.bytes);
}

CUresult Memory::export_block(const Block& block, int* fd) const {
    if (block.fd < 0)
        return driver_.export_handle(fd, block.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    *fd = fcntl(block.fd, F_DUPFD_CLOEXEC, 0); // an imported handle cannot be exported (E2)
    return *fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult Memory::share(uint64_t address, Shared* shared) {
    std::lock_guard<std::mutex> lock(mutex_);
    Region allocation;
    const Block* block = program_block(address);
    if (!block && map_.starts_at(address, only(MemoryKind::allocation), &allocation))
        block = allocation.block;
    if (!block || !block->present)
        return CUDA_ERROR_INVALID_VALUE;
    shared->id = block->id;
    shared->block_bytes = block->bytes;
    shared->offset = address - block->address;
    shared->bytes = block->program ? block->bytes : allocation.bytes;
    return export_block(*block, &shared->fd);
}

CUresult Memory::send_new(const Sink& sink) {
    // Locked one block at a time: the program goes on allocating while its blocks are exported (61
    // us each, E17).
    uint64_t next = 0;
    for (;;) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto it = blocks_.lower_bound(next);
        while (it != blocks_.end() && (it->second->sent || !it->second->present))
            ++it;
        if (it == blocks_.end())
            return CUDA_SUCCESS;
        Block& block = *it->second;
        next = block.id + 1;
        int fd = -1;
        CUresult result = export_block(block, &fd);
        if (result != CUDA_SUCCESS)
            return result;
        if (!sink(block, fd))
            return CUDA_ERROR_OPERATING_SYSTEM;
        block.sent = true;
    }
}

void Memory::forget_sent() {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_given();
    for (auto& [id, block] : blocks_)
        block->sent = false;
}

std::vector<uint64_t> Memory::live_ids() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint64_t> ids;
    ids.reserve(blocks_.size());
    for (auto& [id, block] : blocks_)
        ids.push_back(id);
    return ids;
}

CUresult Memory::release_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, block] : blocks_) {
        if (!block->present)
            continue;
        CUresult result = fires(Fault::at_task_release) ? CUDA_ERROR_UNKNOWN : unmap_all_of(*block);
        if (result != CUDA_SUCCESS)
            return result;
        driver_.release(block->handle); // the mapping is gone and the ghost holds the memory:
                                        // nothing left to undo
        note_away(*block);
    }
    for (auto& [device, room] : rooms_)
        empty_room(room);
    return CUDA_SUCCESS;
}

void Memory::note_away(Block& block) {
    block.present = false;
    block.handle = 0;
    if (block.fd >= 0)
        close(block.fd);
    block.fd = -1;
}

void Memory::lose_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [id, block] : blocks_)
        note_away(*block);
    for (auto& [handle, block] : program_blocks_)
        for (auto& [address, mapping] : block->program->mappings)
            mapping.mapped = false;
    for (auto& [device, room] : rooms_)
        room = Room();
}

CUresult Memory::map_back(uint64_t id, uint64_t address, uint64_t bytes, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = blocks_.find(id);
    bool known =
        it != blocks_.end() && it->second->address == address && it->second->bytes == bytes;
    if (!known || it->second->present) {
        close(fd);
        return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    Block& block = *it->second;
    CUresult result =
        driver_.import_handle(&block.handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_SUCCESS) {
        result = map_all_of(block);
        if (result != CUDA_SUCCESS)
            driver_.release(block.handle);
    }
    if (result != CUDA_SUCCESS) {
        block.handle = 0;
        close(fd);
        return result;
    }
    block.fd = move_high(fd);
    block.present = true;
    block.sent = false;
    return CUDA_SUCCESS;
}

bool Memory::all_present() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(blocks_.begin(), blocks_.end(),
                       [](const auto& entry) { return entry.second->present; });
}

void Memory::forget_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    forget_parents();
    map_.remove_all(only(MemoryKind::window, MemoryKind::allocation, MemoryKind::mapping));
    program_blocks_.clear();
    blocks_.clear();
    windows_.clear();
    totals_ = MemoryTotals();
}

std::set<CUcontext> Memory::contexts() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::set<CUcontext> found;
    for (const Region& allocation : map_.all(only(MemoryKind::allocation)))
        if (allocation.context)
            found.insert(allocation.context);
    for (auto& [handle, block] : program_blocks_)
        if (block->program->context)
            found.insert(block->program->context);
    return found;
}

void Memory::unmap_windows() {
    for (auto& [device, window] : windows_)
        if (window.base) {
            munmap(reinterpret_cast<void*>(window.base), kWindowBytes);
            window.base = 0; // a child of the child may have something of its own there
        }
}

void Memory::forget_parents() {
    for (auto& [id, block] : blocks_) {
        if (block->fd >= 0)
            close(block->fd);
        block->fd = -1;
        for (int watch : block->tickets)
            close(watch);
        block->tickets.clear();
    }
    rooms_.clear();
}

} // namespace flowgpu
