// flowgpu-quiet: gives pages of zeros of running processes back to the kernel.
//
//     flowgpu-quiet THREADS MINIMUM_RUN_BYTES TIMEOUT_MS PID...
//
// Holds every thread of the processes, finds private anonymous pages that hold only zeros, lets
// each process drop them with madvise(MADV_DONTNEED), and lets go. A process reads the same bytes
// there before and after: the kernel fills such a page with zeros at its next use. Prints one line
// of JSON; ends with 1 and a message when nothing could be done. A program of its own, because a
// tracer is a thread whose stops any waitpid of its process could take.
#include "inject.h"
#include "scan.h"
#include "stop.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace quiet {
namespace {

struct Total {
    uint64_t scanned = 0, zero = 0, dropped = 0, runs = 0;
    unsigned processes = 0;
    std::string skipped; // JSON
};

bool is_filtered(pid_t pid) {
    std::string status = read_file("/proc/" + std::to_string(pid) + "/status");
    size_t at = status.find("\nSeccomp:\t");
    return at != std::string::npos && status[at + 10] != '0';
}

void drop(pid_t pid, const std::vector<pid_t>& all, Held& held, unsigned threads, uint64_t minimum,
          Clock::time_point deadline, Total& total) {
    std::vector<pid_t> own = held.threads(pid);
    if (own.empty())
        throw Skip("it has ended");
    if (is_filtered(pid))
        throw Skip("a seccomp filter could end it");
    if (held.shares_memory(pid, all))
        throw Skip("a process outside the job uses its memory");
    Found found = find_zeros(pid, droppable(pid), minimum, threads);
    total.processes++;
    total.scanned += found.scanned;
    total.zero += found.zero;
    if (found.runs.empty())
        return;
    Injector injector(pid, own, find_gadgets(pid), held, deadline);
    for (const Range& run : found.runs) {
        if (Clock::now() > deadline)
            throw Skip("it took too long");
        if (injector.madvise(run.start, run.end - run.start, MADV_DONTNEED) == 0) {
            total.dropped += run.end - run.start;
            total.runs++;
        }
    }
}

double seconds(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

int run(int count, char** words) {
    unsigned threads = static_cast<unsigned>(std::max(1, atoi(words[0])));
    uint64_t minimum = strtoull(words[1], nullptr, 10);
    auto began = Clock::now();
    auto deadline = began + std::chrono::milliseconds(atoi(words[2]));
    std::vector<pid_t> pids;
    for (int i = 3; i < count; i++)
        pids.push_back(atoi(words[i]));
    Total total;
    Clock::time_point stopped;
    {
        Held held(deadline);
        // All of them first: processes may share memory.
        for (pid_t pid : pids)
            held.hold(pid);
        stopped = Clock::now();
        for (pid_t pid : pids) {
            try {
                drop(pid, pids, held, threads, minimum, deadline, total);
            } catch (const Skip& skip) {
                total.skipped += (total.skipped.empty() ? "[" : ", [") + std::to_string(pid) +
                                 ", \"" + skip.what() + "\"]";
            }
        }
    }
    auto ended = Clock::now();
    printf("{\"processes\": %u, \"scanned\": %llu, \"zero\": %llu, \"dropped\": %llu, "
           "\"runs\": %llu, \"stopping_seconds\": %.6f, \"seconds\": %.6f, \"skipped\": [%s]}\n",
           total.processes, static_cast<unsigned long long>(total.scanned),
           static_cast<unsigned long long>(total.zero),
           static_cast<unsigned long long>(total.dropped),
           static_cast<unsigned long long>(total.runs), seconds(began, stopped),
           seconds(began, ended), total.skipped.c_str());
    return 0;
}

} // namespace
} // namespace quiet

int main(int count, char** words) {
    if (count < 5) {
        fputs("usage: flowgpu-quiet THREADS MINIMUM_RUN_BYTES TIMEOUT_MS PID...\n", stderr);
        return 2;
    }
    // It ends by itself within its time; ended by these it would only leave more to be dumped.
    for (int number : {SIGHUP, SIGINT, SIGTERM, SIGPIPE})
        signal(number, SIG_IGN);
    try {
        return quiet::run(count - 1, words + 1);
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
