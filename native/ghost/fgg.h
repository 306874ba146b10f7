// C interface of libflowgpu_ghost.so, the mover: bytes between GPU memory and files of an image,
// with digests.
//
// Every function that returns int returns an fgg_status; fgg_error_text tells what happened. The
// library never prints, never initialises CUDA and links against no driver: it resolves the handful
// of functions that it needs from the library given to fgg_init, in which the caller has made the
// contexts.
//
// Bump FGG_ABI_VERSION when a struct changes or a function changes its meaning;
// flowgpu/host/native.py checks it.
#ifndef FLOWGPU_FGG_H
#define FLOWGPU_FGG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FGG_ABI_VERSION 4
#define FGG_CHUNK_BYTES 32768   // the unit of a digest
#define FGG_DIGEST_BYTES 16     // XXH3-128, canonical (big-endian) form
#define FGG_FRAME_BYTES 4194304 // of a packed file, in each zstd frame but the last

enum fgg_status {
    FGG_OK = 0,
    FGG_PENDING = 1,   // the stage was not reached before the timeout
    FGG_CANCELLED = 2, // fgg_job_cancel
    FGG_DRIVER = 3,    // a driver call failed
    FGG_NO_SPACE = 4,  // ENOSPC, EDQUOT or EFBIG on the file, or no memory behind a tmpfs
    FGG_IO = 5,        // any other error of the file
    FGG_SHORT = 6,     // the file does not have the size of the segments
    FGG_DAMAGED = 7,   // a chunk does not have its digest: fgg_progress.damaged_chunk
    FGG_ARGUMENT = 8,
    FGG_SYSTEM = 9, // no memory, no thread, no library
};

enum fgg_kind {
    FGG_DUMP = 0,    // GPU memory -> new file; fills the digests
    FGG_RESTORE = 1, // file -> GPU memory; checks the digests before a chunk reaches the GPU
};

enum fgg_mode {
    FGG_RING = 0,       // read and write calls between the file and the arena; every restore's
    FGG_MAPPED = 1,     // dump: the file is mapped and populated in advance, copied to by threads
    FGG_REGISTERED = 2, // as FGG_MAPPED, and the mapping is pinned: the GPU writes the file's pages
};

enum fgg_stage {
    FGG_PREPARED = 0, // pages of the expected bytes populated and pinned, as the mode asks
    FGG_OUT = 1,  // dump: all bytes have left the GPU; restore: all are read and fit their digests
    FGG_DONE = 2, // dump: all bytes are in the file (not yet synced to a disk); restore: all are in
                  // the GPU
};

typedef struct fgg_arena fgg_arena;
typedef struct fgg_job fgg_job;
typedef struct fgg_kernels fgg_kernels;     // module and scratch memory in one context
typedef struct fgg_catalogue fgg_catalogue; // table digest -> number

typedef struct {
    const char* path; // dump: must not exist; restore: must exist. Never follows a symbolic link
    fgg_arena* arena; // must outlive the job; several jobs may share one
    fgg_kernels* kernels; // of the same context, must outlive the job; or null. With it all
                          // segments are whole chunks, at addresses that are multiples of a chunk,
                          // and a piece of many segments is gathered or scattered on the GPU
    uint64_t context;     // CUcontext
    uint64_t expected_bytes; // dump: what to populate before the start; the real size may differ
    uint32_t kind;           // fgg_kind
    uint32_t mode;           // fgg_mode
    uint32_t threads;        // that digest and read or write; at least 1
    uint32_t streams;        // copies in flight on as many streams; at least 1
    uint32_t direct_io;      // FGG_RING: O_DIRECT where the file system has it
    uint32_t given_digests;  // dump: the caller has the digests, none are computed
    const uint32_t* frames;  // restore: the file is packed in zstd frames of these sizes; or null.
                             // Used by fgg_job_create only
    uint64_t frame_count;
    uint64_t plain_bytes; // of the file that was packed
} fgg_job_options;

typedef struct {
    uint64_t address; // in the context of the job
    uint64_t bytes;
    uint64_t offset; // in the file
} fgg_segment;

typedef struct {
    uint32_t stage;          // highest fgg_stage reached, plus 1; 0: still preparing
    uint32_t status;         // FGG_OK while all is well
    uint64_t bytes_total;    // 0 before fgg_job_start
    uint64_t bytes_ready;    // populated in advance
    uint64_t bytes_copied;   // between host and GPU
    uint64_t bytes_file;     // dump: stored; restore: read and verified
    uint64_t bytes_direct;   // dump: copied from the GPU into the file's own pages
    uint64_t bytes_gathered; // of bytes_copied, those of pieces gathered or scattered by a kernel
    uint64_t prepare_ns;     // from fgg_job_create to FGG_PREPARED
    uint64_t out_ns;         // from fgg_job_start to FGG_OUT
    uint64_t done_ns;        // from fgg_job_start to FGG_DONE
    uint64_t damaged_chunk;  // when status is FGG_DAMAGED
} fgg_progress;

typedef struct {
    const char* path; // never follows a symbolic link
    uint64_t bytes;   // to digest, from its start
} fgg_file;

typedef struct {
    uint64_t bytes_done;  // so far; to be read while fgg_digest_files runs
    uint64_t failed_file; // the number of the file of which the error's text speaks
    uint32_t stop;        // set by the caller: end soon, with FGG_CANCELLED
} fgg_digest_progress;

uint32_t fgg_abi_version(void);

// Resolves the driver's functions from the library at this path. Once a process; again with the
// same path is no error.
int fgg_init(const char* driver_path);

// Text of the job's failure, or, for a null job, of the last failed call of this thread. Never
// null.
const char* fgg_error_text(const fgg_job* job);

// Host memory in huge pages, touched by `threads` threads, cut into slots of piece_bytes (a
// multiple of 2 MiB).
int fgg_arena_create(uint64_t bytes, uint64_t piece_bytes, uint32_t threads, fgg_arena** arena);
// Pins the arena for all contexts of the process; needs a context, so that it is apart from the
// touching.
int fgg_arena_register(fgg_arena* arena, uint64_t context);
// Unpins and unmaps. No job may use the arena.
void fgg_arena_destroy(fgg_arena* arena);

// Opens or creates the file and, for mapped modes, starts to prepare its pages on own threads.
int fgg_job_create(const fgg_job_options* options, fgg_job** job);
// Starts the copy of the segments, which are sorted by offset and do not overlap in the file. Those
// of a dump cover the file from its start; a restore may leave gaps, also at the end, which are not
// read: before and after a gap, offsets are multiples of a chunk. Preparation that is not finished
// is ended, not awaited. `digests` (one a chunk of the file, gaps included) is written by a dump
// and read by a restore, until the job is destroyed; with given_digests it may be null.
int fgg_job_start(fgg_job* job, const fgg_segment* segments, uint64_t segment_count,
                  uint8_t* digests, uint64_t digest_count);
void fgg_job_progress(const fgg_job* job, fgg_progress* progress);
// Waits for a stage (timeout_ms < 0: without limit). A failure is answered only when no thread of
// the job uses the GPU or the file any more.
int fgg_job_wait(fgg_job* job, uint32_t stage, int64_t timeout_ms);
// Asks a job to end; fgg_job_wait answers FGG_CANCELLED when it has. A dump's file stays, for the
// caller to remove.
void fgg_job_cancel(fgg_job* job);
// Cancels a job under way, waits for it, frees it.
void fgg_job_destroy(fgg_job* job);

// Loads the PTX of native/ghost/kernels into the context and takes scratch memory on the GPU: at
// most scratch_bytes, and less, down to 1 MiB, when the GPU has no more. The functions below work
// on chunks at addresses that are multiples of a chunk; they return when all is done, make the
// context current in the calling thread, and are called by one thread at a time.
int fgg_kernels_create(uint64_t context, const char* ptx_path, uint64_t scratch_bytes,
                       fgg_kernels** kernels);
// No job may use it.
void fgg_kernels_destroy(fgg_kernels* kernels);
// A digest of each chunk, and in zero 1 where all its bytes are zero, else 0.
int fgg_scan(fgg_kernels* kernels, const uint64_t* addresses, uint64_t count, uint8_t* digests,
             uint8_t* zero);
// differ: 1 where two chunks differ in any byte, else 0.
int fgg_compare(fgg_kernels* kernels, const uint64_t* left, const uint64_t* right, uint64_t count,
                uint8_t* differ);
// No destination may be a source or another destination.
int fgg_copy_chunks(fgg_kernels* kernels, const uint64_t* sources, const uint64_t* destinations,
                    uint64_t count);
// Every 8 bytes of the chunks become the pattern.
int fgg_fill_chunks(fgg_kernels* kernels, const uint64_t* destinations, uint64_t count,
                    uint64_t pattern);

// A table for `expected` digests; it grows when there are more. Used by one thread at a time.
int fgg_catalogue_create(uint64_t expected, fgg_catalogue** catalogue);
void fgg_catalogue_destroy(fgg_catalogue* catalogue);
// numbers[i]: the number under which this digest was first added, or, for a digest that is new,
// first + i, under which it is added now. first + count must stay below 2^64.
int fgg_catalogue_match(fgg_catalogue* catalogue, const uint8_t* digests, uint64_t count,
                        uint64_t first, uint64_t* numbers);

// Digests every `step` bytes of the files, and what is left at the end of each, on so many threads;
// digests lie one behind another, file by file. progress starts as zeros. Needs no fgg_init.
int fgg_digest_files(const fgg_file* files, uint64_t count, uint64_t step, uint32_t threads,
                     uint8_t* digests, fgg_digest_progress* progress);

#ifdef __cplusplus
}
#endif
#endif
