#include "kernels.h"

#include "kernels/chunks.h"

#include <algorithm>
#include <fstream>
#include <iterator>

namespace fgg {
namespace {

static_assert(FGK_CHUNK_BYTES == FGG_CHUNK_BYTES, "kernels and mover use the same chunks");

// A chunk takes this much scratch memory: two addresses in at most, and 17 bytes out.
constexpr uint64_t kRowBytes = 2 * sizeof(uint64_t) + FGG_DIGEST_BYTES + 1;
constexpr uint64_t kLeastScratch = 1ull << 20;
// 2 GiB of chunks take the GPU longer than a launch, so that more in one batch gains nothing.
constexpr uint64_t kMostBatch = 1ull << 16;
// Lists start at multiples of this, as digests need.
constexpr uint64_t kListAlignment = 16;

uint64_t list_bytes(uint64_t bytes) {
    return (bytes + kListAlignment - 1) / kListAlignment * kListAlignment;
}

void launch(CUfunction function, unsigned chunks_per_block, uint32_t count, CUstream stream,
            void** arguments) {
    const unsigned blocks = (count + chunks_per_block - 1) / chunks_per_block;
    check(driver().cuLaunchKernel(function, blocks, 1, 1, FGK_THREADS, 1, 1, 0, stream, arguments,
                                  nullptr),
          "cuLaunchKernel");
}

void require_chunks(const uint64_t* addresses, uint64_t count) {
    uint64_t all = 0;
    for (uint64_t i = 0; i < count; i++)
        all |= addresses[i];
    if (all % FGG_CHUNK_BYTES)
        throw MoverFailure(FGG_ARGUMENT, "a chunk's address is not a multiple of 32 KiB");
}

} // namespace

Kernels::Kernels(uint64_t context, const char* ptx_path, uint64_t scratch_bytes)
    : context_(context) {
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context)), "cuCtxSetCurrent");
    try {
        load(ptx_path);
        take_memory(scratch_bytes);
    } catch (...) {
        release();
        throw;
    }
}

Kernels::~Kernels() {
    if (driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context_)) == CUDA_SUCCESS)
        release();
}

void Kernels::release() {
    for (Half& half : halves_)
        if (half.stream)
            driver().cuStreamDestroy_v2(half.stream);
    if (staging_)
        driver().cuMemFreeHost(staging_);
    if (scratch_)
        driver().cuMemFree_v2(scratch_);
    if (module_)
        driver().cuModuleUnload(module_);
}

void Kernels::load(const char* ptx_path) {
    std::ifstream file(ptx_path, std::ios::binary);
    const std::string ptx{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file || ptx.empty())
        throw MoverFailure(FGG_IO, std::string("cannot read the kernels in ") + ptx_path);
    check(driver().cuModuleLoadData(&module_, ptx.c_str()), "cuModuleLoadData of the kernels");
    const std::pair<CUfunction*, const char*> functions[] = {{&digest_, "fgk_digest"},
                                                             {&compare_, "fgk_compare"},
                                                             {&copy_, "fgk_copy"},
                                                             {&fill_, "fgk_fill"}};
    for (const auto& [function, name] : functions)
        check(driver().cuModuleGetFunction(function, module_, name), name);
}

void Kernels::take_memory(uint64_t scratch_bytes) {
    const uint64_t most = 2 * kMostBatch * kRowBytes + kLeastScratch;
    uint64_t bytes = std::clamp(scratch_bytes, kLeastScratch, most);
    for (;; bytes = std::max(bytes / 2, kLeastScratch)) {
        const CUresult result = driver().cuMemAlloc_v2(&scratch_, bytes);
        if (result == CUDA_SUCCESS)
            break;
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            check(result, "cuMemAlloc of scratch memory");
        if (bytes == kLeastScratch)
            throw MoverFailure(FGG_DRIVER,
                               "the GPU has not even 1 MiB of memory for lists of chunks");
    }
    const uint64_t half = bytes / 2 / kListAlignment * kListAlignment;
    // Four lists at most, each with less than one alignment of padding.
    batch_ = std::min((half - 4 * kListAlignment) / kRowBytes, kMostBatch);
    void* staging;
    check(driver().cuMemHostAlloc(&staging, 2 * half, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
    staging_ = static_cast<char*>(staging);
    for (unsigned i = 0; i < 2; i++) {
        halves_[i].device = scratch_ + i * half;
        halves_[i].host = staging_ + i * half;
        check(driver().cuStreamCreate(&halves_[i].stream, CU_STREAM_NON_BLOCKING),
              "cuStreamCreate");
    }
}

void Kernels::scan(const uint64_t* addresses, uint64_t count, uint8_t* digests, uint8_t* zero) {
    run({digest_,
         FGK_DIGEST_CHUNKS,
         {addresses},
         {{digests, FGG_DIGEST_BYTES}, {zero, 1}},
         nullptr},
        count);
}

void Kernels::compare(const uint64_t* left, const uint64_t* right, uint64_t count,
                      uint8_t* differ) {
    run({compare_, FGK_COMPARE_CHUNKS, {left, right}, {{differ, 1}}, nullptr}, count);
}

void Kernels::copy(const uint64_t* sources, const uint64_t* destinations, uint64_t count) {
    run({copy_, FGK_COPY_CHUNKS, {sources, destinations}, {}, nullptr}, count);
}

void Kernels::fill(const uint64_t* destinations, uint64_t count, uint64_t pattern) {
    run({fill_, FGK_FILL_CHUNKS, {destinations}, {}, &pattern}, count);
}

void Kernels::launch_copy(CUstream stream, CUdeviceptr sources, CUdeviceptr destinations,
                          uint32_t count) const {
    void* arguments[] = {&sources, &destinations, &count};
    launch(copy_, FGK_COPY_CHUNKS, count, stream, arguments);
}

void Kernels::run(const Work& work, uint64_t count) {
    for (const uint64_t* input : work.inputs)
        require_chunks(input, count);
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context_)), "cuCtxSetCurrent");
    try {
        unsigned turn = 0;
        for (uint64_t first = 0; first < count; turn ^= 1) {
            const uint64_t batch = std::min(batch_, count - first);
            finish(work, halves_[turn]);
            issue(work, halves_[turn], first, batch);
            first += batch;
        }
        finish(work, halves_[turn]);
        finish(work, halves_[turn ^ 1]);
    } catch (...) {
        // The next call, or the caller's free, must find nothing in flight.
        for (Half& half : halves_) {
            driver().cuStreamSynchronize(half.stream);
            half.count = 0;
        }
        throw;
    }
}

void Kernels::issue(const Work& work, Half& half, uint64_t first, uint64_t count) {
    half.first = first;
    half.count = count;
    uint64_t at = 0;
    CUdeviceptr lists[4];
    void* arguments[6];
    unsigned used = 0, filled = 0;
    for (const uint64_t* input : work.inputs) {
        const uint64_t bytes = count * sizeof(uint64_t);
        std::memcpy(half.host + at, input + first, bytes);
        check(driver().cuMemcpyHtoDAsync_v2(half.device + at, half.host + at, bytes, half.stream),
              "cuMemcpyHtoDAsync");
        lists[used] = half.device + at;
        arguments[filled++] = &lists[used++];
        at += list_bytes(bytes);
    }
    uint32_t rows = static_cast<uint32_t>(count);
    arguments[filled++] = &rows;
    const uint64_t results = at;
    for (const Output& output : work.outputs) {
        lists[used] = half.device + at;
        arguments[filled++] = &lists[used++];
        at += list_bytes(count * output.width);
    }
    if (work.pattern)
        arguments[filled++] = const_cast<uint64_t*>(work.pattern);
    launch(work.function, work.chunks_per_block, rows, half.stream, arguments);
    if (at != results)
        check(driver().cuMemcpyDtoHAsync_v2(half.host + results, half.device + results,
                                            at - results, half.stream),
              "cuMemcpyDtoHAsync");
}

void Kernels::finish(const Work& work, Half& half) {
    if (!half.count)
        return;
    check(driver().cuStreamSynchronize(half.stream), "a kernel on chunks");
    uint64_t at = work.inputs.size() * list_bytes(half.count * sizeof(uint64_t));
    for (const Output& output : work.outputs) {
        const uint64_t bytes = half.count * output.width;
        std::memcpy(output.rows + half.first * output.width, half.host + at, bytes);
        at += list_bytes(bytes);
    }
    half.count = 0;
}

} // namespace fgg
