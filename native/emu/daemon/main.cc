// flowgpu-emud: the emulated device. It holds all device state of its clients, and nothing else
// does: what a process had on the device is gone when its connection is.
#include "server.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

constexpr const char* kUsage =
    "usage: flowgpu-emud [--socket PATH] [--devices N] [--memory BYTES] [--context BYTES]\n"
    "                    [--name TEXT] [--capability M.N] [--idle SECONDS]\n"
    "                    [--kernel-delay US] [--copy-delay US] [--log FILE]\n"
    "                    [--write-log FILE] [--peers 0|1]\n"
    "                    [--background]\n"
    "Each option has an environment variable: FLOWGPU_EMU_SOCKET, _DEVICES, _MEMORY,\n"
    "_CONTEXT, _NAME, _CAPABILITY, _IDLE, _KERNEL_DELAY, _COPY_DELAY, _LOG, _WRITE_LOG,\n"
    "_PEERS. BYTES may end in K, M, G or T.\n"
    "The device ends when it had no client for the idle time; 0 keeps it.\n";

bool parse_bytes(const std::string& text, uint64_t* out) {
    char* end = nullptr;
    uint64_t value = std::strtoull(text.c_str(), &end, 10);
    const std::string units = "KMGT";
    if (*end != '\0') {
        const size_t unit = units.find(*end);
        if (unit == std::string::npos || end[1] != '\0') {
            return false;
        }
        value <<= 10 * (unit + 1);
    }
    *out = value / kGranularity * kGranularity;
    return *out != 0;
}

// "9.0": 90. The interpreter's instructions are those of 8.0.
bool parse_capability(const std::string& text, uint32_t* out) {
    unsigned major = 0, minor = 0;
    char end = '\0';
    if (std::sscanf(text.c_str(), "%2u.%1u%c", &major, &minor, &end) != 2 || major < 8) {
        return false;
    }
    *out = 10 * major + minor;
    return true;
}

bool set_option(Config& config, const std::string& key, const std::string& value) {
    if (key == "socket") {
        config.socket = value;
    } else if (key == "devices") {
        config.devices = std::atoi(value.c_str());
        return config.devices >= 0 && config.devices <= 32;
    } else if (key == "memory") {
        return parse_bytes(value, &config.memory);
    } else if (key == "context") {
        return parse_bytes(value, &config.context_memory);
    } else if (key == "name") {
        config.name = value;
    } else if (key == "capability") {
        return parse_capability(value, &config.architecture);
    } else if (key == "idle") {
        config.idle_seconds = std::atoi(value.c_str());
    } else if (key == "kernel-delay") {
        config.kernel_delay_us = std::atoi(value.c_str());
    } else if (key == "copy-delay") {
        config.copy_delay_us = std::atoi(value.c_str());
    } else if (key == "log") {
        config.log = value;
    } else if (key == "write-log") {
        config.write_log = value;
    } else if (key == "peers") {
        config.peers = value != "0";
    } else {
        return false;
    }
    return true;
}

bool read_environment(Config& config) {
    for (const char* key : {"socket", "devices", "memory", "context", "name", "capability", "idle",
                            "kernel-delay", "copy-delay", "log", "write-log", "peers"}) {
        std::string variable = "FLOWGPU_EMU_";
        for (const char* c = key; *c != '\0'; ++c) {
            variable += *c == '-' ? '_' : static_cast<char>(*c - 'a' + 'A');
        }
        const char* value = std::getenv(variable.c_str());
        if (value != nullptr && *value != '\0' && !set_option(config, key, value)) {
            std::fprintf(stderr, "flowgpu-emud: bad value in %s: %s\n", variable.c_str(), value);
            return false;
        }
    }
    return true;
}

bool read_arguments(Config& config, int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        if (argument == "--background") {
            config.background = true;
        } else if (argument.rfind("--", 0) != 0 || i + 1 >= count ||
                   !set_option(config, argument.substr(2), arguments[++i])) {
            std::fputs(kUsage, stderr);
            return false;
        }
    }
    return true;
}

// The path is taken over only from a device that no longer answers.
UniqueFd listen_at(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!listener || path.empty() || path.size() >= sizeof address.sun_path) {
        return UniqueFd();
    }
    std::memcpy(address.sun_path, path.c_str(), path.size());
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::connect(listener.get(), generic, sizeof address) == 0) {
        std::fprintf(stderr, "flowgpu-emud: a device already listens at %s\n", path.c_str());
        return UniqueFd();
    }
    ::unlink(path.c_str());
    const mode_t mask = ::umask(0077);
    const bool bound =
        ::bind(listener.get(), generic, sizeof address) == 0 && ::listen(listener.get(), 128) == 0;
    ::umask(mask);
    if (!bound) {
        std::perror("flowgpu-emud: cannot listen");
        return UniqueFd();
    }
    return listener;
}

// The first process ends now that the socket listens; what goes on belongs to no one's tree.
bool go_to_background() {
    const pid_t child = ::fork();
    if (child < 0) {
        return false;
    }
    if (child > 0) {
        ::_exit(0);
    }
    ::setsid();
    if (::chdir("/") != 0) {
        return false;
    }
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; fd < 3; ++fd) {
        ::dup2(null, fd);
    }
    ::close(null);
    return true;
}

// Clients connect and start a device under this lock, so one that decides to end takes it as well:
// nobody connects between the last look and the end. It ends with the process.
bool end_idle(const Config& config, int listener, const struct stat& own) {
    const std::string path = config.socket;
    UniqueFd lock(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
        return false;
    }
    pollfd waiting{listener, POLLIN, 0};
    if (::poll(&waiting, 1, 0) > 0) {
        return false;
    }
    // The folder may have been made anew, with another device's socket.
    struct stat there{};
    if (::stat(path.c_str(), &there) == 0 && there.st_ino == own.st_ino &&
        there.st_dev == own.st_dev) {
        ::unlink(path.c_str());
    }
    lock.release();
    return true;
}

int serve(Machine& machine, int listener) {
    Server server(&machine);
    const Config& config = machine.config();
    struct stat own{};
    ::stat(config.socket.c_str(), &own);
    auto busy = Clock::now(), looked = busy;
    for (;;) {
        constexpr std::chrono::milliseconds kLook(500);
        pollfd waiting{listener, POLLIN, 0};
        if (::poll(&waiting, 1, kLook.count()) > 0) {
            UniqueFd peer(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
            if (peer) {
                server.serve(std::move(peer));
            }
            busy = Clock::now();
            if (busy - looked < kLook) {
                continue;
            }
        }
        looked = Clock::now();
        const bool held = machine.reap();
        if (server.connections() > 0 || held) {
            busy = Clock::now();
        } else if (config.idle_seconds > 0 &&
                   Clock::now() - busy > std::chrono::seconds(config.idle_seconds) &&
                   end_idle(config, listener, own)) {
            machine.log("no client for the idle time: the device ends");
            std::fflush(nullptr);
            ::_exit(0);
        }
    }
}

// The device serves other jobs than the one whose limits (`ulimit`) it was started with.
void lift_limits() {
    for (const auto limit : {RLIMIT_FSIZE, RLIMIT_AS, RLIMIT_DATA, RLIMIT_CPU}) {
        const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
        rlimit own;
        if (::setrlimit(limit, &none) != 0 && ::getrlimit(limit, &own) == 0) {
            own.rlim_cur = own.rlim_max;
            ::setrlimit(limit, &own);
        }
    }
}

} // namespace

} // namespace flowgpu::emu

int main(int count, char** arguments) {
    using namespace flowgpu::emu;
    lift_limits();
    Config config;
    if (!read_environment(config) || !read_arguments(config, count, arguments)) {
        return 2;
    }
    config.socket = socket_path(config.socket.c_str());
    UniqueFd listener = listen_at(config.socket);
    if (!listener) {
        return 1;
    }
    // Whatever descriptors the starting process left open are not the device's to keep.
    const int own = listener.get();
    for (int fd = 3; fd < own; ++fd) {
        ::close(fd);
    }
    ::close_range(static_cast<unsigned>(own) + 1, ~0u, 0);
    if (config.background && !go_to_background()) {
        return 1;
    }
    ::signal(SIGPIPE, SIG_IGN);
    Machine machine(config);
    return serve(machine, listener.get());
}
