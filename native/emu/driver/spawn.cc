// Finds the emulated device, or starts it: once, however many processes ask at the same moment.
#include "client.h"

#include <climits>
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace flowgpu::emu {

namespace {

int try_connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path) {
        return -1;
    }
    std::memcpy(address.sun_path, path.c_str(), path.size());
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
        return -1;
    }
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        (peer.uid != ::getuid() && peer.uid != 0)) {
        return -1;
    }
    return fd.release();
}

// FLOWGPU_EMUD, else beside this library: lib/emu/libcuda.so.1 and bin/flowgpu-emud.
std::string device_program() {
    if (const char* set = std::getenv("FLOWGPU_EMUD"); set != nullptr && *set != '\0') {
        return set;
    }
    Dl_info info{};
    if (::dladdr(reinterpret_cast<void*>(&device_program), &info) == 0) {
        return {};
    }
    char real[PATH_MAX];
    std::string folder = ::realpath(info.dli_fname, real) != nullptr ? real : info.dli_fname;
    folder.resize(folder.rfind('/') == std::string::npos ? 0 : folder.rfind('/'));
    for (const char* relative : {"/flowgpu-emud", "/../flowgpu-emud", "/../../bin/flowgpu-emud"}) {
        std::string candidate = folder + relative;
        if (::access(candidate.c_str(), X_OK) == 0) {
            return candidate;
        }
    }
    return {};
}

// The program puts itself in the background and its first process exits when the socket listens,
// so the device is nobody's child here: a process tree that is dumped does not contain it.
bool start_device(const std::string& path) {
    std::string program = device_program();
    if (program.empty()) {
        return false;
    }
    std::vector<char*> environment;
    for (char** e = environ; e != nullptr && *e != nullptr; ++e) {
        // A preloaded interception library has no business in the device.
        if (std::strncmp(*e, "LD_PRELOAD=", 11) != 0 &&
            std::strncmp(*e, "FLOWGPU_SOCKET=", 15) != 0) {
            environment.push_back(*e);
        }
    }
    char no_job[] = "FLOWGPU_SOCKET="; // or native/exec would add it
    environment.push_back(no_job);
    environment.push_back(nullptr);
    std::string socket = path;
    char flag_socket[] = "--socket";
    char flag_background[] = "--background";
    char* arguments[] = {program.data(), flag_socket, socket.data(), flag_background, nullptr};
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    sigset_t none;
    sigset_t every;
    ::sigemptyset(&none);
    ::sigfillset(&every);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setsigdefault(&attributes, &every);
    ::posix_spawnattr_setflags(&attributes,
                               POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
    pid_t child = -1;
    const int failed =
        ::posix_spawn(&child, program.c_str(), nullptr, &attributes, arguments, environment.data());
    ::posix_spawnattr_destroy(&attributes);
    if (failed != 0) {
        return false;
    }
    int status = 0;
    while (::waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            return true; // the application reaps its children by itself: connecting will tell
        }
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string device_path() {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    if (p.device_path.empty()) {
        p.device_path = socket_path(std::getenv("FLOWGPU_EMU_SOCKET"));
    }
    return p.device_path;
}

} // namespace

int connect_device() {
    const std::string path = device_path();
    if (path.empty()) {
        return -1;
    }
    UniqueFd lock(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    // An idle device that is about to end has it. It may be another user's, who has the file.
    if (lock) {
        ::flock(lock.get(), LOCK_SH);
    }
    if (const int fd = try_connect(path); fd >= 0) {
        return fd;
    }
    if (!lock || ::flock(lock.get(), LOCK_EX) != 0) {
        return -1;
    }
    if (const int fd = try_connect(path); fd >= 0) {
        return fd;
    }
    if (!start_device(path)) {
        return -1;
    }
    // The application may have reaped the starting process before us: allow for a late listen.
    for (int i = 0; i < 200; ++i) {
        if (const int fd = try_connect(path); fd >= 0) {
            return fd;
        }
        ::usleep(10000);
    }
    return -1;
}

} // namespace flowgpu::emu
