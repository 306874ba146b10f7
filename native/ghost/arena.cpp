#include "arena.h"

#include "driver.h"
#include "threads.h"

#include <algorithm>
#include <sys/mman.h>

namespace fgg {
namespace {

constexpr uint64_t kHugePage = 2ull << 20;
// One call pins this much, so that no call holds the driver's lock for long.
constexpr uint64_t kPinBytes = 512ull << 20;

} // namespace

Arena::Arena(uint64_t bytes, uint64_t piece_bytes, unsigned threads) : piece_bytes_(piece_bytes) {
    if (!piece_bytes || piece_bytes % kHugePage || bytes < piece_bytes || !threads)
        throw MoverFailure(FGG_ARGUMENT,
                           "an arena needs whole pieces of a multiple of 2 MiB, and a thread");
    bytes_ = bytes / piece_bytes * piece_bytes;

    // Huge pages need their alignment, which mmap does not promise: take one more and give the ends
    // back.
    const uint64_t room = bytes_ + kHugePage;
    void* raw = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        throw MoverFailure(FGG_SYSTEM, std::string("no memory for the arena: ") + strerror(errno));
    char* start = static_cast<char*>(raw);
    const uint64_t head = (kHugePage - reinterpret_cast<uintptr_t>(raw) % kHugePage) % kHugePage;
    if (head)
        munmap(start, head);
    munmap(start + head + bytes_, room - head - bytes_);
    base_ = start + head;
    madvise(base_, bytes_, MADV_HUGEPAGE);
    try {
        touch(threads);
        for (uint64_t at = 0; at < bytes_; at += piece_bytes_)
            free_.push_back(base_ + at);
    } catch (...) {
        munmap(base_, bytes_);
        throw;
    }
}

Arena::~Arena() {
    if (pinned_ && driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context_)) == CUDA_SUCCESS)
        for (uint64_t at = 0; at < pinned_; at += kPinBytes)
            driver().cuMemHostUnregister(base_ + at);
    munmap(base_, bytes_);
}

void Arena::touch(unsigned threads) {
    std::atomic<uint64_t> next{0};
    std::atomic<int> error{0};
    run_threads(threads, [&](unsigned) {
        for (;;) {
            const uint64_t at = next.fetch_add(kHugePage * 8);
            if (at >= bytes_)
                return;
            const uint64_t length = std::min(kHugePage * 8, bytes_ - at);
            if (madvise(base_ + at, length, MADV_POPULATE_WRITE) == 0)
                continue;
            if (errno != EINVAL) {
                error = errno;
                return;
            }
            // Kernels before 5.14 have no MADV_POPULATE_WRITE.
            for (uint64_t page = at; page < at + length; page += 4096)
                static_cast<volatile char*>(base_)[page] = 0;
        }
    });
    if (error)
        throw MoverFailure(FGG_SYSTEM, std::string("no memory for the arena: ") + strerror(error));
}

void Arena::pin(uint64_t context) {
    check(driver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(context)), "cuCtxSetCurrent");
    context_ = context;
    while (pinned_ < bytes_) {
        const uint64_t length = std::min(kPinBytes, bytes_ - pinned_);
        check(driver().cuMemHostRegister_v2(base_ + pinned_, length, CU_MEMHOSTREGISTER_PORTABLE),
              "cuMemHostRegister");
        pinned_ += length;
    }
}

char* Arena::acquire(bool wait, const std::atomic<bool>& stop) {
    std::unique_lock<std::mutex> guard(lock_);
    if (wait)
        freed_.wait(guard, [&] { return stop || !free_.empty(); });
    if (stop) {
        // The one wake-up of a released slot may have been for this thread, which does not take it.
        freed_.notify_one();
        return nullptr;
    }
    if (free_.empty())
        return nullptr;
    char* slot = free_.back();
    free_.pop_back();
    return slot;
}

void Arena::release(char* slot) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        free_.push_back(slot);
    }
    freed_.notify_one();
}

void Arena::wake() {
    {
        std::lock_guard<std::mutex> guard(lock_);
    }
    freed_.notify_all();
}

} // namespace fgg
