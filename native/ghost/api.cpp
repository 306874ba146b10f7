// The C border: arguments checked, exceptions turned into statuses.
#include "catalogue.h"
#include "driver.h"
#include "file_digests.h"
#include "job.h"

namespace {

using fgg::Arena;
using fgg::Catalogue;
using fgg::Job;
using fgg::Kernels;
using fgg::MoverFailure;

thread_local std::string last_error;

template <typename Work> int answer(Work work) {
    try {
        return work();
    } catch (const MoverFailure& failure) {
        last_error = failure.what();
        return failure.status();
    } catch (const std::exception& error) {
        last_error = error.what();
        return FGG_SYSTEM;
    }
}

Job* job_of(fgg_job* job) {
    return reinterpret_cast<Job*>(job);
}
const Job* job_of(const fgg_job* job) {
    return reinterpret_cast<const Job*>(job);
}

} // namespace

#define FGG_EXPORT extern "C" __attribute__((visibility("default")))

FGG_EXPORT uint32_t fgg_abi_version(void) {
    return FGG_ABI_VERSION;
}

FGG_EXPORT int fgg_init(const char* driver_path) {
    return answer([&] {
        fgg::load_driver(driver_path);
        return FGG_OK;
    });
}

FGG_EXPORT const char* fgg_error_text(const fgg_job* job) {
    return job ? job_of(job)->error_text() : last_error.c_str();
}

FGG_EXPORT int fgg_arena_create(uint64_t bytes, uint64_t piece_bytes, uint32_t threads,
                                fgg_arena** arena) {
    return answer([&] {
        *arena = reinterpret_cast<fgg_arena*>(new Arena(bytes, piece_bytes, threads));
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_arena_register(fgg_arena* arena, uint64_t context) {
    return answer([&] {
        reinterpret_cast<Arena*>(arena)->pin(context);
        return FGG_OK;
    });
}

FGG_EXPORT void fgg_arena_destroy(fgg_arena* arena) {
    delete reinterpret_cast<Arena*>(arena);
}

FGG_EXPORT int fgg_job_create(const fgg_job_options* options, fgg_job** job) {
    return answer([&] {
        *job = reinterpret_cast<fgg_job*>(Job::create(*options).release());
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_job_start(fgg_job* job, const fgg_segment* segments, uint64_t segment_count,
                             uint8_t* digests, uint64_t digest_count) {
    return answer([&] {
        job_of(job)->start(segments, segment_count, digests, digest_count);
        return FGG_OK;
    });
}

FGG_EXPORT void fgg_job_progress(const fgg_job* job, fgg_progress* progress) {
    job_of(job)->progress(*progress);
}

FGG_EXPORT int fgg_job_wait(fgg_job* job, uint32_t stage, int64_t timeout_ms) {
    return answer([&] {
        if (stage > FGG_DONE)
            throw MoverFailure(FGG_ARGUMENT, "no such stage");
        return job_of(job)->wait(static_cast<fgg_stage>(stage), timeout_ms);
    });
}

FGG_EXPORT void fgg_job_cancel(fgg_job* job) {
    job_of(job)->cancel();
}

FGG_EXPORT void fgg_job_destroy(fgg_job* job) {
    delete job_of(job);
}

FGG_EXPORT int fgg_kernels_create(uint64_t context, const char* ptx_path, uint64_t scratch_bytes,
                                  fgg_kernels** kernels) {
    return answer([&] {
        *kernels = reinterpret_cast<fgg_kernels*>(new Kernels(context, ptx_path, scratch_bytes));
        return FGG_OK;
    });
}

FGG_EXPORT void fgg_kernels_destroy(fgg_kernels* kernels) {
    delete reinterpret_cast<Kernels*>(kernels);
}

FGG_EXPORT int fgg_scan(fgg_kernels* kernels, const uint64_t* addresses, uint64_t count,
                        uint8_t* digests, uint8_t* zero) {
    return answer([&] {
        reinterpret_cast<Kernels*>(kernels)->scan(addresses, count, digests, zero);
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_compare(fgg_kernels* kernels, const uint64_t* left, const uint64_t* right,
                           uint64_t count, uint8_t* differ) {
    return answer([&] {
        reinterpret_cast<Kernels*>(kernels)->compare(left, right, count, differ);
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_copy_chunks(fgg_kernels* kernels, const uint64_t* sources,
                               const uint64_t* destinations, uint64_t count) {
    return answer([&] {
        reinterpret_cast<Kernels*>(kernels)->copy(sources, destinations, count);
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_fill_chunks(fgg_kernels* kernels, const uint64_t* destinations, uint64_t count,
                               uint64_t pattern) {
    return answer([&] {
        reinterpret_cast<Kernels*>(kernels)->fill(destinations, count, pattern);
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_catalogue_create(uint64_t expected, fgg_catalogue** catalogue) {
    return answer([&] {
        *catalogue = reinterpret_cast<fgg_catalogue*>(new Catalogue(expected));
        return FGG_OK;
    });
}

FGG_EXPORT void fgg_catalogue_destroy(fgg_catalogue* catalogue) {
    delete reinterpret_cast<Catalogue*>(catalogue);
}

FGG_EXPORT int fgg_catalogue_match(fgg_catalogue* catalogue, const uint8_t* digests, uint64_t count,
                                   uint64_t first, uint64_t* numbers) {
    return answer([&] {
        reinterpret_cast<Catalogue*>(catalogue)->match(digests, count, first, numbers);
        return FGG_OK;
    });
}

FGG_EXPORT int fgg_digest_files(const fgg_file* files, uint64_t count, uint64_t step,
                                uint32_t threads, uint8_t* digests, fgg_digest_progress* progress) {
    return answer([&] {
        fgg::digest_files(files, count, step, threads, digests, *progress);
        return FGG_OK;
    });
}
