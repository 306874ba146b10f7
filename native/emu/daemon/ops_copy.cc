// Copies and memsets.
#include "graph.h"

#include <algorithm>
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

std::shared_ptr<const View> view_now(Client& client) {
    std::lock_guard<std::mutex> guard(client.mutex);
    return client.space.view();
}

CUresult carry_out(Client& client, const Copy& copy) {
    const auto view = view_now(client);
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
                      const auto view = view_now(*self);
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

// The copy as the parameters of a node.
CUDA_MEMCPY3D_v2 described(const Copy& copy, MemSide to, MemSide from) {
    CUDA_MEMCPY3D_v2 what{};
    what.srcMemoryType = memory_type(from);
    what.dstMemoryType = memory_type(to);
    if (from == MemSide::kHost) {
        what.srcHost = reinterpret_cast<const void*>(copy.src.address);
    } else {
        what.srcDevice = copy.src.address;
    }
    if (to == MemSide::kHost) {
        what.dstHost = reinterpret_cast<void*>(copy.dst.address);
    } else {
        what.dstDevice = copy.dst.address;
    }
    what.srcPitch = copy.src.pitch;
    what.dstPitch = copy.dst.pitch;
    what.WidthInBytes = copy.width;
    what.Height = copy.height;
    what.Depth = 1;
    return what;
}

// The other way, a slice each; none for what has no meaning.
std::vector<Copy> slices(const Client& client, const CUDA_MEMCPY3D_v2& what) {
    std::vector<Copy> out;
    const uint64_t src_pitch = what.srcPitch != 0 ? what.srcPitch : what.WidthInBytes;
    const uint64_t dst_pitch = what.dstPitch != 0 ? what.dstPitch : what.WidthInBytes;
    const uint64_t src_height = what.srcHeight != 0 ? what.srcHeight : what.Height;
    const uint64_t dst_height = what.dstHeight != 0 ? what.dstHeight : what.Height;
    constexpr uint64_t kMost = uint64_t{1} << 46; // bytes
    if (what.WidthInBytes == 0 || what.Height == 0 || what.Depth == 0 ||
        src_pitch < what.WidthInBytes || dst_pitch < what.WidthInBytes ||
        (what.Depth > 1 && (src_height < what.Height || dst_height < what.Height)) ||
        what.Height > kMost / src_pitch || what.Depth > kMost / (src_pitch * what.Height)) {
        return out;
    }
    const auto source = what.srcMemoryType == CU_MEMORYTYPE_HOST
                            ? reinterpret_cast<uint64_t>(what.srcHost)
                            : uint64_t{what.srcDevice};
    const auto target = what.dstMemoryType == CU_MEMORYTYPE_HOST
                            ? reinterpret_cast<uint64_t>(what.dstHost)
                            : uint64_t{what.dstDevice};
    Copy copy;
    copy.src.pitch = src_pitch;
    copy.dst.pitch = dst_pitch;
    copy.width = what.WidthInBytes;
    copy.height = what.Height;
    for (uint64_t z = 0; z < what.Depth; ++z) {
        copy.src.address =
            source + what.srcXInBytes + ((what.srcZ + z) * src_height + what.srcY) * src_pitch;
        copy.dst.address =
            target + what.dstXInBytes + ((what.dstZ + z) * dst_height + what.dstY) * dst_pitch;
        copy.src.device = device_side(client, side_of(what.srcMemoryType), copy.src.address);
        copy.dst.device = device_side(client, side_of(what.dstMemoryType), copy.dst.address);
        out.push_back(copy);
    }
    return out;
}

int32_t start_copy(Session& s, Copy copy, MemSide to, MemSide from, Ordering ordering,
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
    if (copy.width == 0 || copy.height == 0) {
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_MEMCPY;
        spec.fixed.copy = described(copy, to, from);
        return capture_node(s, *stream, std::move(spec));
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

bool fill_segments(const View& view, const CUDA_MEMSET_NODE_PARAMS_v1& what,
                   std::vector<Segment>* segments) {
    const uint64_t element = what.elementSize;
    if (what.width > UINT64_MAX / element || what.dst % element != 0 ||
        (what.height > 1 && (what.pitch < what.width * element || what.pitch % element != 0))) {
        return false;
    }
    const uint64_t bytes = what.width * element;
    for (uint64_t row = 0; row < what.height && bytes > 0; ++row) {
        if (!view.resolve(what.dst + row * what.pitch, bytes, kAnyDevice, true, segments)) {
            return false;
        }
    }
    return true;
}

} // namespace

int32_t check_copy(Client& client, const CUDA_MEMCPY3D_v2& what) {
    if (what.srcMemoryType == CU_MEMORYTYPE_ARRAY || what.dstMemoryType == CU_MEMORYTYPE_ARRAY) {
        client.machine->count_unsupported("memcpy nodes of arrays");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    std::vector<Copy> copies = slices(client, what);
    const auto view = client.space.view();
    for (Copy& copy : copies) {
        if (!check_end(client, *view, side_of(what.dstMemoryType), &copy.dst, copy.width,
                       copy.height, true) ||
            !check_end(client, *view, side_of(what.srcMemoryType), &copy.src, copy.width,
                       copy.height, false)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return copies.empty() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

std::function<void()> copy_work(Client& client, const CUDA_MEMCPY3D_v2& what,
                                std::shared_ptr<Context> context) {
    return [self = client.shared_from_this(), context = std::move(context),
            copies = slices(client, what)] {
        copy_delay(*self->machine);
        for (const Copy& copy : copies) {
            if (carry_out(*self, copy) != CUDA_SUCCESS) {
                context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
                return;
            }
        }
    };
}

int32_t check_fill(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what) {
    std::vector<Segment> segments;
    const bool known = what.elementSize == 1 || what.elementSize == 2 || what.elementSize == 4;
    return known && fill_segments(*client.space.view(), what, &segments) && !segments.empty()
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

std::function<void()> fill_work(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what,
                                std::shared_ptr<Context> context) {
    return [self = client.shared_from_this(), context = std::move(context), what] {
        copy_delay(*self->machine);
        std::vector<Segment> segments;
        const auto view = view_now(*self); // keeps the memory alive
        if (fill_segments(*view, what, &segments)) {
            fill_row(segments, what.elementSize, what.value);
        } else {
            context->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    };
}

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
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (stream == nullptr) {
        return error;
    }
    CUDA_MEMSET_NODE_PARAMS_v1 what{address, pitch, value, element, width, height};
    const auto view = s.client.space.view();
    std::vector<Segment> segments;
    if (!fill_segments(*view, what, &segments)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (segments.empty()) {
        return CUDA_SUCCESS;
    }
    if (stream->capture != nullptr) {
        NodeSpec spec;
        spec.fixed.type = CU_GRAPH_NODE_TYPE_MEMSET;
        spec.fixed.fill = what;
        return capture_node(s, *stream, std::move(spec));
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

} // namespace flowgpu::emu
