// A plugin of CRIU's for containers whose tasks use a GPU. Who dumps the container asks the job's
// coordinator for nothing, so CRIU does it here: before it stops the tree, before a restore has
// made a process, and before it lets the processes go.
//
// CRIU loads it from the job's folder (flowgpu/container.py), beside whose control.sock it finds
// the coordinator. The connection stays open until CRIU has ended: by that the coordinator knows
// when the dump is over, however it ends.
//
// Takes nothing but names from the C library it meets, which is the one that CRIU comes with.
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "interface.h"

// CRIU's own, which a plugin may call.
extern "C" {
int criu_get_image_dir(void);
void print_on_level(unsigned level, const char* format, ...);
int add_inventory_plugin(const char* name);
bool check_and_remove_inventory_plugin(const char* name, size_t length);
}

namespace {

using namespace flowgpu::criu;

constexpr unsigned kError = 1, kInfo = 3; // of CRIU's log
constexpr char kName[] = "flowgpu-container";

bool g_wanted = false; // in this run of CRIU
int g_coordinator = -1;
int g_result = 0; // of what was asked
bool g_has_tasks = false;
int g_doomed = 0; // process id

int failed(const char* what) {
    print_on_level(kError, "Error (flowgpu): %s\n", what);
    return -EIO;
}

// The folder two above this library: of the job.
bool connect_to(int fd) {
    Dl_info about;
    if (!dladdr(reinterpret_cast<void*>(&connect_to), &about) || !about.dli_fname)
        return false;
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    const char* end = strrchr(about.dli_fname, '/');
    const int folder = end ? static_cast<int>(end - about.dli_fname) : 0;
    const int length = snprintf(name.sun_path, sizeof name.sun_path, "%.*s/../control.sock", folder,
                                about.dli_fname);
    return folder > 0 && length < static_cast<int>(sizeof name.sun_path) &&
           connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0;
}

// Where CRIU's images are; as it stands in JSON, so that some characters cannot be in it.
bool images(char* path, size_t size) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", criu_get_image_dir());
    const ssize_t length = readlink(link, path, size - 1);
    if (length <= 0 || length >= static_cast<ssize_t>(size) - 1)
        return false;
    path[length] = 0;
    for (const char* at = path; *at; at++)
        if (*at == '"' || *at == '\\' || static_cast<unsigned char>(*at) < ' ')
            return false;
    return true;
}

// The event that ends the answer: 0 for a result.
int answer(int fd) {
    static char line[4096];
    size_t used = 0;
    for (;;) {
        char one;
        const ssize_t got = read(fd, &one, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return failed("the job's coordinator has ended");
        if (one != '\n') {
            if (used < sizeof line - 1)
                line[used++] = one;
            continue;
        }
        line[used] = 0;
        if (strstr(line, "\"event\": \"result\"")) {
            g_has_tasks = !strstr(line, "\"tasks\": 0");
            return 0;
        }
        if (strstr(line, "\"event\": \"error\""))
            return failed(line);
        used = 0;
    }
}

// Once, however many tasks there are.
int ask(const char* verb, int pid) {
    char path[2048], request[2304];
    if (!images(path, sizeof path))
        return failed("the folder of the images has a name that cannot be passed on");
    const int fd = g_coordinator = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || !connect_to(fd))
        return failed("no coordinator of the job is there: `flowgpu container NAME` starts one");
    const int length =
        snprintf(request, sizeof request, "{\"verb\": \"%s\", \"pid\": %d, \"images\": \"%s\"}\n",
                 verb, pid, path);
    if (write(fd, request, static_cast<size_t>(length)) != length)
        return failed("the job's coordinator takes no request");
    print_on_level(kInfo, "flowgpu: %s\n", verb);
    return answer(fd);
}

int pause_devices(int pid) {
    if (!g_wanted || g_coordinator >= 0)
        return g_result;
    g_result = ask("hand-over", pid);
    // What has no GPU needs no plugin to be restored.
    if (g_result == 0 && g_has_tasks)
        g_result = add_inventory_plugin(kName);
    return g_result;
}

// What fails here CRIU would not mind, and the job would wait for its GPU for ever.
int resume_devices(int pid) {
    static bool told = false;
    if (!g_wanted)
        return 0;
    if (!told) {
        told = true;
        char line[32];
        const int length = snprintf(line, sizeof line, "{\"pid\": %d}\n", pid);
        g_result = write(g_coordinator, line, static_cast<size_t>(length)) == length
                       ? answer(g_coordinator)
                       : failed("the job's coordinator has ended");
    }
    if (g_result != 0 && !g_doomed)
        g_doomed = pid;
    return g_result;
}

// The first process of the container, when all are let go: CRIU would wait for ever for one that is
// killed before.
void end(int, int) {
    if (g_doomed)
        kill(g_doomed, SIGKILL);
}

int begin(int stage) {
    if (stage == kRestoreStage && check_and_remove_inventory_plugin(kName, strlen(kName)))
        g_wanted = (g_result = ask("take-back", 0)) == 0;
    else
        g_wanted = stage == kDumpStage;
    return g_result;
}

} // namespace

extern "C" __attribute__((visibility("default"))) Plugin CR_PLUGIN_DESC;
Plugin CR_PLUGIN_DESC = {
    kName, begin, end, kInterface, kHooks, {},
};

// CRIU has no hooks of ours before its loader has called this.
__attribute__((constructor)) static void fill_in() {
    CR_PLUGIN_DESC.hooks[kPauseDevices] = hook(pause_devices);
    CR_PLUGIN_DESC.hooks[kResumeDevicesLate] = hook(resume_devices);
}
