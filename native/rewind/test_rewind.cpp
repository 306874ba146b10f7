// Unit tests of the rewind, on a driver that leaves with libc all that a driver can. Run by ctest.
// Each test is a process of its own, since a process remembers its driver once.
#include "rewind.h"

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proc.h"

using namespace flowgpu;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

namespace {

// Shared by those in the driver, locked by who ends it.
std::shared_mutex door;
std::atomic<int> at_door{0}, gone_in{0};
thread_local uint32_t depth = 0;

constexpr rewind::Passage passage = {[] {
                                         if (depth == 0) {
                                             at_door++;
                                             door.lock_shared();
                                             gone_in++;
                                         }
                                         return depth++;
                                     },
                                     [](uint32_t before) {
                                         depth = before;
                                         if (depth == 0)
                                             door.unlock_shared();
                                     }};

struct Driver {
    void* library;
    int (*init)(const char*);
    void* (*range)();
    void (*free_range)();
    pthread_key_t (*key)();
    bool (*ping)();
    int (*threads)(bool enters);
    void (**table)();
    void (**relocated_table)();
    char detail[256] = {};

    explicit Driver(const char* path = FAKE_DRIVER) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        CHECK(library);
        find(init, "fake_init");
        find(range, "fake_range");
        find(free_range, "fake_free_range");
        find(key, "fake_key");
        find(ping, "fake_ping");
        find(threads, "fake_threads");
        find(table, "fake_table");
        find(relocated_table, "fake_relocated_table");
        CHECK(rewind::remember(reinterpret_cast<void*>(init), passage, detail, sizeof detail));
    }
    template <class T> void find(T& to, const char* name) {
        to = reinterpret_cast<T>(dlsym(library, name));
        CHECK(to);
    }
    bool strip(std::vector<rewind::Range> keep = {}, void (*at_end)() = nullptr) {
        bool lost = true;
        bool done = rewind::strip(keep.data(), keep.size(), detail, sizeof detail, &lost, at_end);
        if (lost)
            fprintf(stderr, "lost: %s\n", detail);
        CHECK(!lost);
        return done;
    }
    bool refuses(const char* why) {
        if (!strip() && strstr(detail, why))
            return true;
        fprintf(stderr, "instead of \"%s\": %s\n", why, detail);
        return false;
    }
};

size_t entries(const char* folder) {
    size_t count = 0;
    proc::each_number(folder, [&](const char*, int) { count++; });
    return count;
}

size_t thread_count() {
    return entries("/proc/self/task");
}

// The folder shows a thread for an instant longer than a signal finds it.
bool comes_to(size_t count) {
    for (int i = 0; i < 1000 && thread_count() != count; i++)
        usleep(1000);
    return thread_count() == count;
}

size_t mapped_bytes() {
    size_t bytes = 0;
    proc::each_mapping([&](const proc::Mapping& one) { bytes += one.end - one.start; });
    return bytes;
}

std::string mode_at(const void* address) {
    std::string mode;
    auto at = reinterpret_cast<uintptr_t>(address);
    proc::each_mapping([&](const proc::Mapping& one) {
        if (one.start <= at && at < one.end)
            mode = one.mode;
    });
    return mode;
}

void test_lives_do_not_add_up() {
    Driver driver;
    size_t bytes = 0, used = 0, descriptors = entries("/proc/self/fd");
    void* first = nullptr;
    for (int life = 0; life < 100; life++) {
        CHECK(driver.init("") == 1 && driver.init("") == 2 && driver.ping());
        CHECK(thread_count() == 3);
        void* range = driver.range();
        CHECK(mode_at(range) == "---p");
        CHECK(!first || range == first); // each life has the addresses of the one before
        first = range;
        CHECK(driver.strip());
        CHECK(comes_to(1));
        CHECK(mode_at(range) == "---p"); // held for the next one
        CHECK(entries("/proc/self/fd") == descriptors);
        pthread_key_t next; // the driver's have been given back
        CHECK(pthread_key_create(&next, nullptr) == 0 && next < 4);
        pthread_key_delete(next);
        if (life == 2) {
            bytes = mapped_bytes();
            used = mallinfo2().uordblks;
        }
    }
    CHECK(bytes == mapped_bytes());
    CHECK(mallinfo2().uordblks <= used + 100 * 1000); // what it had lost of each life is more
}

// Then threads go by their name and ranges by their size.
void test_a_driver_whose_calls_cannot_be_seen() {
    void* own = mmap(nullptr, size_t{128} << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::thread([] {
        pthread_setname_np(pthread_self(), "programs");
        for (;;)
            pause();
    }).detach();
    Driver driver(HIDING_DRIVER);
    void* later = mmap(nullptr, size_t{32} << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int life = 0; life < 20; life++) {
        CHECK(driver.init("") == 1 && driver.ping() && thread_count() == 4);
        void* range = driver.range();
        CHECK(driver.strip());
        CHECK(comes_to(2));
        CHECK(mode_at(range).empty() && mode_at(own) == "---p" && mode_at(later) == "---p");
    }
    CHECK(driver.init("d") == 1 && driver.refuses("(cuda-deaf) blocks the signal"));
    CHECK(driver.ping());
}

void test_no_thread_ends_with_a_lock_of_malloc() {
    mallopt(M_ARENA_MAX, 1); // the lock of all
    Driver driver;
    for (int life = 0; life < 50; life++) {
        CHECK(driver.init("aa") == 1 && driver.strip());
        void* volatile memory = malloc(5000);
        free(memory);
    }
}

void test_what_is_kept_is_never_free() {
    Driver driver;
    driver.init("");
    auto start = reinterpret_cast<uintptr_t>(driver.range());
    CHECK(!driver.strip({{start + 1, 4096}}) && driver.ping());
    const rewind::Range near = {start + 8192, 4096}, far = {start + 65536, 65536};
    auto mode = [](uintptr_t address) { return mode_at(reinterpret_cast<void*>(address)); };
    CHECK(driver.strip({near, far}));
    for (uintptr_t at : {start, near.start, near.start + 4096, far.start, far.start + 65536})
        CHECK(mode(at) == "---p"); // the driver's range as well, for the next life
    CHECK(!rewind::make_way(near, false));
    driver.init("");
    CHECK(reinterpret_cast<uintptr_t>(driver.range()) == start);
    CHECK(rewind::make_way(near, false) && mode(near.start) == "---p"); // now the driver's

    CHECK(driver.strip({near, far}));
    CHECK(rewind::make_way(near, true) && mode(near.start).empty() && mode(start).empty());
    CHECK(mode(far.start) == "---p" && mode(far.start + 65535) == "---p");
    CHECK(rewind::make_way(far, false) && mode(far.start).empty());
}

int of_device = -1, ends = 0; // what the callers close, and how often they were told

void test_the_caller_is_told_of_the_end_before_descriptors_are_closed() {
    Driver driver;
    driver.init("");
    auto start = reinterpret_cast<uintptr_t>(driver.range());
    of_device = memfd_create("flowgpu-emu-device", 0);
    CHECK(of_device >= 0);
    const auto close_own = [] {
        ends++;
        CHECK(close(of_device) == 0);
        // As soon as the number is free, it may be the program's.
        CHECK(open("/dev/null", O_RDONLY) == of_device);
    };
    CHECK(!driver.strip({{start + 1, 4096}}, close_own) && ends == 0);
    CHECK(driver.strip({}, close_own) && ends == 1);
    CHECK(fcntl(of_device, F_GETFD) == 0 && close(of_device) == 0);
}

void test_a_range_that_the_driver_has_given_back_is_the_programs() {
    Driver driver;
    driver.init("");
    void* range = driver.range();
    driver.free_range();
    CHECK(mmap(range, size_t{64} << 20, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1,
               0) == range);
    CHECK(driver.strip());
    CHECK(mode_at(range) == "---p");
}

void test_tables_are_put_back() {
    Driver driver;
    auto first = driver.table[0];
    auto second = driver.relocated_table[0];
    driver.init("");
    driver.table[0] = [] {};
    auto* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(driver.relocated_table) &
                                         ~uintptr_t{4095});
    CHECK(mode_at(page) == "r--p" && mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0);
    driver.relocated_table[0] = [] {};
    CHECK(driver.strip());
    CHECK(driver.table[0] == first && driver.relocated_table[0] == second);
    CHECK(mode_at(page) == "r--p");
}

void test_a_thread_that_cannot_be_ended_is_named_and_nothing_changes() {
    for (auto [kind, why] : {std::pair{"d", "(cuda-deaf) blocks the signal"},
                             {"s", "(cuda-spinner) does not come to rest"},
                             {"l", "(cuda-locked) does not come to rest"}}) {
        pid_t child = fork();
        if (child == 0) {
            Driver driver;
            driver.init(kind);
            size_t threads = thread_count();
            for (int tries = kind[0] == 'd' ? 2 : 1; tries > 0; tries--) { // each takes seconds
                CHECK(driver.refuses(why));
                CHECK(thread_count() == threads && driver.ping() && driver.init("") > 1);
                CHECK(mode_at(driver.range()) == "---p");
            }
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

void test_a_strangers_thread_with_a_drivers_name_is_not_ended() {
    Driver driver;
    driver.init("");
    std::thread stranger([] {
        pthread_setname_np(pthread_self(), "cuda-io");
        for (;;)
            pause();
    });
    usleep(10000);
    CHECK(driver.refuses("(cuda-io) is named like one of the driver's"));
    CHECK(driver.ping());
    // A program whose own name begins so has many of them.
    pthread_setname_np(pthread_self(), "cuda-io");
    CHECK(driver.strip());
    CHECK(comes_to(2));
    _exit(0);
}

std::atomic<int> programs_signals{0};

void test_the_programs_signals_stay_its_own() {
    Driver driver;
    for (int signal = SIGRTMIN; signal <= SIGRTMAX; signal++) {
        struct sigaction action = {};
        action.sa_handler = [](int) { programs_signals++; };
        sigaction(signal, &action, nullptr);
    }
    for (int life = 0; life < 3; life++) {
        driver.init("");
        CHECK(driver.strip());
        for (int signal = SIGRTMIN; signal <= SIGRTMAX; signal++)
            raise(signal);
    }
    CHECK(programs_signals == 3 * (SIGRTMAX - SIGRTMIN + 1));
}

// They allocate, compute, wait and begin and end while the driver's threads end.
void test_the_programs_threads_go_on() {
    Driver driver;
    std::atomic<bool> over{false};
    std::atomic<long> rounds{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 30; i++)
        threads.emplace_back([&, i] {
            while (!over) {
                if (i % 3 == 0) {
                    void* volatile memory = malloc(static_cast<size_t>(1000 + i * 1000));
                    free(memory);
                    std::thread([] {}).join();
                } else if (i % 3 == 1) {
                    usleep(1000);
                }
                rounds++;
            }
        });
    for (int life = 0; life < 20; life++) {
        CHECK(driver.init("") == 1);
        CHECK(driver.ping());
        CHECK(driver.strip());
        long seen = rounds;
        while (rounds == seen)
            usleep(100);
    }
    over = true;
    for (std::thread& thread : threads)
        thread.join();
}

void test_values_of_threads_are_not_destroyed_by_a_driver_that_is_gone() {
    Driver driver;
    driver.init("");
    std::thread([&] {
        driver.key();
        CHECK(driver.strip());
    }).join();
}

// What the driver has libc call comes while it is being ended, and meets its next life.
void comes_between(const char* next, const std::function<void(Driver&)>& what) {
    Driver driver;
    driver.init("");
    const int before = at_door;
    std::unique_lock<std::shared_mutex> closed(door);
    std::thread other([&] { what(driver); });
    while (at_door == before)
        usleep(100);
    CHECK(driver.strip() && driver.init(next) == 1);
    CHECK(gone_in == before);
    closed.unlock();
    other.join();
    CHECK(at_door == gone_in && driver.threads(false) == 1 && driver.ping());
}

void test_a_thread_of_the_program_may_end_in_between() {
    comes_between("", [](Driver& driver) {
        driver.key();
        driver.threads(true);
    });
}

void test_a_process_may_fork_in_between() {
    comes_between("", [](Driver&) {
        pid_t child = fork();
        if (child == 0)
            _exit(door.try_lock() ? 0 : 1);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    });
}

void test_a_process_may_exit_in_between() {
    comes_between("m", [](Driver&) { exit(7); });
}

// Closes the descriptor.
std::string rest_of(int fd) {
    std::string text;
    char buffer[256];
    while (ssize_t got = read(fd, buffer, sizeof buffer))
        text.append(buffer, static_cast<size_t>(got));
    close(fd);
    return text;
}

// What a process says that makes so many lives, forks, and exits with 7.
std::string said(int lives, bool stripped, const char* odd = "", const char* even = "") {
    int out[2];
    CHECK(pipe(out) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDOUT_FILENO);
        Driver driver;
        for (int life = 0; life < lives; life++) {
            driver.init(life % 2 ? even : odd);
            if (stripped || life + 1 < lives)
                CHECK(driver.strip());
        }
        pid_t grandchild = fork();
        if (grandchild == 0)
            _exit(0);
        int status;
        waitpid(grandchild, &status, 0);
        exit(7);
    }
    close(out[1]);
    const std::string text = rest_of(out[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    return text;
}

// Real drivers keep a list of threads that their constructor begins, and that their exit goes
// through.
void test_what_a_constructor_has_begun_is_whole_in_each_life() {
    Driver driver;
    std::atomic<int> calls{0}, answer{0};
    std::atomic<bool> ends{false};
    std::thread other([&] {
        for (int made = 0; !ends; usleep(100))
            if (made < calls) {
                made++;
                answer = driver.threads(true);
            }
    });
    auto call = [&] {
        for (answer = 0, calls++; answer == 0;)
            usleep(100);
        return answer.load();
    };
    CHECK(driver.init("") == 1 && driver.threads(true) == 1 && call() == 2);
    CHECK(driver.strip());
    // The loading thread's first entry stays, of which no thread knows.
    CHECK(driver.init("") == 1 && driver.threads(false) == 1 && driver.threads(true) == 2);
    CHECK(driver.strip());
    CHECK(driver.init("") == 1 && driver.threads(false) == 1 && call() == 2);
    CHECK(driver.strip());
    CHECK(driver.init("") == 1);
    ends = true;
    other.join(); // destroys no value of a life that is over
    CHECK(driver.threads(true) == 2);
    std::thread([&] { CHECK(driver.threads(true) == 3); }).join();
    CHECK(driver.threads(true) == 2); // and one of the life that is
}

void test_handlers_run_once_and_only_for_the_life_that_is() {
    CHECK(said(0, false).empty());
    for (int lives : {1, 2, 5})
        CHECK(said(lives, false) == "forked\nexit in life 1\n");
    for (int lives : {1, 5})
        CHECK(said(lives, true).empty());
}

void test_handlers_run_in_the_order_of_their_life() {
    for (int lives : {1, 2, 3, 4})
        CHECK(said(lives, false, "m", "n") == "forked\nlast\nfirst\nexit in life 1\n");
}

std::string link_of(int fd) {
    char target[128] = {};
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    return readlink(path.c_str(), target, sizeof target - 1) < 0 ? "" : target;
}

// As a dump and a restore leave a process: other pipes have the numbers of the driver's.
void test_a_copys_descriptors_are_the_drivers_as_well() {
    Driver driver;
    std::vector<int> free, of_driver;
    for (int fd = 3; fd < 64; fd++)
        if (link_of(fd).empty())
            free.push_back(fd);
    const size_t before = entries("/proc/self/fd");
    CHECK(driver.init("") == 1 && driver.ping());
    for (int fd : free)
        if (!link_of(fd).empty())
            of_driver.push_back(fd);
    CHECK(of_driver.size() == 5 && entries("/proc/self/fd") == before + 5);
    int others[2], own[2];
    CHECK(pipe(others) == 0 && pipe(own) == 0);
    const int programs = of_driver[3]; // by now
    CHECK(dup2(own[1], programs) == programs);
    rewind::before_copy();
    CHECK(!rewind::is_copy());  // nothing is left out here
    std::vector<int> originals; // else the driver's thread would see the end of its pipe
    for (int fd : of_driver) {
        const bool writes = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY;
        if (fd != programs && link_of(fd).rfind("pipe:", 0) == 0) {
            originals.push_back(dup(fd));
            CHECK(dup2(others[writes], fd) == fd);
        }
    }
    for (int fd : others)
        close(fd);
    const int stand_in = socket(AF_UNIX, SOCK_DGRAM, 0);
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    const int tail = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "flowgpu-left-out-%d",
                              static_cast<int>(getpid()));
    CHECK(bind(stand_in, reinterpret_cast<sockaddr*>(&name),
               static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + tail)) == 0);
    CHECK(rewind::is_copy() && driver.strip() && !rewind::is_copy());
    CHECK(entries("/proc/self/fd") == before + originals.size() + 2 + 1);
    CHECK(link_of(programs) == link_of(own[1]) && link_of(stand_in).empty());
    CHECK(driver.init("") == 1 && driver.ping());
}

void run(const char* name, void (*test)(), const std::string& says = "", int code = 0) {
    fprintf(stderr, "%s\n", name);
    int out[2];
    CHECK(pipe(out) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDOUT_FILENO);
        test();
        _exit(0);
    }
    close(out[1]);
    CHECK(rest_of(out[0]) == says);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code);
}

} // namespace

#define RUN(test, ...) run(#test, test, ##__VA_ARGS__)

int main() {
    RUN(test_lives_do_not_add_up);
    RUN(test_a_driver_whose_calls_cannot_be_seen);
    RUN(test_no_thread_ends_with_a_lock_of_malloc);
    RUN(test_what_is_kept_is_never_free);
    RUN(test_the_caller_is_told_of_the_end_before_descriptors_are_closed);
    RUN(test_a_range_that_the_driver_has_given_back_is_the_programs);
    RUN(test_tables_are_put_back);
    RUN(test_a_thread_that_cannot_be_ended_is_named_and_nothing_changes);
    RUN(test_a_strangers_thread_with_a_drivers_name_is_not_ended);
    RUN(test_the_programs_signals_stay_its_own);
    RUN(test_the_programs_threads_go_on);
    RUN(test_values_of_threads_are_not_destroyed_by_a_driver_that_is_gone);
    RUN(test_a_thread_of_the_program_may_end_in_between);
    RUN(test_a_process_may_fork_in_between, "forked\n");
    RUN(test_a_process_may_exit_in_between, "exit in life 1\nlast\nfirst\n", 7);
    RUN(test_what_a_constructor_has_begun_is_whole_in_each_life);
    RUN(test_handlers_run_once_and_only_for_the_life_that_is);
    RUN(test_handlers_run_in_the_order_of_their_life);
    RUN(test_a_copys_descriptors_are_the_drivers_as_well);
}
