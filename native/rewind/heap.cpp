#include "heap.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace flowgpu::rewind::heap {

namespace {

// Sets of addresses, by hash, so that threads seldom meet. Open addressing with linear probing; a
// set grows before it is half full. Where there is no memory for that, blocks are not noted: they
// stay when their life ends.
class Set {
  public:
    // False: it is there already, so somebody has given it back past us.
    bool add(uintptr_t block) {
        const Lock lock(*this);
        if (!lock.held || (2 * (count_ + 1) > size_ && !grow()))
            return true;
        const bool fresh = put(block);
        count_ += fresh;
        return fresh;
    }

    void remove(uintptr_t block) {
        const Lock lock(*this);
        if (!lock.held || !size_)
            return;
        size_t at = home(block);
        while (rows_[at] != block) {
            if (!rows_[at])
                return;
            at = next(at);
        }
        // What has its home at the gap or before it moves there, so that no search ends too early.
        size_t gap = at;
        for (at = next(at); rows_[at]; at = next(at))
            if (((at - home(rows_[at])) & (size_ - 1)) >= ((at - gap) & (size_ - 1))) {
                rows_[gap] = rows_[at];
                gap = at;
            }
        rows_[gap] = 0;
        count_--;
    }

    // Nobody else may use the set.
    void clear(bool frees) {
        for (size_t i = 0; frees && i < size_; i++)
            if (rows_[i])
                free(reinterpret_cast<void*>(rows_[i]));
        if (size_)
            munmap(rows_, size_ * sizeof *rows_);
        rows_ = nullptr;
        size_ = count_ = 0;
    }

  private:
    static constexpr size_t kFirst = 512;
    static constexpr unsigned kSpins = 64, kPatience = 100;

    // A child of fork() may have inherited a lock that nobody opens; there, nothing is noted.
    struct Lock {
        explicit Lock(Set& set) : set(set) {
            static const pid_t owner = getpid();
            for (unsigned spins = 1; set.locked_.exchange(true, std::memory_order_acquire); spins++)
                if (spins % kSpins == 0) {
                    if (spins > kSpins * kPatience && getpid() != owner)
                        return;
                    sched_yield();
                }
            held = true;
        }
        ~Lock() {
            if (held)
                set.locked_.store(false, std::memory_order_release);
        }
        Lock(const Lock&) = delete;
        Lock& operator=(const Lock&) = delete;
        Set& set;
        bool held = false;
    };

    size_t home(uintptr_t block) const {
        return (block >> 4) * 0x9e3779b97f4a7c15ull >> 32 & (size_ - 1);
    }
    size_t next(size_t at) const { return (at + 1) & (size_ - 1); }

    bool put(uintptr_t block) {
        size_t at = home(block);
        while (rows_[at] && rows_[at] != block)
            at = next(at);
        const bool fresh = !rows_[at];
        rows_[at] = block;
        return fresh;
    }

    bool grow() {
        const size_t size = size_ ? 2 * size_ : kFirst;
        void* fresh = mmap(nullptr, size * sizeof *rows_, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fresh == MAP_FAILED)
            return false;
        uintptr_t* before = rows_;
        const size_t size_before = size_;
        rows_ = static_cast<uintptr_t*>(fresh);
        size_ = size;
        for (size_t i = 0; i < size_before; i++)
            if (before[i])
                put(before[i]);
        if (before)
            munmap(before, size_before * sizeof *before);
        return true;
    }

    std::atomic<bool> locked_{false};
    uintptr_t* rows_ = nullptr;
    size_t size_ = 0, count_ = 0;
};

constexpr unsigned kSetBits = 6;
Set sets[1u << kSetBits];

Set& set_of(uintptr_t block) {
    return sets[(block >> 4) * 0x9e3779b97f4a7c15ull >> (64 - kSetBits)];
}

// True while every noted block is known to be the driver's. Once it is not, we free none.
std::atomic<bool> sure{true};

void* noted(void* block) {
    if (block) {
        const int error = errno;
        if (!set_of(reinterpret_cast<uintptr_t>(block)).add(reinterpret_cast<uintptr_t>(block)))
            sure = false;
        errno = error;
    }
    return block;
}

void forget(void* block) {
    if (block)
        set_of(reinterpret_cast<uintptr_t>(block)).remove(reinterpret_cast<uintptr_t>(block));
}

} // namespace

void* allocate(size_t bytes) {
    return noted(malloc(bytes));
}

void* allocate_zeroed(size_t count, size_t bytes) {
    return noted(calloc(count, bytes));
}

void* allocate_aligned(size_t alignment, size_t bytes) {
    return noted(memalign(alignment, bytes));
}

int allocate_aligned_at(void** to, size_t alignment, size_t bytes) {
    const int result = posix_memalign(to, alignment, bytes);
    if (result == 0)
        noted(*to);
    return result;
}

// Forgotten first: once it is free, another thread may be given the same address.
void* reallocate(void* block, size_t bytes) {
    forget(block);
    void* const result = realloc(block, bytes);
    if (!result && bytes)
        noted(block); // which is as it was
    return noted(result);
}

void release(void* block) {
    forget(block);
    free(block);
}

void end_life(bool sees_all) {
    for (Set& set : sets)
        set.clear(sees_all && sure);
    malloc_trim(0);
}

} // namespace flowgpu::rewind::heap
