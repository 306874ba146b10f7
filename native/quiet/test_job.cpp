// A program that checks itself while pages are taken from it: test_job SECONDS MEBIBYTES
//
// Some threads count in pages that are zero at times, one checks memory that must not change, and
// some sleep. Prints "ready", then "good" or what was lost.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPage = 4096, kPages = 4096;
using Word = std::atomic<uint64_t>;

std::atomic<bool> ending{false};
std::atomic<int> wrong{0};

unsigned char* map(size_t bytes, int flags, int fd = -1) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (at == MAP_FAILED)
        exit(3);
    return static_cast<unsigned char*>(at);
}

Word& word(unsigned char* base, size_t page) {
    return *reinterpret_cast<Word*>(base + page * kPage + 8 * (page % 512));
}

// Up and down between 0 and 1, so that the page is all zeros half of the time; a lost write shows
// as a step that is not one.
void count(unsigned char* base, size_t first, size_t step) {
    std::vector<uint64_t> expected(kPages);
    for (size_t page = first; !ending; page = page + step < kPages ? page + step : first) {
        uint64_t was = word(base, page).fetch_xor(1);
        if (was != expected[page])
            wrong++;
        expected[page] = was ^ 1;
    }
}

uint64_t pattern(size_t page) {
    return page % 3 ? page * 0x9e3779b97f4a7c15ull : 0;
}

void fill(unsigned char* base, size_t pages) {
    for (size_t page = 0; page < pages; page++) {
        memset(base + page * kPage, 0, kPage); // present, not the kernel's zero page
        uint64_t value = pattern(page / 64);
        memcpy(base + page * kPage + 8 * (page % 512), &value, 8);
    }
}

bool holds(const unsigned char* base, size_t pages) {
    for (size_t page = 0; page < pages; page++) {
        unsigned char expected[kPage] = {};
        uint64_t value = pattern(page / 64);
        memcpy(expected + 8 * (page % 512), &value, 8);
        if (memcmp(expected, base + page * kPage, kPage) != 0)
            return false;
    }
    return true;
}

void sleep_on() {
    // An interrupted sleep that ends early, or a call that fails, is a change as well.
    while (!ending) {
        timespec wait = {0, 3000000};
        auto began = std::chrono::steady_clock::now();
        long result = syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &wait, nullptr);
        auto slept = std::chrono::steady_clock::now() - began;
        if (result != 0 || slept < std::chrono::nanoseconds(wait.tv_nsec))
            wrong++;
    }
}

} // namespace

int main(int, char** words) {
    const double seconds = atof(words[1]);
    const size_t pages = static_cast<size_t>(atol(words[2])) << 8;
    FILE* file = tmpfile();
    const size_t kind_pages = 1024;
    for (size_t i = 0; i < kind_pages * kPage; i += 8)
        fwrite("FILEBYTE", 1, 8, file);
    fflush(file);
    // Memory of every kind. Zeros written over a file's pages must stay zeros.
    unsigned char* data = map(pages * kPage, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
    unsigned char* over = map(kind_pages * kPage, MAP_PRIVATE, fileno(file));
    unsigned char* shared = map(kind_pages * kPage, MAP_SHARED | MAP_ANONYMOUS);
    unsigned char* locked = map(kind_pages * kPage, MAP_PRIVATE | MAP_ANONYMOUS);
    unsigned char* wiped = map(kind_pages * kPage, MAP_PRIVATE | MAP_ANONYMOUS);
    unsigned char* kept = map(kind_pages * kPage, MAP_PRIVATE | MAP_ANONYMOUS);
    unsigned char* read_only = map(kind_pages * kPage, MAP_PRIVATE | MAP_ANONYMOUS);
    std::vector<unsigned char*> kinds = {over, shared, locked, wiped, kept, read_only};
    bool lock = mlock(locked, kind_pages * kPage) == 0;
    fill(data, pages);
    for (unsigned char* kind : kinds)
        fill(kind, kind_pages);
    mprotect(read_only, kind_pages * kPage, PROT_READ);
    madvise(wiped, kind_pages * kPage, MADV_WIPEONFORK);
    madvise(kept, kind_pages * kPage, MADV_DONTFORK);

    // A child with pages of its own and pages that it still has in common with us.
    pid_t child = fork();
    if (child == 0) {
        memset(data, 0, pages / 2 * kPage);
        usleep(static_cast<useconds_t>(seconds * 1e6));
        bool good = true;
        for (size_t i = 0; i < pages / 2 * kPage; i++)
            good = good && data[i] == 0;
        _exit(good ? 0 : 1);
    }

    unsigned char* counted = map(kPages * kPage, MAP_PRIVATE | MAP_ANONYMOUS);
    madvise(counted, kPages * kPage, MADV_NOHUGEPAGE);
    memset(counted, 0, kPages * kPage);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; i++)
        threads.emplace_back(count, counted, i, 2);
    for (int i = 0; i < 4; i++)
        threads.emplace_back(sleep_on);
    printf("ready %d\n", lock ? 1 : 0);
    fflush(stdout);
    usleep(static_cast<useconds_t>(seconds * 1e6));
    ending = true;
    for (std::thread& thread : threads)
        thread.join();
    bool good = holds(data, pages);
    for (unsigned char* kind : kinds)
        good = good && holds(kind, kind_pages);
    int status = 0;
    waitpid(child, &status, 0);
    printf("%s: memory %d, wrong steps %d, child %d\n",
           good && !wrong && status == 0 ? "good" : "lost", good, wrong.load(), status);
    return 0;
}
