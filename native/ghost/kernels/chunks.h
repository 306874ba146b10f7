/* The kernels that work on chunks of device memory: what a caller and chunks.cu both need.
 *
 * Each takes addresses of 32 KiB chunks, aligned to their size, blockDim (FGK_THREADS, 1, 1), and
 * gridDim.x = ceil(count / chunks per thread block). Arrays of addresses are 8-byte aligned,
 * digests 16-byte aligned. No kernel takes shared memory.
 *
 *   fgk_digest (const u64 *address, u32 count, u8 *digests, u8 *zero)
 *              digests: 16 bytes a chunk, XXH3-128 (seed 0), canonical; zero: 1 if all bytes are 0
 *   fgk_compare(const u64 *left, const u64 *right, u32 count, u8 *differ)
 *   fgk_copy   (const u64 *source, const u64 *destination, u32 count)
 *              no destination may be a source or appear twice
 *   fgk_fill   (const u64 *destination, u32 count, u64 pattern)
 *              pattern: repeated, in the memory's byte order
 */
#ifndef FLOWGPU_CHUNKS_H
#define FLOWGPU_CHUNKS_H

#define FGK_CHUNK_BYTES 32768
#define FGK_THREADS 256

/* Threads that digest one chunk: 4, 8, 16 or 32. */
#ifndef FGK_DIGEST_LANES
#define FGK_DIGEST_LANES 16
#endif

#define FGK_DIGEST_CHUNKS (FGK_THREADS / FGK_DIGEST_LANES)
#define FGK_COMPARE_CHUNKS (FGK_THREADS / 32)
#define FGK_COPY_CHUNKS (FGK_THREADS / 32)
#define FGK_FILL_CHUNKS (FGK_THREADS / 32)

#endif
