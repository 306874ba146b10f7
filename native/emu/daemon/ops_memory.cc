// Allocations, host memory, pools, pointers, copies and memsets.
#include "state.h"

#include <algorithm>
#include <cerrno>
#include <sys/uio.h>
#include <thread>

namespace flowgpu::emu {

bool read_client(pid_t pid, uint64_t address, uint8_t* to, uint64_t size) {
    constexpr uint64_t kPiece = 256ull << 20;
    while (size > 0) {
        const uint64_t piece = std::min(size, kPiece);
        const iovec local{to, piece};
        const iovec remote{reinterpret_cast<void*>(address), piece};
        const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
        if (got <= 0) {
            return false;
        }
        to += got;
        address += static_cast<uint64_t>(got);
        size -= static_cast<uint64_t>(got);
    }
    return true;
}

bool write_client(pid_t pid, uint64_t address, const uint8_t* from, uint64_t size) {
    constexpr uint64_t kPiece = 256ull << 20;
    while (size > 0) {
        const uint64_t piece = std::min(size, kPiece);
        const iovec local{const_cast<uint8_t*>(from), piece};
        const iovec remote{reinterpret_cast<void*>(address), piece};
        const ssize_t got = ::process_vm_writev(pid, &local, 1, &remote, 1, 0);
        if (got <= 0) {
            return false;
        }
        from += got;
        address += static_cast<uint64_t>(got);
        size -= static_cast<uint64_t>(got);
    }
    return true;
}

namespace {

void copy_delay(const Machine& machine) {
    if (machine.config().copy_delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(machine.config().copy_delay_us));
    }
}

// One end of a copy: device segments, or an address of the client's host memory.
struct End {
    bool device = false;
    bool pinned = false;
    uint64_t address = 0;
    uint64_t pitch = 0;
};

struct Copy {
    End dst;
    End src;
    uint64_t width = 0;
    uint64_t height = 1;
    uint32_t device_bit = 0;
};

// Registered host memory has an address of the device too, the same.
bool device_side(const Client& client, MemSide side, uint64_t address) {
    return client.space.is_device_address(address) ? side != MemSide::kHost
           : side == MemSide::kDevice              ? client.host_range(address, 1) == nullptr
                                                   : false;
}

// Copies between contexts of two devices need no peer access: any device that may touch it will do.
constexpr uint32_t kAnyDevice = ~0u;

bool check_end(Client& client, const View& view, MemSide side, End* end, uint64_t width,
               uint64_t height, bool write) {
    end->device = device_side(client, side, end->address);
    const uint64_t span = (height - 1) * end->pitch + width;
    if (!end->device) {
        // An address that only the device can follow is no host address.
        if (client.space.is_device_address(end->address)) {
            return false;
        }
        end->pinned = client.host_range(end->address, span) != nullptr;
        return end->pinned || side != MemSide::kDevice;
    }
    std::vector<Segment> segments;
    for (uint64_t row = 0; row < height; ++row) {
        segments.clear();
        if (!view.resolve(end->address + row * end->pitch, width, kAnyDevice, write, &segments)) {
            return false;
        }
    }
    return true;
}

// In pieces: a size that makes no sense must not become memory of the device's process.
CUresult copy_host(pid_t pid, uint64_t dst, uint64_t src, uint64_t size) {
    std::vector<uint8_t> buffer(std::min<uint64_t>(size, 1 << 20));
    for (uint64_t done = 0; done < size; done += buffer.size()) {
        buffer.resize(std::min<uint64_t>(size - done, buffer.size()));
        if (!read_client(pid, src + done, buffer.data(), buffer.size()) ||
            !write_client(pid, dst + done, buffer.data(), buffer.size())) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

// Carries out one row. The view is the one of now: what was unmapped meanwhile is a fault.
CUresult copy_row(Client& client, const View& view, const End& dst, const End& src, uint64_t row,
                  uint64_t width) {
    std::vector<Segment> to;
    std::vector<Segment> from;
    uint64_t dst_address = dst.address + row * dst.pitch;
    uint64_t src_address = src.address + row * src.pitch;
    if ((dst.device && !view.resolve(dst_address, width, kAnyDevice, true, &to)) ||
        (src.device && !view.resolve(src_address, width, kAnyDevice, false, &from))) {
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (!dst.device && !src.device) {
        return copy_host(client.pid, dst_address, src_address, width);
    }
    if (!src.device) {
        for (const Segment& segment : to) {
            if (!read_client(client.pid, src_address, segment.host, segment.size)) {
                return CUDA_ERROR_INVALID_VALUE;
            }
            src_address += segment.size;
        }
        return CUDA_SUCCESS;
    }
    if (!dst.device) {
        for (const Segment& segment : from) {
            if (!write_client(client.pid, dst_address, segment.host, segment.size)) {
                return CUDA_ERROR_INVALID_VALUE;
            }
            dst_address += segment.size;
        }
        return CUDA_SUCCESS;
    }
    for (size_t t = 0, f = 0; t < to.size() && f < from.size();) {
        const uint64_t piece = std::min(to[t].size, from[f].size);
        std::memmove(to[t].host, from[f].host, piece);
        to[t] = {to[t].host + piece, to[t].size - piece};
        from[f] = {from[f].host + piece, from[f].size - piece};
        t += to[t].size == 0 ? 1 : 0;
        f += from[f].size == 0 ? 1 : 0;
    }
    return CUDA_SUCCESS;
}

CUresult carry_out(Client& client, const Copy& copy) {
    std::shared_ptr<const View> view;
    {
        std::lock_guard<std::mutex> guard(client.mutex);
        view = client.space.view();
    }
    for (uint64_t row = 0; row < copy.height; ++row) {
        const CUresult r = copy_row(client, *view, copy.dst, copy.src, row, copy.width);
        if (r != CUDA_SUCCESS) {
            return r;
        }
    }
    return CUDA_SUCCESS;
}

// A copy from pageable host memory lets its caller change the source at once, so it is read now.
TicketRef submit_staged(Session& s, const std::shared_ptr<Stream>& stream, const Copy& copy,
                        std::vector<uint8_t> staged) {
    auto self = s.client.shared_from_this();
    return submit(s.client, stream,
                  [self, copy, context = stream->context, staged = std::move(staged)] {
                      copy_delay(*self->machine);
                      std::shared_ptr<const View> view;
                      {
                          std::lock_guard<std::mutex> guard(self->mutex);
                          view = self->space.view();
                      }
                      const uint8_t* from = staged.data();
                      for (uint64_t row = 0; row < copy.height; ++row) {
                          std::vector<Segment> to;
                          if (!view->resolve(copy.dst.address + row * copy.dst.pitch, copy.width,
                                             kAnyDevice, true, &to)) {
                              context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
                              return;
                          }
                          for (const Segment& segment : to) {
                              std::memcpy(segment.host, from, segment.size);
                              from += segment.size;
                          }
                      }
                  });
}

bool stage(const Client& client, const Copy& copy, std::vector<uint8_t>* staged) {
    staged->resize(copy.width * copy.height);
    for (uint64_t row = 0; row < copy.height; ++row) {
        if (!read_client(client.pid, copy.src.address + row * copy.src.pitch,
                         staged->data() + row * copy.width, copy.width)) {
            return false;
        }
    }
    return true;
}

int32_t start_copy(Session& s, Copy copy, MemSide to, MemSide from, Ordering ordering,
                   uint64_t stream_handle) {
    constexpr uint64_t kMostStaged = 64ull << 20;
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(stream_handle, &error);
    if (stream == nullptr) {
        return error;
    }
    if (copy.width == 0 || copy.height == 0) {
        return CUDA_SUCCESS;
    }
    const auto view = s.client.space.view();
    if (!check_end(s.client, *view, to, &copy.dst, copy.width, copy.height, true) ||
        !check_end(s.client, *view, from, &copy.src, copy.width, copy.height, false)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto self = s.client.shared_from_this();
    const bool pageable =
        (!copy.dst.device && !copy.dst.pinned) || (!copy.src.device && !copy.src.pinned);
    const bool small_upload = copy.dst.device && copy.width * copy.height <= kMostStaged;
    if (ordering == Ordering::kAsync && pageable && small_upload && !stream->idle()) {
        std::vector<uint8_t> staged;
        if (!stage(s.client, copy, &staged)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        submit_staged(s, stream, copy, std::move(staged));
        return CUDA_SUCCESS;
    }
    auto result = std::make_shared<std::atomic<int>>(CUDA_SUCCESS);
    auto run = [self, copy, result, context = stream->context] {
        copy_delay(*self->machine);
        const CUresult r = carry_out(*self, copy);
        *result = r;
        if (r == CUDA_ERROR_ILLEGAL_ADDRESS) {
            context->sticky = r;
        }
    };
    const bool between_devices = copy.dst.device && copy.src.device;
    if (ordering == Ordering::kSync || pageable) {
        // As with the real driver, a copy inside the device does not make its caller wait.
        if (between_devices) {
            submit(s.client, stream, run);
            return CUDA_SUCCESS;
        }
        run_and_wait(s, stream, run);
        const int sticky = stream->context->sticky;
        return sticky != CUDA_SUCCESS ? sticky : result->load();
    }
    submit(s.client, stream, run);
    return CUDA_SUCCESS;
}

void fill_row(const std::vector<Segment>& segments, uint32_t element, uint32_t value) {
    for (const Segment& segment : segments) {
        if (element == 1) {
            std::memset(segment.host, static_cast<int>(value), segment.size);
        } else if (element == 2) {
            auto* at = reinterpret_cast<uint16_t*>(segment.host);
            std::fill_n(at, segment.size / 2, static_cast<uint16_t>(value));
        } else {
            std::fill_n(reinterpret_cast<uint32_t*>(segment.host), segment.size / 4, value);
        }
    }
}

} // namespace

int32_t op_Memcpy(Session& s) {
    Copy copy;
    const auto to = s.in.take<MemSide>();
    copy.dst.address = s.in.take<uint64_t>();
    const auto from = s.in.take<MemSide>();
    copy.src.address = s.in.take<uint64_t>();
    copy.width = s.in.take<uint64_t>();
    const auto ordering = s.in.take<Ordering>();
    return start_copy(s, copy, to, from, ordering, s.in.take<uint64_t>());
}

int32_t op_Memcpy2D(Session& s) {
    Copy copy;
    const auto to = s.in.take<MemSide>();
    copy.dst.address = s.in.take<uint64_t>();
    copy.dst.pitch = s.in.take<uint64_t>();
    const auto from = s.in.take<MemSide>();
    copy.src.address = s.in.take<uint64_t>();
    copy.src.pitch = s.in.take<uint64_t>();
    copy.width = s.in.take<uint64_t>();
    copy.height = s.in.take<uint64_t>();
    const auto ordering = s.in.take<Ordering>();
    return start_copy(s, copy, to, from, ordering, s.in.take<uint64_t>());
}

int32_t op_Memset(Session& s) {
    const auto address = s.in.take<uint64_t>();
    const auto pitch = s.in.take<uint64_t>();
    const auto element = s.in.take<uint32_t>();
    const auto value = s.in.take<uint32_t>();
    const auto width = s.in.take<uint64_t>();
    const auto height = s.in.take<uint64_t>();
    s.in.take<Ordering>(); // a memset never makes its caller wait
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (width > UINT64_MAX / element || address % element != 0 ||
        (height > 1 && (pitch < width * element || pitch % element != 0))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t bytes = width * element;
    const auto view = s.client.space.view();
    std::vector<Segment> segments;
    for (uint64_t row = 0; row < height && bytes > 0; ++row) {
        if (!view->resolve(address + row * pitch, bytes, kAnyDevice, true, &segments)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (segments.empty()) {
        return CUDA_SUCCESS;
    }
    // The view keeps the memory alive, even if it is unmapped before its turn comes.
    submit(
        s.client, stream,
        [self = s.client.shared_from_this(), view, segments = std::move(segments), element, value] {
            copy_delay(*self->machine);
            fill_row(segments, element, value);
        });
    return CUDA_SUCCESS;
}

int32_t op_MemGetInfo(Session& s) {
    CUresult error = CUDA_SUCCESS;
    if (const auto context = s.context(&error)) {
        s.out.put(context->device->total - context->device->used.load());
        s.out.put(context->device->total);
    }
    return error;
}

int32_t op_MemAlloc(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto size = s.in.take<uint64_t>();
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    uint64_t address = 0;
    uint64_t bytes = 0;
    const int32_t r = s.client.allocate(*context, MapKind::kAlloc, size, &address, &bytes);
    if (r == kNeedAddresses) {
        return s.need(bytes);
    }
    s.out.put(address);
    return r;
}

int32_t op_MemFree(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto context = s.context(&error);
    if (context == nullptr || address == 0) {
        return error;
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr || map->begin != address || map->kind != MapKind::kAlloc) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // Freeing waits for the device: a kernel that still uses the memory ends first.
    const auto owner = s.client.find<Context>(map->context);
    if (owner != nullptr) {
        if (const CUresult r = s.wait_idle(*owner); r != CUDA_SUCCESS) {
            return r;
        }
    }
    map = s.client.space.at(address);
    if (map == nullptr || map->begin != address) {
        return CUDA_ERROR_INVALID_VALUE; // another thread freed it meanwhile
    }
    s.client.release(address);
    return CUDA_SUCCESS;
}

int32_t op_MemAllocAsync(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto size = s.in.take<uint64_t>();
    const auto pool = s.in.take<uint64_t>();
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    const auto from = s.client.find<Pool>(pool);
    if (pool != 0 && (from == nullptr || from->device != stream->context->device->index)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t address = 0;
    uint64_t bytes = 0;
    const int32_t r = s.client.allocate(*stream->context, MapKind::kAlloc, size, &address, &bytes);
    if (r == kNeedAddresses) {
        return s.need(bytes);
    }
    if (r == CUDA_SUCCESS) {
        s.client.space.maps.find(address)->second.pooled = true;
    }
    s.out.put(address);
    return r;
}

int32_t op_MemFreeAsync(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto stream = s.stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    if (address == 0) {
        return CUDA_SUCCESS;
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr || map->begin != address || map->kind != MapKind::kAlloc) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    submit(s.client, stream, [self = s.client.shared_from_this(), address] {
        std::lock_guard<std::mutex> guard(self->mutex);
        self->release(address);
    });
    return CUDA_SUCCESS;
}

int32_t op_MemAddressRange(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    if (s.context(&error) == nullptr) {
        return error;
    }
    const Mapping* map = s.client.space.at(address);
    if (map == nullptr) {
        return CUDA_ERROR_NOT_FOUND;
    }
    s.out.put(map->begin);
    s.out.put(map->size());
    return CUDA_SUCCESS;
}

namespace {

template <class T> int32_t answer(Session& s, T value) {
    s.out.put_blob(&value, sizeof value);
    return CUDA_SUCCESS;
}

int32_t host_attribute(Session& s, int key, uint64_t address, uint64_t begin, uint64_t size) {
    switch (key) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return answer(s, static_cast<uint32_t>(CU_MEMORYTYPE_HOST));
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return answer(s, address);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return answer(s, begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return answer(s, size);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return answer(s, uint8_t{0});
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        return answer(s, uint64_t{0});
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return answer(s, uint8_t{1});
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

int32_t device_attribute(Session& s, int key, uint64_t address, const Mapping& map) {
    const int device = s.client.ordinal(*map.phys->device());
    switch (key) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return answer(s, map.context);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return answer(s, static_cast<uint32_t>(CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        return answer(s, address);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return answer(s, map.id);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return answer(s, device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return answer(s, map.begin);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return answer(s, map.size());
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return answer(s, uint8_t{1});
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        return answer(s, uint8_t{0});
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: {
        const auto handle = s.client.find<MemHandle>(map.handle);
        return answer(s, uint64_t{handle != nullptr ? handle->handle_types : 0});
    }
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        return answer(s, uint32_t{(map.writers >> device & 1) != 0
                                      ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                                  : (map.readers >> device & 1) != 0
                                      ? CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ
                                      : CU_POINTER_ATTRIBUTE_ACCESS_FLAG_NONE});
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return answer(s,
                      map.pooled ? s.client.default_pools[map.phys->device()->index] : uint64_t{0});
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

} // namespace

int32_t op_PointerAttribute(Session& s) {
    const auto key = s.in.take<int32_t>();
    const auto address = s.in.take<uint64_t>();
    if (const Mapping* map = s.client.space.at(address)) {
        return device_attribute(s, key, address, *map);
    }
    const auto& ranges = s.client.host_ranges;
    const auto next = ranges.upper_bound(address);
    if (next != ranges.begin()) {
        const auto& [begin, range] = *std::prev(next);
        if (address < begin + range.size) {
            return host_attribute(s, key, address, begin, range.size);
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

int32_t op_HostRegister(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const auto size = s.in.take<uint64_t>();
    const auto flags = s.in.take<uint32_t>();
    const auto owned = s.in.take<uint8_t>();
    if (s.context(&error) == nullptr) {
        return error;
    }
    auto& ranges = s.client.host_ranges;
    const auto next = ranges.lower_bound(address);
    if ((next != ranges.end() && next->first < address + size) ||
        (next != ranges.begin() &&
         std::prev(next)->first + std::prev(next)->second.size > address)) {
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    uint8_t probe;
    if (!read_client(s.client.pid, address, &probe, 1) ||
        !read_client(s.client.pid, address + size - 1, &probe, 1)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    ranges[address] = {size, flags, owned != 0};
    return CUDA_SUCCESS;
}

int32_t op_HostUnregister(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto address = s.in.take<uint64_t>();
    const bool owned = s.in.take<uint8_t>() != 0;
    const auto found = s.client.host_ranges.find(address);
    if (found == s.client.host_ranges.end()) {
        return owned ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    if (found->second.owned != owned) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = s.wait_idle(*context); r != CUDA_SUCCESS) {
        return r;
    }
    s.client.host_ranges.erase(address);
    return CUDA_SUCCESS;
}

int32_t op_HostFlags(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const HostRange* range = s.client.host_range(s.in.take<uint64_t>(), 1);
    if (s.context_by(0, &error) == nullptr) {
        return error;
    }
    if (range == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(range->flags | CU_MEMHOSTALLOC_DEVICEMAP);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
