// Managed memory: the client maps a file of the device at the address that kernels use, which is
// the offset as well. It chooses the places of what cuMemAllocManaged gives, and gives pieces for
// variables of modules. Where the pages are is told by prefetches alone; kernels and the host reach
// them anywhere.
#include "state.h"

#include <fcntl.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

uint64_t page_bytes() {
    return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t page_of(uint64_t address) {
    return address / page_bytes() * page_bytes();
}

uint64_t page_after(uint64_t end) {
    return page_of(end + page_bytes() - 1);
}

bool is_same(const CUmemLocation& one, const CUmemLocation& other) {
    return one.type == other.type && one.id == other.id;
}

// The allocation or variable that a range lies in; null if there is none.
const Mapping* managed_around(const Client& client, uint64_t address, uint64_t size) {
    const Mapping* map = client.space.at(address);
    return map != nullptr && map->kind == MapKind::kManaged && size != 0 &&
                   size <= map->end - address
               ? map
               : nullptr;
}

// The location as the attributes tell it; the nearest node is always the first here.
CUresult check_location(const Client& client, CUmemLocation* location) {
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return client.device(location->id) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
        location->id = 0;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        *location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, {0}};
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return location->id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

} // namespace

std::shared_ptr<Phys> Client::make_managed(uint64_t begin, uint64_t size, Device* device) {
    if (!managed_file) {
        managed_file = Machine::make_managed_file();
    }
    return managed_file ? Machine::create_managed(managed_file.get(), begin, size, device, owner)
                        : nullptr;
}

void Client::map_managed(uint64_t piece, uint64_t address, uint64_t size, uint64_t context) {
    ManagedPiece& around = managed_pieces[piece];
    around.used[address - piece] = address - piece + size;
    Mapping mapping;
    mapping.kind = MapKind::kManaged;
    mapping.begin = address;
    mapping.end = address + size;
    mapping.phys = around.phys;
    mapping.offset = address - piece;
    mapping.context = context;
    mapping.id = ++next_id;
    mapping.readers = mapping.writers = ~0u;
    space.map(std::move(mapping));
}

int32_t Client::allocate_managed(uint64_t context, uint64_t size, uint64_t* address,
                                 uint64_t* need) {
    for (const auto& [begin, piece] : managed_pieces) {
        uint64_t at = 0;
        for (const auto& [offset, end] : piece.used) {
            if (offset - at >= size) {
                break;
            }
            at = (end + kSmallAlignment - 1) / kSmallAlignment * kSmallAlignment;
        }
        if (piece.variables && at + size <= piece.phys->size()) {
            *address = begin + at;
            map_managed(begin, *address, size, context);
            return CUDA_SUCCESS;
        }
    }
    *need = size | kForManaged;
    return kNeedAddresses;
}

void Client::release_managed(uint64_t address) {
    const auto piece = std::prev(managed_pieces.upper_bound(address));
    forget_managed_pages(address, space.at(address)->end);
    space.unmap(address);
    piece->second.used.erase(address - piece->first);
    if (piece->second.used.empty() && !piece->second.variables) {
        // Now: a thread that has done with it may hold it still when its addresses are used again.
        ::fallocate(managed_file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(piece->first),
                    static_cast<off_t>(piece->second.phys->size()));
        managed_pieces.erase(piece);
    }
}

void Client::each_managed_page(uint64_t begin, uint64_t end,
                               const std::function<void(ManagedPages&)>& change) {
    auto cut = [this](uint64_t at) {
        const auto next = managed_pages.upper_bound(at);
        if (next == managed_pages.begin()) {
            return;
        }
        const auto around = std::prev(next);
        if (around->first < at && at < around->second.end) {
            managed_pages.emplace(at, around->second);
            around->second.end = at;
        }
    };
    begin = page_of(begin);
    end = page_after(end);
    cut(begin);
    cut(end);
    while (begin < end) {
        const auto next = managed_pages.lower_bound(begin);
        if (next == managed_pages.end() || next->first > begin) {
            ManagedPages fresh;
            fresh.end = next == managed_pages.end() ? end : std::min(end, next->first);
            managed_pages.emplace(begin, fresh);
        }
        ManagedPages& pages = managed_pages[begin];
        change(pages);
        begin = pages.end;
    }
}

void Client::move_managed(uint64_t from, ManagedPages& pages, Device* to) {
    const uint64_t bytes = pages.end - from;
    if (pages.resident != nullptr) {
        pages.resident->managed -= bytes;
    }
    if (to != nullptr) {
        to->managed += bytes;
    }
    pages.resident = to;
}

// Measured: of neighbours on the same page as well.
void Client::forget_managed_pages(uint64_t begin, uint64_t end) {
    if (begin == 0 && end == UINT64_MAX) {
        for (auto& [at, pages] : managed_pages) {
            move_managed(at, pages, nullptr);
        }
        managed_pages.clear();
        return;
    }
    each_managed_page(begin, end, [](ManagedPages&) {});
    const auto first = managed_pages.lower_bound(page_of(begin));
    const auto last = managed_pages.lower_bound(page_after(end));
    for (auto at = first; at != last; ++at) {
        move_managed(at->first, at->second, nullptr);
    }
    managed_pages.erase(first, last);
}

int32_t op_ManagedAlloc(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto piece = s.in.take<uint64_t>();
    const auto piece_size = s.in.take<uint64_t>();
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    auto& phys = s.client.managed_pieces[piece].phys;
    if (phys == nullptr) {
        phys = s.client.make_managed(piece, piece_size, context->device);
    }
    if (phys == nullptr) {
        s.client.managed_pieces.erase(piece);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s.client.map_managed(piece, address, size, context->handle);
    s.fd_out = s.client.managed_file.get();
    return CUDA_SUCCESS;
}

int32_t op_ManagedPiece(Session& s) {
    const auto begin = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    if (size == 0) { // taken back
        s.client.managed_pieces.erase(begin);
        return CUDA_SUCCESS;
    }
    auto phys = s.client.make_managed(begin, size, s.client.device(0));
    if (phys == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ManagedPiece& piece = s.client.managed_pieces[begin];
    piece.variables = true;
    piece.phys = std::move(phys);
    s.fd_out = s.client.managed_file.get();
    return CUDA_SUCCESS;
}

// The kernels of any context may use it.
int32_t free_managed(Session& s, uint64_t address) {
    auto ours = [&] {
        const Mapping* map = s.client.space.at(address);
        return map != nullptr && map->begin == address && map->kind == MapKind::kManaged &&
               !std::prev(s.client.managed_pieces.upper_bound(address))->second.variables;
    };
    if (!ours()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto contexts = s.client.contexts;
    for (const auto& [handle, context] : contexts) {
        if (const CUresult r = s.wait_idle(*context); r != CUDA_SUCCESS) {
            return r;
        }
    }
    if (!ours()) {
        return CUDA_ERROR_INVALID_VALUE; // another thread freed it meanwhile
    }
    s.client.release(address);
    return CUDA_SUCCESS;
}

int32_t op_ManagedPrefetch(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    auto location = s.in.take<CUmemLocation>();
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return s.breaks_capture(*stream);
    }
    const Mapping* map = managed_around(s.client, address, size);
    if (map == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = check_location(s.client, &location); r != CUDA_SUCCESS) {
        return r;
    }
    s.client.each_managed_page(address, address + size,
                               [&](ManagedPages& pages) { pages.prefetched = location; });
    Device* to =
        location.type == CU_MEM_LOCATION_TYPE_DEVICE ? s.client.device(location.id) : nullptr;
    submit(s.client, stream, [self = s.client.shared_from_this(), address, size, id = map->id, to] {
        std::lock_guard<std::mutex> guard(self->mutex);
        const Mapping* now = managed_around(*self, address, size);
        if (now == nullptr || now->id != id) {
            return;
        }
        uint64_t at = page_of(address);
        self->each_managed_page(address, address + size, [&](ManagedPages& pages) {
            if (to != nullptr || !pages.read_mostly) { // which the host has a copy of
                self->move_managed(at, pages, to);
            }
            at = pages.end;
        });
    });
    return CUDA_SUCCESS;
}

int32_t op_ManagedAdvise(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto advice = s.in.take<int32_t>();
    auto location = s.in.take<CUmemLocation>();
    if (s.context(&error) == nullptr) {
        return error;
    }
    if (managed_around(s.client, address, size) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::function<void(ManagedPages&)> change;
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        change = [=](ManagedPages& pages) {
            pages.read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
        };
        break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        change = [](ManagedPages& pages) { pages.preferred = {}; };
        break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        error = check_location(s.client, &location);
        change = [&](ManagedPages& pages) { pages.preferred = location; };
        break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY: {
        if (location.type != CU_MEM_LOCATION_TYPE_DEVICE &&
            location.type != CU_MEM_LOCATION_TYPE_HOST) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        error = check_location(s.client, &location);
        const Device* device =
            location.type == CU_MEM_LOCATION_TYPE_DEVICE ? s.client.device(location.id) : nullptr;
        const uint32_t bit = device != nullptr ? 1u << device->index : ManagedPages::kHostBit;
        change = [=](ManagedPages& pages) {
            pages.accessed_by = advice == CU_MEM_ADVISE_SET_ACCESSED_BY ? pages.accessed_by | bit
                                                                        : pages.accessed_by & ~bit;
        };
        break;
    }
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (error == CUDA_SUCCESS) {
        s.client.each_managed_page(address, address + size, change);
    }
    return error;
}

// All of it at once: what a range attribute tells is made of it by the library.
int32_t op_ManagedAttribute(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    if (s.context(&error) == nullptr) {
        return error;
    }
    if (managed_around(s.client, address, size) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool first = true;
    ManagedPages all;
    s.client.each_managed_page(address, address + size, [&](ManagedPages& pages) {
        if (first) {
            all = pages;
            first = false;
        }
        all.read_mostly &= pages.read_mostly;
        all.accessed_by &= pages.accessed_by;
        all.preferred = is_same(all.preferred, pages.preferred) ? all.preferred : CUmemLocation{};
        all.prefetched =
            is_same(all.prefetched, pages.prefetched) ? all.prefetched : CUmemLocation{};
    });
    s.out.put(uint8_t{all.read_mostly});
    s.out.put(all.preferred);
    s.out.put(all.prefetched);
    std::vector<int32_t> accessed;
    for (size_t i = 0; i < s.client.visible.size(); ++i) {
        if ((all.accessed_by >> s.client.visible[i] & 1) != 0) {
            accessed.push_back(static_cast<int32_t>(i));
        }
    }
    if ((all.accessed_by & ManagedPages::kHostBit) != 0) {
        accessed.push_back(CU_DEVICE_CPU);
    }
    s.out.put_blob(accessed.data(), accessed.size() * sizeof(int32_t));
    return CUDA_SUCCESS;
}

// An attachment says nothing to devices that reach managed memory at any time.
int32_t op_ManagedAttach(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto flags = s.in.take<uint32_t>();
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (stream->capture != nullptr) {
        return s.breaks_capture(*stream);
    }
    const Mapping* map = s.client.space.at(address);
    const bool known = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST ||
                       (flags == CU_MEM_ATTACH_SINGLE && stream != stream->context->null_stream);
    if (!known || map == nullptr || map->kind != MapKind::kManaged || map->begin != address ||
        (size != 0 && size != map->size())) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
