#include "gather.h"

namespace fgg {
namespace {

// A copy call costs the host some microseconds and reaches full speed from about 1 MiB on; a piece
// of 32 MiB in so many parts still does, on average. Above it a kernel, which moves a piece within
// the GPU in a tenth of the time of its copy, costs less.
constexpr uint64_t kParts = 16;

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

bool Gather::take_lists(unsigned copies) {
    if (!lists_.take(copies * list_bytes()))
        return false;
    void* staging;
    check(driver().cuMemHostAlloc(&staging, copies * list_bytes(), CU_MEMHOSTALLOC_PORTABLE),
          "cuMemHostAlloc");
    staging_ = static_cast<char*>(staging);
    return true;
}

bool Gather::take_pieces(unsigned lanes) {
    return pieces_.take(lanes * piece_bytes_);
}

bool Gather::worthwhile(const Piece& piece) {
    return piece.parts > kParts;
}

bool Gather::gathers(const Piece& piece) const {
    return pieces_.address() && worthwhile(piece);
}

// An arena's piece is a multiple of 2 MiB, so that every list starts at a multiple of 64 bytes.
uint64_t Gather::list_bytes() const {
    return piece_bytes_ / FGG_CHUNK_BYTES * (2 * sizeof(uint64_t) + FGG_DIGEST_BYTES + 1);
}

uint64_t Gather::place(List list, unsigned copy) const {
    constexpr uint64_t before[] = {0, sizeof(uint64_t), 2 * sizeof(uint64_t),
                                   2 * sizeof(uint64_t) + FGG_DIGEST_BYTES};
    return copy * list_bytes() +
           piece_bytes_ / FGG_CHUNK_BYTES * before[static_cast<unsigned>(list)];
}

uint64_t* Gather::host_list(List list, unsigned copy) const {
    return reinterpret_cast<uint64_t*>(staging_ + place(list, copy));
}

CUdeviceptr Gather::device_list(List list, unsigned copy) const {
    return lists_.address() + place(list, copy);
}

const uint8_t* Gather::digests(unsigned copy) const {
    return reinterpret_cast<const uint8_t*>(host_list(List::digests, copy));
}

void Gather::send(List list, unsigned copy, uint64_t count, CUstream stream) {
    check(driver().cuMemcpyHtoDAsync_v2(device_list(list, copy), host_list(list, copy),
                                        count * sizeof(uint64_t), stream),
          "cuMemcpyHtoDAsync");
}

uint32_t Gather::send_chunks(const Piece& piece, unsigned copy, CUstream stream) {
    uint64_t* next = host_list(List::chunks, copy);
    segments_.split(piece, [&](uint64_t address, uint64_t, uint64_t, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES)
            *next++ = address + at;
    });
    const uint64_t count = piece.bytes / FGG_CHUNK_BYTES;
    send(List::chunks, copy, count, stream);
    return static_cast<uint32_t>(count);
}

void Gather::send_scratch(const Piece& piece, unsigned copy, unsigned lane, CUstream stream) {
    const CUdeviceptr base = pieces_.address() + lane * piece_bytes_;
    uint64_t* next = host_list(List::scratch, copy);
    segments_.split(piece, [&](uint64_t, uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
        const uint64_t from = piece.direct ? in_file - piece.offset : in_piece;
        for (uint64_t at = 0; at < bytes; at += FGG_CHUNK_BYTES)
            *next++ = base + from + at;
    });
    send(List::scratch, copy, piece.bytes / FGG_CHUNK_BYTES, stream);
}

void Gather::out(const Piece& piece, unsigned copy, unsigned lane, CUstream stream) {
    const uint32_t count = send_chunks(piece, copy, stream);
    send_scratch(piece, copy, lane, stream);
    kernels_.launch_copy(stream, device_list(List::chunks, copy), device_list(List::scratch, copy),
                         count);
    check(driver().cuMemcpyDtoHAsync_v2(piece.host, pieces_.address() + lane * piece_bytes_,
                                        piece.bytes, stream),
          "cuMemcpyDtoHAsync");
}

void Gather::in(const Piece& piece, unsigned copy, unsigned lane, CUstream stream) {
    copy_in(piece, pieces_.address() + lane * piece_bytes_, stream);
    const uint32_t count = send_chunks(piece, copy, stream);
    send_scratch(piece, copy, lane, stream);
    kernels_.launch_copy(stream, device_list(List::scratch, copy), device_list(List::chunks, copy),
                         count);
}

void Gather::copy_in(const Piece& piece, CUdeviceptr scratch, CUstream stream) const {
    const auto copy = [&](uint64_t in_file, uint64_t in_piece, uint64_t bytes) {
        const char* from = piece.at(in_file, in_piece);
        check(driver().cuMemcpyHtoDAsync_v2(scratch + (from - piece.host), from, bytes, stream),
              "cuMemcpyHtoDAsync");
    };
    uint64_t runs = 0;
    segments_.runs(piece, [&](uint64_t, uint64_t, uint64_t) { runs++; });
    if (!piece.direct)
        copy(piece.offset, 0, piece.bytes);
    else if (runs <= kParts)
        segments_.runs(piece, copy);
    else // The gaps are pinned too, and to copy them is cheaper than to copy around them.
        copy(piece.offset, 0, piece.end - piece.offset);
}

void Gather::digest(const Piece& piece, unsigned copy, CUstream stream) {
    const uint32_t count = send_chunks(piece, copy, stream);
    kernels_.launch_digest(stream, device_list(List::chunks, copy), count,
                           device_list(List::digests, copy), device_list(List::zero, copy));
    check(driver().cuMemcpyDtoHAsync_v2(host_list(List::digests, copy),
                                        device_list(List::digests, copy),
                                        uint64_t{count} * FGG_DIGEST_BYTES, stream),
          "cuMemcpyDtoHAsync");
}

} // namespace fgg
