// Memory that the program creates and maps itself: PyTorch's expandable segments above all.
//
// The driver stays the judge of every call: it is made first, with the driver's handle, and noted
// when it succeeds. Only references are counted here, because the driver's handle is kept until the
// memory has neither references nor mappings: without it the memory could not be exported. The
// driver keeps the memory just as long.
#include "memory.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <unistd.h>

#include "descriptor.h"

namespace flowgpu {

namespace {

// What the ghost can import, copy and make again: blocks are whole chunks of the image.
constexpr uint64_t kBlockMultiple = 2ull << 20;

// Tells if anybody has the ticket's file open for writing, as who was given it has: a lease for
// reading is refused then.
bool is_held(int watch) {
    const int error = errno;
    const bool free = fcntl(watch, F_SETLEASE, F_RDLCK) == 0;
    const bool held = !free && errno == EAGAIN;
    if (free)
        fcntl(watch, F_SETLEASE, F_UNLCK);
    errno = error;
    return held;
}

// Forgets tickets that nobody has. True if one is left.
bool is_given(Block& block) {
    auto& tickets = block.tickets;
    for (auto at = tickets.begin(); at != tickets.end();) {
        if (is_held(*at)) {
            ++at;
            continue;
        }
        close(*at);
        at = tickets.erase(at);
    }
    return !tickets.empty();
}

} // namespace

bool Memory::takes_over(uint64_t bytes, const CUmemAllocationProp& asked,
                        unsigned long long flags) {
    // Another process gets in by a fabric handle, even from another node. The only flag that the
    // ghost need not know is the capability for RDMA: a program uses an RDMA device through
    // descriptors that CRIU refuses.
    auto types = static_cast<unsigned>(asked.requestedHandleTypes);
    return bytes && bytes % kBlockMultiple == 0 && flags == 0 &&
           asked.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           asked.location.type == CU_MEM_LOCATION_TYPE_DEVICE && asked.location.id >= 0 &&
           (types & ~static_cast<unsigned>(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) == 0 &&
           asked.allocFlags.compressionType == CU_MEM_ALLOCATION_COMP_NONE &&
           asked.allocFlags.usage == 0 && !asked.win32HandleMetaData;
}

CUresult Memory::create_handle(uint64_t bytes, const CUmemAllocationProp& asked, CUcontext context,
                               CUmemGenericAllocationHandle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_given();
    CUmemAllocationProp prop = asked;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    auto block = std::make_unique<Block>();
    block->bytes = bytes;
    block->device = asked.location.id;
    block->program = std::make_unique<ProgramHandle>();
    block->program->asked = asked;
    block->program->context = context;
    make_room(block->device);
    CUresult result = driver_.create(&block->handle, bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    totals_.allocations++;
    totals_.allocation_bytes += bytes;
    totals_.block_bytes += bytes;
    totals_.devices |= uint64_t{1} << (block->device % kMaxDevices);
    *handle = next_program_handle_;
    add_program_block(std::move(block));
    return CUDA_SUCCESS;
}

void Memory::add_program_block(std::unique_ptr<Block> block) {
    block->id = next_id_++;
    block->address = next_program_handle_;
    next_program_handle_ += block->bytes;
    totals_.blocks++;
    program_blocks_[block->address] = block.get();
    blocks_.emplace(block->id, std::move(block));
}

CUresult Memory::import_block(const Origin& origin, uint64_t bytes, int fd, CUcontext context,
                              CUmemGenericAllocationHandle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [known, block] : program_blocks_) {
        if (!block->imported() || !(block->origin == origin))
            continue;
        close(fd);
        block->program->references++;
        *handle = known;
        return CUDA_SUCCESS;
    }
    auto block = std::make_unique<Block>();
    block->bytes = bytes;
    block->origin = origin;
    block->program = std::make_unique<ProgramHandle>();
    block->program->context = context;
    CUresult result =
        driver_.import_handle(&block->handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_SUCCESS) {
        result = driver_.properties(&block->program->asked, block->handle);
        if (result != CUDA_SUCCESS)
            driver_.release(block->handle);
    }
    if (result != CUDA_SUCCESS) {
        close(fd);
        return result;
    }
    block->device = std::max(block->program->asked.location.id, 0); // negative: it is not seen here
    block->fd = move_high(fd);
    *handle = next_program_handle_;
    add_program_block(std::move(block));
    return CUDA_SUCCESS;
}

Block* Memory::program_block(CUmemGenericAllocationHandle handle) const {
    auto it = program_blocks_.find(handle);
    return it == program_blocks_.end() ? nullptr : it->second;
}

Block* Memory::mapped_block(CUdeviceptr address) const {
    Region mapping;
    return map_.find(address, only(MemoryKind::mapping), &mapping) ? mapping.block : nullptr;
}

void Memory::note_mapping(CUdeviceptr address, Block& block, ProgramMapping mapping) {
    map_.put(Region{address, mapping.bytes, MemoryKind::mapping, block.device, nullptr, &block});
    block.program->mappings[address] = std::move(mapping);
}

bool Memory::is_program_handle(CUmemGenericAllocationHandle handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return program_block(handle) != nullptr;
}

CUmemGenericAllocationHandle Memory::driver_handle(CUmemGenericAllocationHandle handle) const {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    return block ? block->handle : handle;
}

bool Memory::retain_handle(CUdeviceptr address, CUmemGenericAllocationHandle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = mapped_block(address);
    if (!block)
        return false;
    // "Guaranteed to be the same handle value used to map the memory", released meanwhile or not.
    block->program->references++;
    *handle = block->address;
    return true;
}

void Memory::note_ticket(CUmemGenericAllocationHandle handle, int watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    if (!block) {
        close(watch);
        return;
    }
    is_given(*block);
    block->tickets.push_back(watch);
}

void Memory::drop_given() {
    for (uint64_t handle : std::set<uint64_t>(std::move(given_)))
        if (Block* block = program_block(handle))
            drop_if_unused(block);
}

CUresult Memory::drop_if_unused(Block* block) {
    if (block->program->references || !block->program->mappings.empty())
        return CUDA_SUCCESS;
    if (is_given(*block)) {
        given_.insert(block->address);
        return CUDA_SUCCESS;
    }
    CUresult result = block->present ? driver_.release(block->handle) : CUDA_SUCCESS;
    if (block->fd >= 0)
        close(block->fd);
    totals_.blocks--;
    if (!block->imported()) {
        totals_.allocations--;
        totals_.allocation_bytes -= block->bytes;
        totals_.block_bytes -= block->bytes;
    }
    const bool orphaned = !block->program->context;
    program_blocks_.erase(block->address);
    blocks_.erase(block->id);
    if (orphaned) // no end of a context will look for what nobody needs any more
        drop_unused_rooms();
    return result;
}

CUresult Memory::release_handle(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    if (!block || !block->program->references)
        return CUDA_ERROR_INVALID_VALUE;
    block->program->references--;
    return drop_if_unused(block);
}

CUresult Memory::map_handle(CUdeviceptr address, uint64_t bytes, uint64_t offset,
                            CUmemGenericAllocationHandle handle, unsigned long long flags) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    if (!block || !block->program->references)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = driver_.map(address, bytes, offset, block->handle, flags);
    if (result != CUDA_SUCCESS)
        return result;
    note_mapping(address, *block, ProgramMapping{bytes, offset, true, {}});
    return CUDA_SUCCESS;
}

void Memory::map_later(CUdeviceptr address, CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    note_mapping(address, *block,
                 ProgramMapping{block->bytes,
                                0,
                                false,
                                {{{CU_MEM_LOCATION_TYPE_DEVICE, block->device},
                                  CU_MEM_ACCESS_FLAGS_PROT_READWRITE}}});
    block->program->references = 0;
    block->program->waits = true;
}

void Memory::stop_waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [handle, block] : program_blocks_)
        block->program->waits = false;
}

void Memory::drop_waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = program_blocks_.begin(); it != program_blocks_.end();) {
        Block* block = (it++)->second;
        if (!block->program->waits)
            continue;
        for (const auto& [address, mapping] : block->program->mappings)
            map_.remove(address, only(MemoryKind::mapping));
        block->program->mappings.clear();
        drop_if_unused(block);
    }
}

CUresult Memory::unmap_range(CUdeviceptr address, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    CUresult result = driver_.unmap(address, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    // The driver unmaps whole mappings only, so those that start inside end inside.
    for (const Region& mapping : map_.all(only(MemoryKind::mapping), address, bytes)) {
        map_.remove(mapping.address, only(MemoryKind::mapping));
        mapping.block->program->mappings.erase(mapping.address);
        CUresult dropped = drop_if_unused(mapping.block);
        if (dropped != CUDA_SUCCESS)
            result = dropped;
    }
    return result;
}

CUresult Memory::set_access(CUdeviceptr address, uint64_t bytes, const CUmemAccessDesc* access,
                            size_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    CUresult result = driver_.set_access(address, bytes, access, count);
    if (result != CUDA_SUCCESS)
        return result;
    for (const Region& mapping : map_.all(only(MemoryKind::mapping), address, bytes)) {
        auto& noted = mapping.block->program->mappings.at(mapping.address).access;
        for (size_t i = 0; i < count; i++) {
            auto key = std::make_pair(access[i].location.type, access[i].location.id);
            if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
                noted.erase(key);
            else
                noted[key] = access[i].flags;
        }
    }
    return CUDA_SUCCESS;
}

CUresult Memory::may_export(void* out, CUmemGenericAllocationHandle handle,
                            CUmemAllocationHandleType type, unsigned long long flags) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    if (!block || !block->program->references)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) // of which it has none (takes_over)
        return driver_.export_handle(out, block->handle, type, flags);
    // Else it can be exported only because of us. An import has no types (E2).
    return out && !flags && block->program->asked.requestedHandleTypes & type
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

bool Memory::asked_for(CUmemGenericAllocationHandle handle, CUmemAllocationProp* asked) const {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = program_block(handle);
    if (!block || !block->program->references)
        return false;
    *asked = block->program->asked;
    return true;
}

bool Memory::asked_at(CUdeviceptr address, CUmemAllocationProp* asked) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Block* block = mapped_block(address);
    if (block)
        *asked = block->program->asked;
    return block != nullptr;
}

CUresult Memory::map_program_block(Block& block) {
    std::vector<std::pair<uint64_t, ProgramMapping*>> done;
    CUresult result = CUDA_SUCCESS;
    if (block.program->waits)
        return result;
    for (auto& [address, mapping] : block.program->mappings) {
        if (mapping.mapped)
            continue;
        result = driver_.map(address, mapping.bytes, mapping.offset, block.handle, 0);
        if (result != CUDA_SUCCESS)
            break;
        mapping.mapped = true;
        done.emplace_back(address, &mapping);
        std::vector<CUmemAccessDesc> access;
        for (auto& [location, flags] : mapping.access) {
            CUmemAccessDesc desc = {};
            desc.location.type = location.first;
            desc.location.id = location.second;
            desc.flags = flags;
            access.push_back(desc);
        }
        if (!access.empty())
            result = driver_.set_access(address, mapping.bytes, access.data(), access.size());
        if (result != CUDA_SUCCESS)
            break;
    }
    if (result == CUDA_SUCCESS)
        return result;
    for (auto& [address, mapping] : done)
        mapping->mapped = driver_.unmap(address, mapping->bytes) != CUDA_SUCCESS;
    return result;
}

CUresult Memory::unmap_program_block(Block& block) {
    for (auto& [address, mapping] : block.program->mappings) {
        if (!mapping.mapped)
            continue;
        CUresult result = driver_.unmap(address, mapping.bytes);
        if (result == CUDA_SUCCESS) {
            mapping.mapped = false;
            continue;
        }
        if (map_program_block(block) != CUDA_SUCCESS) {
            // Half of it is away: map_back brings the rest by an import of the same memory.
            driver_.release(block.handle);
            note_away(block);
        }
        return result;
    }
    return CUDA_SUCCESS;
}

void Memory::for_each_allocation(const std::function<void(const LiveRange&)>& visit) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Region& one : map_.all(only(MemoryKind::allocation)))
        visit(LiveRange{one.address, one.bytes, one.address});
    for (const Region& one : map_.all(only(MemoryKind::mapping)))
        visit(LiveRange{one.address, one.bytes,
                        one.block->address + one.block->program->mappings.at(one.address).offset});
    for (auto& [handle, block] : program_blocks_) {
        std::vector<std::pair<uint64_t, uint64_t>> covered; // offsets, begin and end
        for (const auto& [address, mapping] : block->program->mappings)
            covered.emplace_back(mapping.offset, mapping.offset + mapping.bytes);
        covered.emplace_back(block->bytes, block->bytes);
        std::sort(covered.begin(), covered.end());
        uint64_t end = 0;
        for (auto& [from, to] : covered) {
            if (from > end)
                visit(LiveRange{handle + end, from - end, handle + end});
            end = std::max(end, to);
        }
    }
}

} // namespace flowgpu
