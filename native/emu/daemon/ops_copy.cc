// Copies and memsets.
#include "graph.h"

#include <algorithm>
#include <sys/uio.h>
#include <thread>

namespace flowgpu::emu {

namespace {

// process_vm_readv or process_vm_writev, until all is copied.
bool copy_client(decltype(::process_vm_readv) move, pid_t pid, uint64_t address, uint8_t* here,
                 uint64_t size) {
    constexpr uint64_t kPiece = 256ull << 20;
    while (size > 0) {
        const uint64_t piece = std::min(size, kPiece);
        const iovec local{here, piece};
        const iovec remote{reinterpret_cast<void*>(address), piece};
        const ssize_t got = move(pid, &local, 1, &remote, 1, 0);
        if (got <= 0) {
            return false;
        }
        here += got;
        address += static_cast<uint64_t>(got);
        size -= static_cast<uint64_t>(got);
    }
    return true;
}

} // namespace

bool read_client(pid_t pid, uint64_t address, uint8_t* to, uint64_t size) {
    return copy_client(::process_vm_readv, pid, address, to, size);
}

bool write_client(pid_t pid, uint64_t address, const uint8_t* from, uint64_t size) {
    return copy_client(::process_vm_writev, pid, address, const_cast<uint8_t*>(from), size);
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
    uint64_t address = 0; // in `array`, if there is one
    uint64_t pitch = 0;   // bytes from row to row
    uint64_t slice = 0;   // bytes from slice to slice
    std::shared_ptr<Phys> array;

    uint64_t at(uint64_t z, uint64_t y) const { return address + z * slice + y * pitch; }
};

struct Copy {
    End dst;
    End src;
    uint64_t width = 0;
    uint64_t height = 1;
    uint64_t depth = 1;

    uint64_t bytes() const { return width * height * depth; }
    // f(z, y) for every row, in order, as long as it answers CUDA_SUCCESS.
    template <class F> CUresult each_row(F f) const {
        for (uint64_t z = 0; z < depth; ++z) {
            for (uint64_t y = 0; y < height; ++y) {
                if (const CUresult r = f(z, y); r != CUDA_SUCCESS) {
                    return r;
                }
            }
        }
        return CUDA_SUCCESS;
    }
};

// Registered host memory has an address of the device too, the same; managed memory is both.
bool device_side(const Client& client, MemSide side, uint64_t address) {
    return client.space.is_device_address(address) || client.space.is_managed(address)
               ? side != MemSide::kHost
           : side == MemSide::kDevice ? client.host_range(address, 1) == nullptr
                                      : false;
}

// Copies between contexts of two devices need no peer access: any device that may touch it will do.
constexpr uint32_t kAnyDevice = ~0u;

// The memory of a row of an end inside the device.
bool resolve(const View& view, const End& end, uint64_t address, uint64_t width, bool write,
             std::vector<Segment>* out) {
    if (end.array != nullptr) { // its bounds were checked
        out->push_back({end.array->host() + address, width});
        return true;
    }
    return view.resolve(address, width, kAnyDevice, write, out);
}

bool check_end(Client& client, const View& view, MemSide side, End* end, const Copy& copy,
               bool write) {
    if (end->array != nullptr) {
        return true;
    }
    end->device = device_side(client, side, end->address);
    const uint64_t span = end->at(copy.depth - 1, copy.height - 1) - end->address + copy.width;
    if (!end->device) {
        // An address that only the device can follow is no host address.
        if (client.space.is_device_address(end->address)) {
            return false;
        }
        end->pinned = client.host_range(end->address, span) != nullptr;
        return end->pinned || side != MemSide::kDevice;
    }
    std::vector<Segment> segments;
    return copy.each_row([&](uint64_t z, uint64_t y) {
        segments.clear();
        return resolve(view, *end, end->at(z, y), copy.width, write, &segments)
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_INVALID_VALUE;
    }) == CUDA_SUCCESS;
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
CUresult copy_row(Client& client, const View& view, const Copy& copy, uint64_t z, uint64_t y) {
    std::vector<Segment> to;
    std::vector<Segment> from;
    const End& dst = copy.dst;
    const End& src = copy.src;
    const uint64_t width = copy.width;
    uint64_t dst_address = dst.at(z, y);
    uint64_t src_address = src.at(z, y);
    if ((dst.device && !resolve(view, dst, dst_address, width, true, &to)) ||
        (src.device && !resolve(view, src, src_address, width, false, &from))) {
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

std::shared_ptr<const View> view_now(Client& client) {
    std::lock_guard<std::mutex> guard(client.mutex);
    return client.space.view();
}

CUresult carry_out(Client& client, const Copy& copy) {
    const auto view = view_now(client);
    return copy.each_row(
        [&](uint64_t z, uint64_t y) { return copy_row(client, *view, copy, z, y); });
}

// A copy from pageable host memory lets its caller change the source at once, so it is read now.
TicketRef submit_staged(Session& s, const std::shared_ptr<Stream>& stream, const Copy& copy,
                        std::vector<uint8_t> staged) {
    auto self = s.client.shared_from_this();
    return submit(s.client, stream,
                  [self, copy, context = stream->context, staged = std::move(staged)] {
                      copy_delay(*self->machine);
                      const auto view = view_now(*self);
                      const uint8_t* from = staged.data();
                      const CUresult r = copy.each_row([&](uint64_t z, uint64_t y) {
                          std::vector<Segment> to;
                          if (!resolve(*view, copy.dst, copy.dst.at(z, y), copy.width, true, &to)) {
                              return CUDA_ERROR_ILLEGAL_ADDRESS;
                          }
                          for (const Segment& segment : to) {
                              std::memcpy(segment.host, from, segment.size);
                              from += segment.size;
                          }
                          return CUDA_SUCCESS;
                      });
                      if (r != CUDA_SUCCESS) {
                          context->sticky = r;
                      }
                  });
}

bool stage(const Client& client, const Copy& copy, std::vector<uint8_t>* staged) {
    staged->resize(copy.bytes());
    uint8_t* to = staged->data();
    return copy.each_row([&](uint64_t z, uint64_t y) {
        const bool read = read_client(client.pid, copy.src.at(z, y), to, copy.width);
        to += copy.width;
        return read ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }) == CUDA_SUCCESS;
}

CUmemorytype memory_type(MemSide side) {
    return side == MemSide::kHost     ? CU_MEMORYTYPE_HOST
           : side == MemSide::kDevice ? CU_MEMORYTYPE_DEVICE
                                      : CU_MEMORYTYPE_UNIFIED;
}

MemSide side_of(CUmemorytype type) {
    return type == CU_MEMORYTYPE_HOST     ? MemSide::kHost
           : type == CU_MEMORYTYPE_DEVICE ? MemSide::kDevice
                                          : MemSide::kUnified;
}

void set_source(CUDA_MEMCPY3D_v2& what, uint64_t address) {
    if (what.srcMemoryType == CU_MEMORYTYPE_HOST) {
        what.srcHost = reinterpret_cast<const void*>(address);
    } else {
        what.srcDevice = address;
    }
}

void set_target(CUDA_MEMCPY3D_v2& what, uint64_t address) {
    if (what.dstMemoryType == CU_MEMORYTYPE_HOST) {
        what.dstHost = reinterpret_cast<void*>(address);
    } else {
        what.dstDevice = address;
    }
}

// The copy as the parameters of a node: of memory, where it begins.
CUDA_MEMCPY3D_v2 described(const Copy& copy, const CUDA_MEMCPY3D_v2& asked) {
    CUDA_MEMCPY3D_v2 what{};
    what.srcMemoryType = asked.srcMemoryType;
    what.dstMemoryType = asked.dstMemoryType;
    if (asked.srcMemoryType == CU_MEMORYTYPE_ARRAY) {
        what.srcArray = asked.srcArray;
        what.srcXInBytes = asked.srcXInBytes;
        what.srcY = asked.srcY;
        what.srcZ = asked.srcZ;
    } else {
        set_source(what, copy.src.address);
        what.srcPitch = copy.src.pitch;
        what.srcHeight = asked.srcHeight;
    }
    if (asked.dstMemoryType == CU_MEMORYTYPE_ARRAY) {
        what.dstArray = asked.dstArray;
        what.dstXInBytes = asked.dstXInBytes;
        what.dstY = asked.dstY;
        what.dstZ = asked.dstZ;
    } else {
        set_target(what, copy.dst.address);
        what.dstPitch = copy.dst.pitch;
        what.dstHeight = asked.dstHeight;
    }
    what.WidthInBytes = copy.width;
    what.Height = copy.height;
    what.Depth = copy.depth;
    return what;
}

// One end of CUDA_MEMCPY3D.
struct Corner {
    CUmemorytype type;
    uint64_t address, array, x, y, z, pitch, height, level;
    bool reserved;
};

Corner source_of(const CUDA_MEMCPY3D_v2& what) {
    return {what.srcMemoryType,
            what.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(what.srcHost)
                                                     : uint64_t{what.srcDevice},
            reinterpret_cast<uint64_t>(what.srcArray),
            what.srcXInBytes,
            what.srcY,
            what.srcZ,
            what.srcPitch,
            what.srcHeight,
            what.srcLOD,
            what.reserved0 != nullptr};
}

Corner target_of(const CUDA_MEMCPY3D_v2& what) {
    return {what.dstMemoryType,
            what.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(what.dstHost)
                                                     : uint64_t{what.dstDevice},
            reinterpret_cast<uint64_t>(what.dstArray),
            what.dstXInBytes,
            what.dstY,
            what.dstZ,
            what.dstPitch,
            what.dstHeight,
            what.dstLOD,
            what.reserved1 != nullptr};
}

bool inside(uint64_t at, uint64_t size, uint64_t whole) {
    return at <= whole && size <= whole - at;
}

bool place_in_array(const Client& client, const Corner& corner, const Copy& copy, End* end) {
    const auto array = client.find<Array>(corner.array);
    if (array == nullptr || !inside(corner.x, copy.width, array->row()) ||
        !inside(corner.y, copy.height, array->rows()) ||
        !inside(corner.z, copy.depth, array->slices())) {
        return false;
    }
    end->device = true;
    end->array = array->phys;
    end->pitch = array->row();
    end->slice = array->row() * array->rows();
    end->address = array->offset;
    end->address = end->at(corner.z, corner.y) + corner.x;
    return true;
}

bool place(const Client& client, const Corner& corner, const Copy& copy, End* end) {
    constexpr uint64_t kMost = uint64_t{1} << 46; // bytes
    if (corner.reserved || corner.level != 0) {
        return false;
    }
    if (corner.type == CU_MEMORYTYPE_ARRAY) {
        return place_in_array(client, corner, copy, end);
    }
    if (corner.type != CU_MEMORYTYPE_HOST && corner.type != CU_MEMORYTYPE_DEVICE &&
        corner.type != CU_MEMORYTYPE_UNIFIED) {
        return false;
    }
    const uint64_t height = corner.height != 0 ? corner.height : copy.height;
    end->pitch = corner.pitch != 0 ? corner.pitch : copy.width;
    if (end->pitch < copy.width || (copy.depth > 1 && height < copy.height) || end->pitch > kMost ||
        height > kMost / end->pitch || copy.height > kMost / end->pitch ||
        copy.depth > kMost / (end->pitch * std::max(height, copy.height))) {
        return false;
    }
    end->slice = height * end->pitch;
    end->address = corner.address + corner.z * end->slice + corner.y * end->pitch + corner.x;
    end->device = device_side(client, side_of(corner.type), end->address);
    return true;
}

// False for what has no meaning; a copy of nothing is not looked at.
bool read_copy(const Client& client, const CUDA_MEMCPY3D_v2& what, Copy* copy) {
    copy->width = what.WidthInBytes;
    copy->height = what.Height;
    copy->depth = what.Depth;
    return copy->width == 0 || copy->height == 0 || copy->depth == 0 ||
           (place(client, source_of(what), *copy, &copy->src) &&
            place(client, target_of(what), *copy, &copy->dst));
}

// The driver takes a number of the context for itself when it first copies an array there.
void note_arrays(Context& context, const Copy& copy) {
    if ((copy.dst.array != nullptr || copy.src.array != nullptr) && !context.copied_arrays) {
        context.copied_arrays = true;
        bind(context, {});
    }
}

int32_t start_copy(Session& s, const CUDA_MEMCPY3D_v2& what, Ordering ordering,
                   uint64_t stream_handle) {
    constexpr uint64_t kMostStaged = 64ull << 20;
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(stream_handle, &error);
    if (stream == nullptr) {
        return error;
    }
    if (ordering == Ordering::kSync) {
        error = stream->capture != nullptr ? s.breaks_capture(*stream) : s.unsafe_call();
        if (error != CUDA_SUCCESS) {
            return error;
        }
    }
    Copy copy;
    if (!read_copy(s.client, what, &copy)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (copy.bytes() == 0) {
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_MEMCPY;
        spec.fixed.copy = described(copy, what);
        return capture_node(s, *stream, std::move(spec));
    }
    const auto view = s.client.space.view();
    if (!check_end(s.client, *view, side_of(what.dstMemoryType), &copy.dst, copy, true) ||
        !check_end(s.client, *view, side_of(what.srcMemoryType), &copy.src, copy, false)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    note_arrays(*stream->context, copy);
    auto self = s.client.shared_from_this();
    const bool pageable =
        (!copy.dst.device && !copy.dst.pinned) || (!copy.src.device && !copy.src.pinned);
    const bool small_upload = copy.dst.device && copy.bytes() <= kMostStaged;
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

void fill_row(uint8_t* to, uint64_t size, uint32_t element, uint32_t value) {
    if (element == 1) {
        std::memset(to, static_cast<int>(value), size);
    } else if (element == 2) {
        std::fill_n(reinterpret_cast<uint16_t*>(to), size / 2, static_cast<uint16_t>(value));
    } else {
        std::fill_n(reinterpret_cast<uint32_t*>(to), size / 4, value);
    }
}

// What a memset writes: parts of rows in memory of the device, or rows of registered host memory.
struct Filled {
    std::vector<Segment> segments;
    std::vector<uint64_t> host; // where each row begins

    bool empty() const { return segments.empty() && host.empty(); }
};

bool find_filled(const Client& client, const View& view, const CUDA_MEMSET_NODE_PARAMS_v1& what,
                 Filled* filled) {
    const uint64_t element = what.elementSize;
    if (what.width > UINT64_MAX / element || what.dst % element != 0 ||
        (what.height > 1 && (what.pitch < what.width * element || what.pitch % element != 0))) {
        return false;
    }
    const uint64_t bytes = what.width * element;
    const bool device = device_side(client, MemSide::kDevice, what.dst);
    for (uint64_t row = 0; row < what.height && bytes > 0; ++row) {
        const uint64_t at = what.dst + row * what.pitch;
        if (device) {
            if (!view.resolve(at, bytes, kAnyDevice, true, &filled->segments)) {
                return false;
            }
        } else if (client.host_range(at, bytes) != nullptr) {
            filled->host.push_back(at);
        } else {
            return false;
        }
    }
    return true;
}

CUresult fill(const Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what, const Filled& filled) {
    for (const Segment& segment : filled.segments) {
        fill_row(segment.host, segment.size, what.elementSize, what.value);
    }
    const uint64_t bytes = what.width * what.elementSize;
    std::vector<uint8_t> pattern(filled.host.empty() ? 0 : std::min<uint64_t>(bytes, 1 << 20));
    fill_row(pattern.data(), pattern.size(), what.elementSize, what.value);
    for (const uint64_t row : filled.host) {
        for (uint64_t done = 0; done < bytes; done += pattern.size()) {
            const uint64_t piece = std::min<uint64_t>(bytes - done, pattern.size());
            if (!write_client(client.pid, row + done, pattern.data(), piece)) {
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            }
        }
    }
    return CUDA_SUCCESS;
}

} // namespace

int32_t check_copy(Client& client, const CUDA_MEMCPY3D_v2& what) {
    Copy copy;
    const auto view = client.space.view();
    return read_copy(client, what, &copy) && copy.bytes() != 0 &&
                   check_end(client, *view, side_of(what.dstMemoryType), &copy.dst, copy, true) &&
                   check_end(client, *view, side_of(what.srcMemoryType), &copy.src, copy, false)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

std::function<void()> copy_work(Client& client, const CUDA_MEMCPY3D_v2& what,
                                std::shared_ptr<Context> context) {
    Copy copy;
    const bool good = read_copy(client, what, &copy); // no more when its array is gone
    if (good) {
        note_arrays(*context, copy);
    }
    return [self = client.shared_from_this(), context = std::move(context), copy, good] {
        copy_delay(*self->machine);
        if (!good || carry_out(*self, copy) != CUDA_SUCCESS) {
            context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    };
}

int32_t check_fill(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what) {
    Filled filled;
    const bool known = what.elementSize == 1 || what.elementSize == 2 || what.elementSize == 4;
    return known && find_filled(client, *client.space.view(), what, &filled) && !filled.empty()
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

std::function<void()> fill_work(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what,
                                std::shared_ptr<Context> context) {
    return [self = client.shared_from_this(), context = std::move(context), what] {
        copy_delay(*self->machine);
        Filled filled;
        std::unique_lock<std::mutex> lock(self->mutex);
        const auto view = self->space.view(); // keeps the memory alive
        const bool found = find_filled(*self, *view, what, &filled);
        lock.unlock();
        if (!found || fill(*self, what, filled) != CUDA_SUCCESS) {
            context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    };
}

int32_t op_Memcpy(Session& s) {
    CUDA_MEMCPY3D_v2 what{};
    what.dstMemoryType = memory_type(s.in.take<MemSide>());
    set_target(what, s.in.take<uint64_t>());
    what.srcMemoryType = memory_type(s.in.take<MemSide>());
    set_source(what, s.in.take<uint64_t>());
    what.WidthInBytes = s.in.take<uint64_t>();
    what.Height = what.Depth = 1;
    const auto ordering = s.in.take<Ordering>();
    return start_copy(s, what, ordering, s.in.take<uint64_t>());
}

int32_t op_MemcpyShaped(Session& s) {
    const auto what = s.in.take<CUDA_MEMCPY3D_v2>();
    const auto ordering = s.in.take<Ordering>();
    return start_copy(s, what, ordering, s.in.take<uint64_t>());
}

int32_t op_Memset(Session& s) {
    const auto address = s.in.take<uint64_t>();
    const auto pitch = s.in.take<uint64_t>();
    const auto element = s.in.take<uint32_t>();
    const auto value = s.in.take<uint32_t>();
    const auto width = s.in.take<uint64_t>();
    const auto height = s.in.take<uint64_t>();
    const auto ordering = s.in.take<Ordering>();
    CUresult error = CUDA_SUCCESS;
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    CUDA_MEMSET_NODE_PARAMS_v1 what{address, pitch, value, element, width, height};
    const auto view = s.client.space.view();
    Filled filled;
    if (!find_filled(s.client, *view, what, &filled)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (filled.empty()) {
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_MEMSET;
        spec.fixed.fill = what;
        return capture_node(s, *stream, std::move(spec));
    }
    // Only what the host can read makes its caller wait.
    const bool waits = ordering == Ordering::kSync && !filled.host.empty();
    // The view keeps the memory alive, even if it is unmapped before its turn comes.
    auto run = [self = s.client.shared_from_this(), view, filled = std::move(filled), what,
                context = stream->context] {
        copy_delay(*self->machine);
        if (const CUresult r = fill(*self, what, filled); r != CUDA_SUCCESS) {
            context->sticky = r;
        }
    };
    if (waits) {
        run_and_wait(s, stream, run);
        return stream->context->sticky;
    }
    submit(s.client, stream, run);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
