#include "gather.h"

namespace fgg {
namespace {

// A copy call costs the host some microseconds and reaches full speed from about 1 MiB on, so parts
// of this many bytes on average are copied for themselves. Where they are smaller a kernel, which
// moves a piece within the GPU in a tenth of the time of its copy, costs less; itself it costs as
// many calls as some parts do.
constexpr uint64_t kPartBytes = 2ull << 20;
constexpr uint64_t kParts = 4;

} // namespace

DeviceMemory::~DeviceMemory() {
    if (address_)
        driver().cuMemFree_v2(address_);
}

bool DeviceMemory::take(uint64_t bytes) {
    const CUresult result = driver().cuMemAlloc_v2(&address_, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        address_ = 0;
        return false;
    }
    check(result, "cuMemAlloc");
    return true;
}

Gather::Gather(const Kernels& kernels, const Segments& segments, uint64_t piece_bytes)
    : kernels_(kernels), segments_(segments), piece_bytes_(piece_bytes) {}

Gather::~Gather() {
    if (staging_)
        driver().cuMemFreeHost(staging_);
}

bool Gather::take(unsigned copies, unsigned lanes) {
    if (!lists_.take(copies * list_bytes()) || !pieces_.take(lanes * piece_bytes_))
        return false;
    void* staging;
    check(driver().cuMemHostAlloc(&staging, copies * list_bytes(), CU_MEMHOSTALLOC_PORTABLE),
          "cuMemHostAlloc");
    staging_ = static_cast<char*>(staging);
    return true;
}

bool Gather::worthwhile(const Piece& piece) {
    return piece.parts > kParts && piece.parts * kPartBytes > piece.bytes;
}

// Both lists of one copy.
uint64_t Gather::list_bytes() const {
    return piece_bytes_ / FGG_CHUNK_BYTES * 2 * sizeof(uint64_t);
}

Gather::Lists Gather::send_lists(const Piece& piece, unsigned copy, unsigned lane,
                                 CUstream stream) {
    auto* const first = reinterpret_cast<uint64_t*>(staging_ + copy * list_bytes());
    uint64_t* next = first;
    segments_.split(piece, [&](uint64_t address, uint64_t, uint64_t, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES)
            *next++ = address + at;
    });
    for (uint64_t at = 0; at < piece.bytes; at += FGG_CHUNK_BYTES)
        *next++ = scratch(lane) + at;
    const CUdeviceptr lists = lists_.address() + copy * list_bytes();
    const uint64_t count = piece.bytes / FGG_CHUNK_BYTES;
    check(driver().cuMemcpyHtoDAsync_v2(lists, first, 2 * count * sizeof(uint64_t), stream),
          "cuMemcpyHtoDAsync");
    return {lists, lists + count * sizeof(uint64_t), static_cast<uint32_t>(count)};
}

void Gather::out(const Piece& piece, unsigned copy, unsigned lane, CUstream stream) {
    const Lists lists = send_lists(piece, copy, lane, stream);
    kernels_.launch_copy(stream, lists.chunks, lists.scratch, lists.count);
    check(driver().cuMemcpyDtoHAsync_v2(piece.host, scratch(lane), piece.bytes, stream),
          "cuMemcpyDtoHAsync");
}

void Gather::in(const Piece& piece, unsigned copy, unsigned lane, CUstream stream) {
    check(driver().cuMemcpyHtoDAsync_v2(scratch(lane), piece.host, piece.bytes, stream),
          "cuMemcpyHtoDAsync");
    const Lists lists = send_lists(piece, copy, lane, stream);
    kernels_.launch_copy(stream, lists.scratch, lists.chunks, lists.count);
}

} // namespace fgg
