// flowgpu-fill: makes a view of CRIU's images (view.h) and, when CRIU has restored the processes
// from that, writes into them what the view lacks.
//
//     flowgpu-fill IMAGES FOLDER
//
// CRIU reads a process's pages with one thread. A program of its own, so that this does not wait
// for the coordinator's Python, which is busy with the other side meanwhile.
//
// Makes the view in FOLDER, which is there and empty, and says what it lacks in a line of JSON on
// standard output; ends there when it lacks nothing. Then waits for a line on standard input,
// writes, and says so by another line. The processes must be stopped meanwhile. Ends with status 1
// and the reason on standard error when something is wrong, and silently when its standard input
// ends.
#include "fill.h"

#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <thread>

namespace pages {
namespace {

constexpr unsigned kMostThreads = 16;

void check_machine() {
#if !defined(__x86_64__)
    throw PagesFailure("another processor than x86-64");
#endif
    if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage))
        throw PagesFailure("pages of " + std::to_string(sysconf(_SC_PAGESIZE)) + " bytes");
    // Some seccomp filters refuse it.
    if (process_vm_writev(getpid(), nullptr, 0, nullptr, 0, 0) != 0)
        throw system_failure("process_vm_writev", errno);
}

void run(const std::string& images, const std::string& folder) {
    check_machine();
    const View view = make_view(images, folder);
    const std::vector<Fill>& fills = view.fills;
    uint64_t bytes = 0;
    std::set<pid_t> processes;
    for (const Fill& fill : fills) {
        for (const Run& run : fill.runs)
            bytes += run.bytes;
        processes.insert(fill.pid);
    }
    std::string pids;
    for (const pid_t pid : processes)
        pids += (pids.empty() ? "" : ", ") + std::to_string(pid);
    printf("{\"pids\": [%s], \"bytes\": %llu, \"cut\": %zu, \"inherits\": %s}\n", pids.c_str(),
           static_cast<unsigned long long>(bytes), view.cut.size(),
           view.inherits ? "true" : "false");
    fflush(stdout);
    if (fills.empty())
        return;
    char line;
    if (read(STDIN_FILENO, &line, 1) != 1)
        return;
    fill(fills, std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads));
    puts("filled");
}

} // namespace
} // namespace pages

int main(int count, char** words) {
    if (count != 3) {
        fputs("usage: flowgpu-fill IMAGES FOLDER\n", stderr);
        return 2;
    }
    // The end of its standard input ends it; a terminal's signals are for the job.
    for (int number : {SIGHUP, SIGINT, SIGTERM, SIGPIPE})
        signal(number, SIG_IGN);
    try {
        pages::run(words[1], words[2]);
        return 0;
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
