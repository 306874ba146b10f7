// A driver for the tests of the rewind: one call of fake_init makes one of everything that a driver
// leaves with libc, and each call tells what it finds of an earlier life.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
extern void* __dso_handle;
int __cxa_atexit(void (*function)(void*), void* argument, void* library) noexcept;
}

#ifdef HIDES_ITS_CALLS
#define HIDDEN(name) (reinterpret_cast<decltype(&name)>(dlsym(RTLD_DEFAULT, #name)))
#define mmap HIDDEN(mmap)
#define pthread_create HIDDEN(pthread_create)
#define dlvsym HIDDEN(dlvsym)
#endif
// What is newer than the oldest libc it runs with, a driver finds so.
#define FOUND(name, version)                                                                       \
    (reinterpret_cast<decltype(&name)>(dlvsym(RTLD_DEFAULT, #name, version)))

namespace {

constexpr size_t kReserved = size_t{64} << 20;
constexpr size_t kBlocks = 5000;
constexpr size_t kHost = size_t{2} << 20; // device's too

struct Log {
    std::string lines;
    ~Log() {
        if (write(STDOUT_FILENO, lines.data(), lines.size()) < 0)
            abort();
    }
};

// Each thread has an entry from its first call to its end. The list begins with that of the thread
// that loads the library.
struct Entry {
    Entry *next = this, *previous = this;
};

Entry entries;
pthread_key_t entry_key;

Entry* enter() {
    if (void* mine = pthread_getspecific(entry_key))
        return static_cast<Entry*>(mine);
    auto* entry = new Entry{entries.next, &entries};
    entries.next = entry->next->previous = entry;
    pthread_setspecific(entry_key, entry);
    return entry;
}

__attribute__((constructor)) void begin() {
    auto leave = [](void* given) {
        auto* entry = static_cast<Entry*>(given);
        entry->next->previous = entry->previous;
        entry->previous->next = entry->next;
        delete entry;
    };
    if (pthread_key_create(&entry_key, leave) != 0)
        abort();
    enter();
}

int lives = 0;
int to_poller[2], from_poller[2], event;
void* reserved_range = nullptr;
char* blocks[kBlocks];
std::mutex held;
pthread_key_t key;
std::atomic<int> spins{0};

void say(const char* line) {
    if (write(STDOUT_FILENO, line, strlen(line)) < 0)
        abort();
}

void* poll_for_orders(void*) {
    pthread_setname_np(pthread_self(), "cuda-poller");
    spins++;
    pthread_setspecific(key, &key);
    for (;;) {
        pollfd all[] = {{to_poller[0], POLLIN, 0}, {event, POLLIN, 0}, {from_poller[0], 0, 0}};
        char order;
        if (poll(all, 3, -1) == 1 &&
            (read(to_poller[0], &order, 1) != 1 || write(from_poller[1], &order, 1) != 1))
            return nullptr;
    }
}

void* sleep_long(void*) {
    pthread_setname_np(pthread_self(), "cuda-sleeper");
    spins++;
    for (;;)
        sleep(1000);
}

void* block_signals(void*) {
    pthread_setname_np(pthread_self(), "cuda-deaf");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    spins++;
    for (;;)
        pause();
}

void* spin(void*) {
    pthread_setname_np(pthread_self(), "cuda-spinner");
    for (;;)
        spins++;
}

void* wait_for_lock(void*) {
    pthread_setname_np(pthread_self(), "cuda-locked");
    spins++;
    std::lock_guard<std::mutex> lock(held);
    return nullptr;
}

// Hardly ever out of malloc, so that most signals find it there.
void* allocate(void*) {
    pthread_setname_np(pthread_self(), "cuda-allocator");
    spins++;
    for (;;) {
        for (int i = 0; i < 1000; i++) {
            void* volatile memory = malloc(static_cast<size_t>(2000 + i));
            free(memory);
        }
        usleep(1);
    }
}

// Until it has its name.
void start(void* (*body)(void*), bool detached) {
    int before = spins;
    pthread_t thread;
    if (pthread_create(&thread, nullptr, body, nullptr) != 0)
        abort();
    if (detached)
        pthread_detach(thread);
    while (spins == before)
        usleep(100);
}

Log& at_exit() {
    static Log log;
    return log;
}

// Two handlers, the first with the argument that this life happens to have.
void watch_exit(char which) {
    static char first[] = "first\n", same[] = "first\n", last[] = "last\n";
    auto speak = [](void* line) { say(static_cast<const char*>(line)); };
    if (__cxa_atexit(speak, which == 'm' ? first : same, &__dso_handle) != 0 ||
        __cxa_atexit(speak, last, &__dso_handle) != 0)
        abort();
}

} // namespace

// Slots of tables like the driver's: in memory that stays writable, and in memory that does not.
extern "C" {
__attribute__((visibility("default"))) void (*fake_table[])() = {[] {}};
__attribute__((visibility("default"))) extern void (*const fake_relocated_table[])() = {[] {}};
}

// Lives that this library knows of, the new one included. `threads`: of the kinds to start, 'd'eaf,
// 's'pinning, 'l'ocked, 'a'llocating; 'm' and 'n' are two lives that watch the exit.
EXPORT int fake_init(const char* threads) {
    if (lives > 0)
        return ++lives;
    reserved_range =
        mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void* host = mmap(nullptr, kHost, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < kBlocks; i++)
        if (blocks[i] = static_cast<char*>(malloc(64 + i)); i % 2) {
            free(blocks[i]);
            blocks[i] = static_cast<char*>(calloc(3, i));
        } else if (i % 3) {
            blocks[i] = static_cast<char*>(realloc(blocks[i], 200 + i));
        }
    free(strdup("made by libc"));
    if (host == MAP_FAILED || pipe(to_poller) != 0 ||
        FOUND(pipe2, "GLIBC_2.9")(from_poller, O_CLOEXEC) != 0 ||
        (event = FOUND(eventfd, "GLIBC_2.7")(0, EFD_CLOEXEC)) < 0 || reserved_range == MAP_FAILED ||
        pthread_key_create(&key, [](void*) { say("value destroyed\n"); }) != 0 ||
        pthread_atfork(nullptr, nullptr, [] { say("forked\n"); }) != 0)
        abort();
    at_exit().lines = "exit in life " + std::to_string(++lives) + "\n";
    start(poll_for_orders, false);
    start(sleep_long, true);
    held.lock();
    for (const char* kind = threads; *kind; kind++) {
        if (*kind == 'm' || *kind == 'n') {
            watch_exit(*kind);
            continue;
        }
        start(*kind == 'd'   ? block_signals
              : *kind == 's' ? spin
              : *kind == 'l' ? wait_for_lock
                             : allocate,
              true);
    }
    return lives;
}

// A driver gives back what its lives have reserved in this way.
EXPORT void fake_free_range() {
    munmap(reserved_range, kReserved);
}

EXPORT void* fake_range() {
    return reserved_range;
}

EXPORT pthread_key_t fake_key() {
    pthread_setspecific(key, &key);
    return key;
}

// How many threads have an entry, the caller among them if it `enters`; -1: the list is broken.
EXPORT int fake_threads(bool enters) {
    if (enters)
        enter();
    int count = 0;
    for (Entry* one = &entries; one->next != &entries; one = one->next)
        if (one->next->previous != one || ++count > 1000)
            return -1;
    return entries.previous->next == &entries ? count : -1;
}

// True if the thread that polls answers.
EXPORT bool fake_ping() {
    char order = 'x', answer = 0;
    pollfd one = {from_poller[0], POLLIN, 0};
    return write(to_poller[1], &order, 1) == 1 && poll(&one, 1, 2000) == 1 &&
           read(from_poller[0], &answer, 1) == 1 && answer == order;
}
