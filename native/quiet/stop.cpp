#include "stop.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace quiet {

std::string read_file(const std::string& path) {
    std::string text;
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return text;
    char buffer[1 << 16];
    ssize_t count;
    while ((count = read(fd, buffer, sizeof buffer)) > 0)
        text.append(buffer, static_cast<size_t>(count));
    close(fd);
    return text;
}

std::vector<pid_t> list_threads(pid_t pid) {
    std::vector<pid_t> found;
    DIR* folder = opendir(("/proc/" + std::to_string(pid) + "/task").c_str());
    if (!folder)
        return found;
    while (dirent* entry = readdir(folder))
        if (entry->d_name[0] != '.')
            found.push_back(atoi(entry->d_name));
    closedir(folder);
    return found;
}

namespace {

// A thread that has ended is listed until its process is gone; it has no memory any more.
bool has_ended(pid_t tid) {
    std::string status = read_file("/proc/" + std::to_string(tid) + "/status");
    return status.empty() || status.find("\nVmSize:") == std::string::npos;
}

} // namespace

bool is_event_stop(int status) {
    return WIFSTOPPED(status) && status >> 16 == PTRACE_EVENT_STOP;
}

bool is_syscall_stop(int status) {
    return WIFSTOPPED(status) && WSTOPSIG(status) == (SIGTRAP | 0x80);
}

bool wait_stop(pid_t tid, int& status, Clock::time_point deadline) {
    for (int tries = 0;; tries++) {
        pid_t found = waitpid(tid, &status, __WALL | WNOHANG);
        if (found == tid)
            return WIFSTOPPED(status);
        if (found < 0 && errno != EINTR)
            return false;
        if (tries > 200)
            usleep(20);
        else
            sched_yield();
        if (tries % 64 != 63)
            continue;
        // The end of a first thread is told only after that of all others, which we hold.
        if (has_ended(tid))
            return false;
        if (Clock::now() > deadline)
            throw Failure("thread " + std::to_string(tid) + " does not stop");
    }
}

Held::~Held() {
    for (pid_t tid : stopped_)
        ptrace(PTRACE_DETACH, tid, nullptr, nullptr);
}

void Held::seize(pid_t pid, pid_t tid, std::vector<pid_t>& begun) {
    if (ptrace(PTRACE_SEIZE, tid, nullptr, PTRACE_O_TRACESYSGOOD) != 0) {
        int error = errno;
        if (error == ESRCH || has_ended(tid))
            return;
        throw Failure("process " + std::to_string(pid) + " cannot be held: " + strerror(error));
    }
    begun.push_back(tid);
    ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr);
}

void Held::await(pid_t tid) {
    int status;
    while (wait_stop(tid, status, deadline_)) {
        if (is_event_stop(status)) {
            stopped_.insert(tid);
            return;
        }
        // A signal that was under way: delivered, and the stop follows before any instruction.
        ptrace(PTRACE_CONT, tid, nullptr, static_cast<long>(WSTOPSIG(status)));
    }
}

void Held::hold(pid_t pid) {
    std::set<pid_t> known;
    for (bool again = true; again;) {
        again = false;
        std::vector<pid_t> begun;
        for (pid_t tid : list_threads(pid))
            if (known.insert(tid).second) {
                seize(pid, tid, begun);
                again = true; // it may have started another before it stopped
            }
        for (pid_t tid : begun)
            await(tid);
    }
}

std::vector<pid_t> Held::threads(pid_t pid) const {
    std::vector<pid_t> found;
    for (pid_t tid : list_threads(pid))
        if (stopped_.count(tid))
            found.push_back(tid);
    return found;
}

bool Held::shares_memory(pid_t pid, const std::vector<pid_t>& held) const {
    std::string base = "/proc/" + std::to_string(pid) + "/task/";
    for (pid_t tid : list_threads(pid)) {
        std::istringstream children(read_file(base + std::to_string(tid) + "/children"));
        for (pid_t child; children >> child;) {
            if (std::find(held.begin(), held.end(), child) != held.end())
                continue;
            if (syscall(SYS_kcmp, pid, child, KCMP_VM, 0, 0) == 0)
                return true;
        }
    }
    return false;
}

} // namespace quiet
