#include "service.h"

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

#include "addresses.h"
#include "background.h"
#include "channel.h"
#include "contexts.h"
#include "entrance.h"
#include "fault.h"
#include "fork.h"
#include "gate.h"
#include "line.h"
#include "memstub.h"
#include "nvml.h"
#include "pinned.h"
#include "pools.h"
#include "proc.h"
#include "replay/arrays.h"
#include "replay/engine.h"
#include "replay/record.h"
#include "rewind.h"
#include "task.h"

namespace flowgpu::service {

namespace {

constexpr int kDetachedRetryMs = 2; // during a checkpoint: a restored job waits for this
constexpr int kIdleRetryMs = 200;   // the coordinator is gone; a new one may take the job over
constexpr int kLookMs = 1000;       // whether descriptors of ours are still there
constexpr int kGhostAnswerMs = 60'000;
constexpr std::chrono::seconds kNameTaken(5);
constexpr std::chrono::milliseconds kNameLook(20);
constexpr rlim_t kManyFiles = 1 << 16;

char path[sizeof(sockaddr_un::sun_path) + 1]; // of the coordinator's socket, as at the start
int coordinator = -1;                         // the sockets are closed by a forked child
int handover = -1;
bool detached = false;
bool filtered_at_start = false; // by seccomp(2)
bool joined_at_start = false;
Packet packet; // the service thread's alone, once there is one

// Makes a context current in this thread for driver calls that want one, and takes it away again.
class CurrentContext {
  public:
    CurrentContext() {
        auto contexts = task().memory.contexts();
        if (!contexts.empty())
            FG_REAL(cuCtxSetCurrent)(*contexts.begin());
    }
    ~CurrentContext() { FG_REAL(cuCtxSetCurrent)(nullptr); }
};

// What comes from a coordinator are descriptors, and every block that comes back stays one. There
// may be more than the program may open: its limit is lifted meanwhile, above its highest where the
// process has the right to. What is open then stays open.
class ManyDescriptors {
  public:
    ManyDescriptors() {
        getrlimit(RLIMIT_NOFILE, &programs_);
        lifted_.rlim_cur = lifted_.rlim_max = std::max<rlim_t>(programs_.rlim_max, kManyFiles);
        if (setrlimit(RLIMIT_NOFILE, &lifted_) == 0)
            return;
        lifted_.rlim_cur = lifted_.rlim_max = programs_.rlim_max;
        setrlimit(RLIMIT_NOFILE, &lifted_);
    }
    ~ManyDescriptors() {
        rlimit now;
        if (getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == lifted_.rlim_cur &&
            now.rlim_max == lifted_.rlim_max)
            setrlimit(RLIMIT_NOFILE, &programs_);
    }

  private:
    rlimit programs_ = {};
    rlimit lifted_ = {};
};

flowgpu_reply make_reply(uint32_t request) {
    flowgpu_reply reply = {};
    reply.header = make_header(FLOWGPU_REPLY, sizeof reply);
    reply.request = request;
    reply.status = FLOWGPU_OK;
    return reply;
}

void fail(flowgpu_reply& reply, flowgpu_status status, const char* detail,
          CUresult result = CUDA_SUCCESS) {
    reply.status = status;
    reply.driver_result = result;
    snprintf(reply.detail, sizeof reply.detail, "%s", detail);
}

void fail_driver(flowgpu_reply& reply, const char* what, CUresult result) {
    const char* name = nullptr;
    FG_REAL(cuGetErrorName)(result, &name);
    char detail[FLOWGPU_DETAIL_BYTES];
    snprintf(detail, sizeof detail, "%s: %s", what, name ? name : "unknown error");
    fail(reply, FLOWGPU_DRIVER, detail, result);
}

void add_totals(flowgpu_reply& reply) {
    MemoryTotals totals = task().memory.totals();
    reply.blocks = totals.blocks;
    reply.block_bytes = totals.block_bytes;
    reply.allocations = totals.allocations;
    reply.allocation_bytes = totals.allocation_bytes;
}

void close_socket(int& socket) {
    if (socket >= 0)
        close(socket);
    socket = -1;
}

void close_handover() {
    close_socket(handover);
}

void close_in_child() {
    close_socket(coordinator);
    close_socket(handover);
    entrance::leave();
    line::close_in_child();
}

// Collects rows and descriptors into packets of FLOWGPU_ROWS_PER_MESSAGE; owns the descriptors
// until they are sent.
class BlockSender {
  public:
    ~BlockSender() { drop(); }
    bool add(const Block& block, int fd) {
        rows_[count_] = flowgpu_block{block.id, block.address, block.bytes,
                                      static_cast<uint32_t>(block.device), 0};
        fds_[count_++] = fd;
        return count_ < FLOWGPU_ROWS_PER_MESSAGE || flush();
    }
    bool flush() {
        if (!count_)
            return true;
        uint32_t bytes =
            static_cast<uint32_t>(sizeof(flowgpu_header) + count_ * sizeof(flowgpu_block));
        message_.header = make_header(FLOWGPU_BLOCKS, bytes, count_);
        memcpy(message_.rows, rows_, count_ * sizeof(flowgpu_block));
        bool sent = send_packet(handover, &message_, bytes, fds_, count_);
        drop();
        return sent;
    }

  private:
    void drop() {
        for (uint32_t i = 0; i < count_; i++)
            close(fds_[i]);
        count_ = 0;
    }
    struct {
        flowgpu_header header;
        flowgpu_block rows[FLOWGPU_ROWS_PER_MESSAGE];
    } message_;
    flowgpu_block rows_[FLOWGPU_ROWS_PER_MESSAGE];
    int fds_[FLOWGPU_ROWS_PER_MESSAGE];
    uint32_t count_ = 0;
};

bool send_blocks(flowgpu_reply& reply) {
    CurrentContext context;
    ManyDescriptors many;
    BlockSender sender;
    CUresult result = task().memory.send_new(
        [&sender](const Block& block, int fd) { return sender.add(block, fd); });
    if (result == CUDA_SUCCESS && !sender.flush())
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result == CUDA_ERROR_OPERATING_SYSTEM)
        fail(reply, FLOWGPU_SYSTEM, "the ghost does not take the memory over");
    else if (result != CUDA_SUCCESS)
        fail_driver(reply, "exporting device memory", result);
    return reply.status == FLOWGPU_OK;
}

bool send_allocations() {
    std::vector<flowgpu_allocation> rows;
    task().memory.for_each_allocation([&rows](const LiveRange& range) {
        rows.push_back(flowgpu_allocation{range.address, range.bytes, range.place});
    });
    static struct {
        flowgpu_header header;
        flowgpu_allocation rows[FLOWGPU_ALLOCATIONS_PER_MESSAGE];
    } message;
    for (size_t start = 0; start < rows.size(); start += FLOWGPU_ALLOCATIONS_PER_MESSAGE) {
        size_t count = std::min<size_t>(FLOWGPU_ALLOCATIONS_PER_MESSAGE, rows.size() - start);
        size_t row_bytes = count * sizeof(flowgpu_allocation);
        uint32_t bytes = static_cast<uint32_t>(sizeof(flowgpu_header) + row_bytes);
        message.header = make_header(FLOWGPU_ALLOCATIONS, bytes, static_cast<uint32_t>(count));
        memcpy(message.rows, rows.data() + start, row_bytes);
        if (!send_packet(handover, &message, bytes))
            return false;
    }
    return true;
}

bool send_live_list() {
    std::vector<uint64_t> ids = task().memory.live_ids();
    static struct {
        flowgpu_header header;
        uint64_t ids[FLOWGPU_IDS_PER_MESSAGE];
    } message;
    for (size_t start = 0; start < ids.size(); start += FLOWGPU_IDS_PER_MESSAGE) {
        size_t count = std::min<size_t>(FLOWGPU_IDS_PER_MESSAGE, ids.size() - start);
        uint32_t bytes = static_cast<uint32_t>(sizeof(flowgpu_header) + count * sizeof(uint64_t));
        message.header = make_header(FLOWGPU_LIVE, bytes, static_cast<uint32_t>(count));
        memcpy(message.ids, ids.data() + start, count * sizeof(uint64_t));
        if (!send_packet(handover, &message, bytes))
            return false;
    }
    flowgpu_header end = make_header(FLOWGPU_END, sizeof end);
    return send_packet(handover, &end, sizeof end);
}

// Names what the engine cannot save, if the program used any of it. `still`: nobody is in the
// driver.
bool refused(flowgpu_reply& reply, uint32_t engine, bool still) {
    if (engine == FLOWGPU_ENGINE_REPLAY && !replay::prepared()) {
        fail(reply, FLOWGPU_REFUSED, replay::why_not());
        return true;
    }
    char names[FLOWGPU_DETAIL_BYTES] = {};
    size_t used = 0;
    auto add = [&](const char* name) {
        int n = snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
        used = std::min(used + static_cast<size_t>(n), sizeof names - 1);
    };
    for (unsigned i = 0; i < kSymbols; i++)
        if (refuses[i] && flowgpu_refused_calls[i].load(std::memory_order_relaxed))
            add(symbol_names[i]);
    if (const char* device = contexts::not_a_whole_gpu())
        add(device);
    if (memstub::communicators())
        add("NCCL communicators (libnccl)");
    if (task().has_managed_variables())
        add("managed variables of a module");
    const uint64_t of_pools = pools::bytes();
    uint64_t of_the_driver = 0;
    {
        // Driver 580 answers CUDA_ERROR_NOT_SUPPORTED when it is to save managed memory.
        Task& t = task();
        std::lock_guard<std::mutex> lock(t.mutex);
        if (!t.managed.empty())
            add("memory from cuMemAllocManaged");
        else if (engine == FLOWGPU_ENGINE_REPLAY && !t.not_plain.empty())
            add("memory from cuMemCreate that is not plain device memory");
        else
            of_the_driver = t.foreign_bytes;
    }
    // It is not known that the driver takes such memory again, as replay has a new driver do.
    if (engine == FLOWGPU_ENGINE_NATIVE && pinned::Gaps(pinned::all()).any())
        add("registered memory of the host that was unmapped, closed or cut");
    // The driver ends with it.
    if (engine == FLOWGPU_ENGINE_REPLAY && of_the_driver > std::max(of_pools, pools::bytes()))
        add("device memory of the driver's or the program's own");
    if (engine == FLOWGPU_ENGINE_REPLAY) {
        const std::string unsaved = replay::unsaved(still);
        if (!unsaved.empty())
            add(unsaved.c_str());
    }
    if (used)
        fail(reply, FLOWGPU_REFUSED, names);
    return used != 0;
}

// The driver has no wait that gives up, and a kernel may run for ever: contexts are drained by a
// thread of their own. One that was given up runs on, and holds the next one back.
class Drain {
  public:
    // CUDA_ERROR_NOT_READY: work was still in flight at the deadline.
    CUresult run_until(std::chrono::steady_clock::time_point deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!ended_.wait_until(lock, deadline, [this] { return !running_; }))
            return CUDA_ERROR_NOT_READY;
        join();
        if (pthread_create(&thread_, nullptr, run, this) != 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
        started_ = running_ = true;
        if (!ended_.wait_until(lock, deadline, [this] { return !running_; }))
            return CUDA_ERROR_NOT_READY;
        join();
        return result_;
    }

  private:
    static void* run(void* self) {
        gate::exempt();
        CUresult result = contexts::drain();
        auto* drain = static_cast<Drain*>(self);
        std::lock_guard<std::mutex> lock(drain->mutex_);
        drain->result_ = result;
        drain->running_ = false;
        drain->ended_.notify_all();
        return nullptr;
    }
    void join() {
        if (started_)
            pthread_join(thread_, nullptr);
        started_ = false;
    }

    std::mutex mutex_;
    std::condition_variable ended_;
    pthread_t thread_ = {};
    bool started_ = false; // and not joined
    bool running_ = false;
    CUresult result_ = CUDA_SUCCESS;
};

void open_gate() {
    replay::forget_kept();
    pools::stay();
    replay::arrays::stay();
    nvml::come_back();
    gate::open();
    task().page.load()->gate = FLOWGPU_GATE_OPEN;
}

void on_export(flowgpu_reply& reply) {
    if (packet.fd_count != 1 || gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "EXPORT carries one descriptor and an open gate");
    close_handover();
    nvml::lead_to_guards();
    handover = packet.take_fd(0);
    task().memory.forget_sent();
    send_blocks(reply);
    add_totals(reply);
}

// Closes the gate where the live bytes are low. The program may have gone on between the look and
// the gate, by a whole step where this thread had to wait for a core: then it is let go again.
bool close_at_low(const flowgpu_gate& request, flowgpu_reply& reply) {
    using std::chrono::microseconds;
    const auto began = std::chrono::steady_clock::now();
    const auto waited = [&] {
        const auto span = std::chrono::steady_clock::now() - began;
        return std::chrono::duration_cast<microseconds>(span);
    };
    if (!request.wait_ms)
        return gate::close(request.timeout_ms);
    const auto longest = microseconds(std::chrono::milliseconds(request.wait_ms));
    const memstub::LiveSum live;
    const auto high = [&] {
        const auto so_far = waited();
        // What the step before had at its lowest may not come again.
        const bool late = so_far >= longest * 3 / 4;
        const uint64_t enough = request.live_bytes + (late ? request.live_bytes / 24 : 0);
        return live.bytes() > enough && so_far < longest;
    };
    bool closed = false;
    prctl(PR_SET_TIMERSLACK, 1UL); // ns; else sleeps are 50 us longer
    do {
        if (closed)
            gate::open();
        while (high())
            std::this_thread::sleep_for(microseconds(20));
        reply.waited_us = static_cast<uint32_t>(waited().count());
        closed = gate::close(request.timeout_ms);
    } while (closed && high());
    prctl(PR_SET_TIMERSLACK, 0UL); // the default
    return closed;
}

void on_gate(flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_gate*>(packet.bytes);
    if (packet.size != sizeof *request || request->engine > FLOWGPU_ENGINE_REPLAY ||
        request->reserved0 || gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "GATE has another form, or the gate is closed");
    if (refused(reply, request->engine, false))
        return;
    const bool closed = close_at_low(*request, reply);
    auto deadline =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(request->timeout_ms);
    if (!closed)
        return fail(reply, FLOWGPU_BUSY,
                    gate::exiting() ? "the program is in exit()"
                                    : "a thread did not leave the driver in time");
    // Read behind the gate: nothing can begin any more, neither a capture nor what is refused.
    // A question of ours may break a capture.
    if (task().captures.load()) {
        open_gate();
        return fail(reply, FLOWGPU_BUSY, "a CUDA graph is being captured");
    }
    if (refused(reply, request->engine, true))
        return open_gate();
    static Drain* drain = new Drain(); // never destroyed, as its thread may outlive main()
    CUresult result = drain->run_until(deadline);
    if (result != CUDA_SUCCESS) {
        open_gate();
        if (result == CUDA_ERROR_NOT_READY)
            return fail(reply, FLOWGPU_BUSY, "work was still in flight");
        return fail_driver(reply, "waiting for the work in flight", result);
    }
    if (request->engine == FLOWGPU_ENGINE_REPLAY &&
        (!pools::copy_out(reply.detail, sizeof reply.detail) ||
         !replay::arrays::copy_out(reply.detail, sizeof reply.detail))) {
        open_gate();
        reply.status = FLOWGPU_REFUSED;
        return;
    }
    if (memstub::is_profiled())
        snprintf(reply.detail, sizeof reply.detail, "what a profiler (CUPTI) had not read yet");
    task().page.load()->gate = FLOWGPU_GATE_CLOSED;
    task().page.load()->threads = gate::thread_count();
}

// LEND: `release` nothing, the task goes on with it.
void on_handover(flowgpu_reply& reply, bool release) {
    if (handover < 0 || !gate::is_closed() || !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "HANDOVER needs EXPORT, a closed gate and the memory");
    if (!send_blocks(reply))
        return;
    if (!send_allocations() || !send_live_list())
        return fail(reply, FLOWGPU_SYSTEM, "the ghost does not take the memory over");
    // Only now may the task let go: the ghost says that it holds every block.
    Received got = receive_packet(handover, &packet, kGhostAnswerMs);
    if (got != Received::ok || packet.header().type != FLOWGPU_END)
        return fail(reply, FLOWGPU_SYSTEM, "the ghost did not confirm that it holds the memory");
    if (release) {
        CurrentContext context;
        CUresult result = task().memory.release_all();
        if (result != CUDA_SUCCESS)
            fail_driver(reply, "letting go of device memory", result);
    }
    add_totals(reply);
}

void on_mapback(flowgpu_reply& reply) {
    close_handover();
    if (packet.fd_count != 1)
        return fail(reply, FLOWGPU_PROTOCOL, "MAPBACK carries one descriptor");
    handover = packet.take_fd(0);
    CurrentContext context;
    ManyDescriptors many;
    Memory& memory = task().memory;
    bool ending = false; // the program is in exit(): its driver has shut down behind the gate
    for (;;) {
        Received got = receive_packet(handover, &packet, kGhostAnswerMs);
        if (got != Received::ok)
            return fail(reply, FLOWGPU_SYSTEM,
                        "the ghost stopped in the middle of giving memory back");
        const flowgpu_header& header = packet.header();
        if (header.type == FLOWGPU_END)
            break;
        bool fits = header.type == FLOWGPU_BLOCKS && header.count == packet.fd_count &&
                    packet.size == sizeof header + header.count * sizeof(flowgpu_block);
        if (!fits) {
            packet.close_fds();
            return fail(reply, FLOWGPU_PROTOCOL, "not a list of blocks");
        }
        auto* rows = reinterpret_cast<const flowgpu_block*>(packet.bytes + sizeof header);
        for (uint32_t i = 0; i < header.count; i++) {
            if (ending)
                continue;
            CUresult result =
                memory.take_back(rows[i].id, rows[i].address, rows[i].bytes, packet.take_fd(i));
            ending = result == CUDA_ERROR_DEINITIALIZED;
            if (result == CUDA_SUCCESS || ending)
                continue;
            packet.close_fds();
            char what[96];
            snprintf(what, sizeof what, "mapping %llu bytes at %#llx",
                     static_cast<unsigned long long>(rows[i].bytes),
                     static_cast<unsigned long long>(rows[i].address));
            return fail_driver(reply, what, result);
        }
        packet.close_fds();
    }
    if (ending) {
        memory.forget_all();
        addresses::taken();
    }
    if (!memory.all_present())
        return fail(reply, FLOWGPU_LOST, "the ghost did not give every block back");
    memory.take_rooms(); // before any program runs on and takes what is free
    close_handover();
    add_totals(reply);
}

void on_ask(flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_ask*>(packet.bytes);
    if (packet.size != sizeof *request || request->engine > FLOWGPU_ENGINE_REPLAY)
        return fail(reply, FLOWGPU_PROTOCOL, "ASK has another form");
    refused(reply, request->engine, false);
}

void on_strip(flowgpu_reply& reply) {
    const Memory& memory = task().memory;
    const bool memory_is_away = !memory.all_present() || memory.totals().blocks == 0;
    if (!gate::is_closed() || !replay::prepared() || replay::stripped() || !memory_is_away)
        return fail(reply, FLOWGPU_PROTOCOL, "STRIP needs HANDOVER and a process prepared for it");
    bool lost = false;
    if (!replay::strip(reply.detail, sizeof reply.detail, &lost))
        reply.status = lost ? FLOWGPU_LOST : FLOWGPU_SYSTEM;
}

void on_keep(flowgpu_reply& reply) {
    if (!gate::is_closed() || !replay::prepared() || replay::stripped() ||
        !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "KEEP needs a closed gate, the memory and CUDA");
    if (!replay::keep(reply.detail, sizeof reply.detail))
        reply.status = FLOWGPU_SYSTEM;
}

void on_rebuild(flowgpu_reply& reply) {
    auto* request = reinterpret_cast<const flowgpu_rebuild*>(packet.bytes);
    const bool others = packet.size == sizeof *request;
    if (others ? request->visible[sizeof request->visible - 1] != '\0'
               : packet.size != sizeof request->header)
        return fail(reply, FLOWGPU_PROTOCOL, "REBUILD has another form");
    // Who asks may not know how far STRIP or another REBUILD came.
    if (!replay::stripped())
        return;
    ManyDescriptors many; // the driver opens its own anew
    if (others && !rewind::see_devices(request->visible))
        return fail(reply, FLOWGPU_SYSTEM, "the driver cannot be told which GPUs to use");
    const auto deadline = std::chrono::steady_clock::now() + kNameTaken;
    while (!replay::rebuild(reply.detail, sizeof reply.detail)) {
        if (!replay::may_come_later() || std::chrono::steady_clock::now() > deadline) {
            reply.status = FLOWGPU_SYSTEM;
            return;
        }
        std::this_thread::sleep_for(kNameLook);
    }
    pools::driver_is_new();
    replay::arrays::driver_is_new();
}

// With the program's memory, or without where it has none and nobody gave any back.
bool finish_rebuild(flowgpu_reply& reply) {
    const bool finished = replay::finish(reply.detail, sizeof reply.detail) &&
                          replay::arrays::copy_back(reply.detail, sizeof reply.detail);
    if (!finished)
        reply.status = FLOWGPU_SYSTEM;
    return finished;
}

void on_open(flowgpu_reply& reply) {
    if (replay::stripped() || !task().memory.all_present())
        return fail(reply, FLOWGPU_PROTOCOL, "the gate stays closed until all memory is mapped");
    if (!finish_rebuild(reply))
        return;
    close_handover();
    detached = false;
    open_gate();
}

// Through the program's own contexts: one more would take what is asked about. Behind a closed gate
// all of them are asked, those without memory too: the driver's checkpoint is next.
void on_room(flowgpu_reply& reply) {
    reply.block_bytes = gate::is_closed() ? contexts::least_free_of_all() : contexts::least_free();
}

void on_detach(flowgpu_reply& reply) {
    if (!gate::is_closed())
        return fail(reply, FLOWGPU_PROTOCOL, "DETACH needs a closed gate");
    close_handover();
    line::mend();
    line::drain(&packet);
    detached = true;
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

// Answers one request. False: the connection is to be closed.
bool answer() {
    uint16_t type = packet.header().type;
    if (fires(Fault::at_task_request)) {
        packet.close_fds();
        return false;
    }
    const SignalForThreads signal;
    flowgpu_reply reply = make_reply(type);
    switch (type) {
    case FLOWGPU_EXPORT:
        on_export(reply);
        break;
    case FLOWGPU_GATE:
        on_gate(reply);
        break;
    case FLOWGPU_HANDOVER:
        on_handover(reply, true);
        break;
    case FLOWGPU_LEND:
        on_handover(reply, false);
        break;
    case FLOWGPU_MAPBACK:
        on_mapback(reply);
        if (reply.status == FLOWGPU_OK)
            finish_rebuild(reply);
        break;
    case FLOWGPU_OPEN:
        on_open(reply);
        break;
    case FLOWGPU_DROP:
        close_handover();
        break;
    case FLOWGPU_ROOM:
        on_room(reply);
        break;
    case FLOWGPU_ASK:
        on_ask(reply);
        break;
    case FLOWGPU_STRIP:
        on_strip(reply);
        break;
    case FLOWGPU_KEEP:
        on_keep(reply);
        break;
    case FLOWGPU_REBUILD:
        on_rebuild(reply);
        break;
    case FLOWGPU_DETACH:
        on_detach(reply);
        break;
    default:
        fail(reply, FLOWGPU_PROTOCOL, "unknown request");
    }
    packet.close_fds();
    bool sent = !fires(Fault::at_task_reply) && send_packet(coordinator, &reply, sizeof reply);
    return sent && !(type == FLOWGPU_DETACH && reply.status == FLOWGPU_OK);
}

// Whether only a coordinator can let the task go on.
bool waiting() {
    return detached || replay::stripped() || !task().memory.all_present();
}

// What HELLO says of it.
uint32_t resumed() {
    if (replay::become_copy())
        task().memory.lose_all(); // before REBUILD closes its descriptors as the driver's
    return waiting() ? replay::keeps() ? 2 : 1 : 0;
}

bool greet() {
    flowgpu_hello hello = {};
    hello.header = make_header(FLOWGPU_HELLO, sizeof hello);
    hello.pid = static_cast<uint32_t>(getpid());
    hello.resumed = resumed();
    hello.replay = replay::asked_for() ? 2 : 0; // whether it could be prepared is for ASK to say
    int version = 0, devices = 0;
    if (!hello.resumed) { // a stripped process cannot answer
        FG_REAL(cuDriverGetVersion)(&version);
        FG_REAL(cuDeviceGetCount)(&devices);
    }
    hello.driver_version = static_cast<uint32_t>(version);
    hello.device_count = static_cast<uint32_t>(devices);
    int fds[] = {task().page_fd, memstub::live_fd()};
    size_t count = fds[0] < 0 ? 0 : fds[1] < 0 ? 1 : 2;
    return send_packet(coordinator, &hello, sizeof hello, fds, count);
}

// The connection ended without DETACH: the coordinator is gone. What the task still holds goes on.
void lost() {
    close_handover();
    if (waiting())
        return; // the ghost has the memory; only a coordinator can bring it back
    task().forget_drain();
    if (gate::is_closed())
        open_gate();
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
    filtered_at_start = prctl(PR_GET_SECCOMP) != 0;
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
