#include "service.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <unistd.h>

#include "background.h"
#include "channel.h"
#include "communicators.h"
#include "entrance.h"
#include "fault.h"
#include "fork.h"
#include "gate.h"
#include "ipc.h"
#include "line.h"
#include "managed.h"
#include "memstub.h"
#include "nvml.h"
#include "proc.h"
#include "replay/engine.h"
#include "replay/record.h"
#include "requests.h"
#include "task.h"

namespace flowgpu::service {

namespace {

constexpr int kDetachedRetryMs = 2; // during a checkpoint: a restored job waits for this
constexpr int kIdleRetryMs = 200;   // the coordinator is gone; a new one may take the job over
constexpr int kLookMs = 1000;       // whether descriptors of ours are still there

char path[sizeof(sockaddr_un::sun_path) + 1]; // of the coordinator's socket, as at the start
int coordinator = -1;                         // closed by a forked child
bool detached = false;
bool joined_at_start = false;
Packet packet; // the service thread's alone, once there is one

flowgpu_reply make_reply(uint32_t request) {
    flowgpu_reply reply = {};
    reply.header = make_header(FLOWGPU_REPLY, sizeof reply);
    reply.request = request;
    reply.status = FLOWGPU_OK;
    return reply;
}

void close_socket(int& socket) {
    if (socket >= 0)
        close(socket);
    socket = -1;
}

void close_in_child() {
    close_socket(coordinator);
    close_handover();
    entrance::leave();
    line::close_in_child();
}

// A thread that the driver starts takes over which signals its maker blocks, and the service thread
// blocks all. One is let in, by which replay can end the driver's threads: the highest that the
// program's first thread takes too, as threads that the program has the driver start do.
class SignalForThreads {
  public:
    SignalForThreads() {
        sigset_t one;
        sigemptyset(&one);
        if (replay::asked_for()) {
            const uint64_t blocked = proc::blocked_signals(getpid());
            int signal = SIGRTMAX;
            while (signal > SIGRTMIN && blocked >> (signal - 1) & 1)
                signal--;
            if (!(blocked >> (signal - 1) & 1))
                sigaddset(&one, signal);
        }
        pthread_sigmask(SIG_UNBLOCK, &one, &before_);
    }
    ~SignalForThreads() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalForThreads(const SignalForThreads&) = delete;
    SignalForThreads& operator=(const SignalForThreads&) = delete;

  private:
    sigset_t before_;
};

constexpr struct {
    flowgpu_message type;
    Request* answer;
} kRequests[] = {
    {FLOWGPU_EXPORT, on_export},   {FLOWGPU_GATE, on_gate},       {FLOWGPU_HANDOVER, on_handover},
    {FLOWGPU_LEND, on_lend},       {FLOWGPU_MAPBACK, on_mapback}, {FLOWGPU_OPEN, on_open},
    {FLOWGPU_DROP, on_drop},       {FLOWGPU_ROOM, on_room},       {FLOWGPU_ASK, on_ask},
    {FLOWGPU_STRIP, on_strip},     {FLOWGPU_KEEP, on_keep},       {FLOWGPU_REBUILD, on_rebuild},
    {FLOWGPU_DETACH, on_detach},   {FLOWGPU_WATCH, on_watch},     {FLOWGPU_WRITTEN, on_written},
    {FLOWGPU_MANAGED, on_managed}, {FLOWGPU_RENEW, on_renew},
};

void unknown(Packet&, flowgpu_reply& reply) {
    fail(reply, FLOWGPU_PROTOCOL, "unknown request");
}

Request* request_of(uint16_t type) {
    for (const auto& row : kRequests)
        if (row.type == type)
            return row.answer;
    return unknown;
}

// Answers one request. False: the connection is to be closed.
bool answer() {
    const uint16_t type = packet.header().type;
    if (fires(Fault::at_task_request)) {
        packet.close_fds();
        return false;
    }
    const SignalForThreads signal;
    flowgpu_reply reply = make_reply(type);
    request_of(type)(packet, reply);
    packet.close_fds();
    const bool done = reply.status == FLOWGPU_OK;
    if (done && (type == FLOWGPU_OPEN || type == FLOWGPU_WATCH))
        detached = false;
    if (done && type == FLOWGPU_DETACH)
        detached = true;
    const bool sent =
        !fires(Fault::at_task_reply) && send_packet(coordinator, &reply, sizeof reply);
    if (!gate::is_closed()) // who was answered need not wait for that
        nvml::come_back();
    return sent && !(done && type == FLOWGPU_DETACH);
}

// True while only a coordinator can let the task go on.
bool waiting() {
    return detached || replay::stripped() || managed::away() || !task().memory.all_present();
}

// Gives HELLO's field `resumed` (wire.h).
uint32_t resumed() {
    replay::become_copy();
    return waiting() ? replay::keeps() ? 2 : 1 : 0;
}

bool greet() {
    flowgpu_hello hello = {};
    hello.header = make_header(FLOWGPU_HELLO, sizeof hello);
    hello.pid = static_cast<uint32_t>(getpid());
    hello.resumed = resumed();
    hello.replay = replay::asked_for() ? 3 : 0; // whether it could be prepared is for ASK to say
    const Token token = ipc::token();
    hello.token_low = token.low;
    hello.token_high = token.high;
    int version = 0, devices = 0;
    if (!hello.resumed) { // a stripped process cannot answer
        FG_REAL(cuDriverGetVersion)(&version);
        FG_REAL(cuDeviceGetCount)(&devices);
    }
    hello.driver_version = static_cast<uint32_t>(version);
    hello.device_count = static_cast<uint32_t>(devices);
    int fds[3];
    size_t count = 0;
    for (const int fd : {task().page_fd, memstub::live_fd(), communicators::counts_fd()})
        if (fd >= 0 && task().page_fd >= 0)
            fds[count++] = fd;
    return send_packet(coordinator, &hello, sizeof hello, fds, count);
}

// The connection ended without DETACH: the coordinator is gone. What the task still holds goes on.
void lost() {
    close_handover();
    if (waiting())
        return; // the ghost has the memory; only a coordinator can bring it back
    communicators::open();
    task().forget_drain();
    if (gate::mode() != FLOWGPU_GATE_OPEN)
        open_gate();
    nvml::come_back();
}

// A coordinator that has called will do so again. Else the task is one of a coordinator that
// cannot, or is new.
int next_connection(int milliseconds) {
    if (line::rings(milliseconds)) {
        ManyDescriptors many;
        return line::take(&packet);
    }
    return line::used() ? -1 : connect_seqpacket(path);
}

// False: the connection has ended, or a coordinator calls because it has none. The program may
// close descriptors that it does not know, which nobody is told of.
bool receive_request() {
    for (;;) {
        pollfd wait[] = {{coordinator, POLLIN, 0}, {line::end(), POLLIN, 0}};
        const int ready = poll(wait, 2, kLookMs);
        if (ready <= 0) {
            line::mend();
            continue;
        }
        if (wait[0].revents & POLLNVAL)
            coordinator = -1; // soon the program's
        if (wait[0].revents & POLLIN) {
            ManyDescriptors many;
            return receive_packet(coordinator, &packet) == Received::ok;
        }
        if (wait[0].revents || wait[1].revents == POLLIN)
            return false;
        line::mend();
    }
}

bool join(int milliseconds) {
    coordinator = next_connection(milliseconds);
    const bool greeted = coordinator >= 0 && greet();
    if (greeted)
        entrance::leave();
    return greeted;
}

void* serve(void*) {
    prctl(PR_SET_NAME, "flowgpu");
    gate::exempt();
    int pause_ms = 0;
    for (bool greeted = joined_at_start;; greeted = join(pause_ms)) {
        bool asked = false;
        while (greeted && receive_request()) {
            asked = true;
            if (!answer())
                break;
        }
        close_socket(coordinator);
        if (greeted)
            lost();
        // Nobody listens, or a coordinator would not have us (it may be another version): asked
        // without a pause, both would do nothing else.
        pause_ms = asked ? 0 : waiting() ? kDetachedRetryMs : kIdleRetryMs;
    }
    return nullptr;
}

void start_thread() {
    // Copied: the program may write over its environment, as a process title does.
    const char* named = getenv("FLOWGPU_SOCKET");
    if (!named || !*named)
        return;
    snprintf(path, sizeof path, "%s", named);
    fork_guard::install(close_in_child);
    task().make_page();
    line::mend();
    // Before the program goes on: it may forbid itself what this takes, on pain of death.
    joined_at_start = join(0);
    if (!start_in_background(serve, nullptr))
        entrance::leave();
}

} // namespace

void start() {
    static pthread_once_t started = PTHREAD_ONCE_INIT;
    int error = errno;
    pthread_once(&started, start_thread);
    errno = error;
}

} // namespace flowgpu::service
