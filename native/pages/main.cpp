// flowgpu-pages: receives the pages of one CRIU dump and writes CRIU's images of them.
//
//     flowgpu-pages SOCKET FOLDER THREADS FILE SAID [PID:BYTES[:DESCRIPTOR]]...
//
// CRIU alone splices pages into files one after another, and the kernel finds memory for each page
// of the file meanwhile. Here the files have their pages before the dump begins, several threads
// copy most pages straight from the processes (still.h), and pages of zeros that a restore makes by
// itself are left out.
//
// First makes a file for each process named, of about so many bytes. Where it has a userfaultfd of
// the process, it copies the process's pages instead, while that runs (tracked.h). It says "ready"
// on standard output; then serves SOCKET (one end of a pair of Unix sockets whose other end CRIU
// gets by
// --ps-socket). Ends with a line of JSON; or, its files removed, with status 1 and the reason on
// standard error, or with status 3 when CRIU (or who started both) has gone away.
#include "server.h"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace pages {
namespace {

using Clock = std::chrono::steady_clock;
using Files = std::map<pid_t, std::unique_ptr<PageFile>>;

constexpr uint64_t kPiece = 8 << 20;
constexpr uint64_t kFewPages = 2000;
constexpr int kMostPasses = 4;
constexpr auto kPopulateTime = std::chrono::seconds(5); // the user waits for it; the job runs

struct Piece {
    PageFile* file;
    uint64_t offset, bytes;
};

// Lets the kernel make the pages of what is reserved, with all threads, as far as there is time.
void populate(const std::vector<Piece>& pieces, unsigned threads) {
    const auto end = Clock::now() + kPopulateTime;
    std::atomic<size_t> next{0};
    std::atomic<bool> good{true};
    std::vector<std::thread> workers;
    for (unsigned i = 0; i < threads; i++)
        workers.emplace_back([&] {
            while (good && Clock::now() < end) {
                const size_t n = next.fetch_add(1);
                if (n >= pieces.size())
                    return;
                if (!pieces[n].file->populate(pieces[n].offset, pieces[n].bytes))
                    good = false; // met again, and told, when something is to be written there
            }
        });
    for (std::thread& worker : workers)
        worker.join();
    // A piece that was begun was ended.
    for (size_t n = 0; good && n < std::min<size_t>(next, pieces.size()); n++)
        pieces[n].file->set_populated(pieces[n].offset + pieces[n].bytes);
}

// Until few pages are written between two passes, or it is clear that there will be more.
void copy_early(const AllTracked& tracked, unsigned threads) {
    uint64_t pages = kFewPages + 1;
    for (int pass = 0; pass < kMostPasses && pages > kFewPages; pass++) {
        pages = pass_all(tracked, threads);
    }
}

// What processes have in common with their parents needs no room.
void leave_out_common(std::map<pid_t, uint64_t>& sizes, unsigned threads) {
    by_generation(threads, generations(pids_of(sizes)), [&](const Kin& kin, unsigned) {
        uint64_t& bytes = sizes.at(kin.pid);
        if (kin.parent)
            bytes -= std::min(bytes, common_pages(kin.pid, kin.parent) * kPage);
    });
}

Files prepare(const std::string& folder, unsigned threads, int count, char** words,
              AllTracked& tracked) {
    Files files;
    std::vector<Piece> pieces;
    std::map<pid_t, uint64_t> sizes;
    for (int i = 0; i < count; i++) {
        char* end;
        const pid_t pid = static_cast<pid_t>(strtol(words[i], &end, 10));
        const uint64_t bytes = strtoull(*end == ':' ? end + 1 : end, &end, 10) / kPage * kPage;
        if (*end == ':')
            tracked[pid] = std::make_unique<Tracked>(pid, atoi(end + 1), folder);
        else
            sizes[pid] = bytes;
    }
    leave_out_common(sizes, threads);
    for (const auto& [pid, bytes] : sizes) {
        auto file = std::make_unique<PageFile>(folder, static_cast<uint32_t>(files.size()) + 1);
        if (bytes && file->reserve(bytes))
            for (uint64_t at = 0; at < bytes; at += kPiece)
                pieces.push_back({file.get(), at, std::min(kPiece, bytes - at)});
        files[pid] = std::move(file);
    }
    populate(pieces, threads);
    copy_early(tracked, threads);
    return files;
}

int run(int count, char** words) {
    const int socket = atoi(words[0]);
    const std::string folder = words[1];
    const unsigned threads = static_cast<unsigned>(std::max(1, atoi(words[2])));
    const Telling telling = {atoi(words[3]), atoi(words[4])}; // see server.h
    const auto began = Clock::now();
    // A file for each process and each piece of shared memory.
    rlimit files_limit;
    if (getrlimit(RLIMIT_NOFILE, &files_limit) == 0) {
        files_limit.rlim_cur = files_limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files_limit);
    }
    AllTracked tracked;
    Files files = prepare(folder, threads, count - 5, words + 5, tracked);
    const double preparing = std::chrono::duration<double>(Clock::now() - began).count();
    Server server(socket, folder, threads, telling, std::move(files), std::move(tracked));
    puts("ready");
    fflush(stdout);
    const Totals totals = server.serve();
    std::string inherited;
    for (const auto& [pid, bytes] : totals.inherited)
        inherited += (inherited.empty() ? "\"" : ", \"") + std::to_string(pid) +
                     "\": " + std::to_string(bytes);
    printf("{\"files\": %llu, \"bytes\": %llu, \"zero_bytes\": %llu, \"entries\": %llu, "
           "\"still_bytes\": %llu, \"copied_twice\": %llu, \"early_bytes\": %llu, "
           "\"compared_bytes\": %llu, "
           "\"mended_bytes\": %llu, \"inherited\": {%s}, \"preparing_seconds\": %.6f, "
           "\"seconds\": %.6f, \"tail_seconds\": %.6f}\n",
           static_cast<unsigned long long>(totals.files),
           static_cast<unsigned long long>(totals.bytes),
           static_cast<unsigned long long>(totals.zero_bytes),
           static_cast<unsigned long long>(totals.entries),
           static_cast<unsigned long long>(totals.still_bytes),
           static_cast<unsigned long long>(totals.copied_twice),
           static_cast<unsigned long long>(totals.early_bytes),
           static_cast<unsigned long long>(totals.compared_bytes),
           static_cast<unsigned long long>(totals.mended_bytes), inherited.c_str(), preparing,
           totals.seconds, totals.tail);
    fflush(stdout);
    return 0;
}

} // namespace
} // namespace pages

int main(int count, char** words) {
    if (count < 6) {
        fputs("usage: flowgpu-pages SOCKET FOLDER THREADS FILE SAID [PID:BYTES[:DESCRIPTOR]]...\n",
              stderr);
        return 2;
    }
    // The end of its connection ends it; a terminal's signals are for the job.
    for (int number : {SIGHUP, SIGINT, SIGTERM, SIGPIPE})
        signal(number, SIG_IGN);
    try {
        return pages::run(count - 1, words + 1);
    } catch (const pages::Gone& error) {
        fprintf(stderr, "%s\n", error.what());
        return 3;
    } catch (const std::exception& error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
