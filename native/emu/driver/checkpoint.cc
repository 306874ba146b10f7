// cuCheckpointProcess*: the calls, and the thread of every process that answers them.
//
//   RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING
//
// A checkpoint moves all device state of the process into its own memory and drops every tie to
// the device. As with the real driver, memory shared with other processes comes back as a private
// copy, and a restore that fails leaves the process in the state FAILED. After a checkpoint that
// found no device memory the process goes on, but is never checkpointed again.
#include "client.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <pthread.h>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

using Clock = std::chrono::steady_clock;

enum class Verb : uint32_t { kLock, kCheckpoint, kRestore, kUnlock, kState };

constexpr size_t kMaxPairs = 64;
constexpr char kHelperName[] = "cuda-checkpoint";
constexpr char kListens[] = "00010000"; // in /proc/net/unix

struct Order {
    Verb verb;
    uint32_t timeout_ms;
    uint32_t pair_count;
    uint32_t reserved;
    CUcheckpointGpuPair pairs[kMaxPairs];
};

struct Answer {
    int32_t result;
    int32_t value;
};

void open_gate() {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.gate_mutex);
    p.closed.store(false);
    p.gate_opened.notify_all();
}

CUresult lock_process(uint32_t timeout_ms) {
    Process& p = process();
    if (p.state != CU_PROCESS_STATE_RUNNING) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    p.closed.store(true);
    while (p.active.load() != 0) {
        if (timeout_ms != 0 && Clock::now() >= deadline) {
            open_gate();
            return CUDA_ERROR_NOT_READY;
        }
        ::usleep(200);
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    Call drain(Op::Drain);
    drain.in(timeout_ms == 0 ? uint32_t{0} : static_cast<uint32_t>(left > 1 ? left : 1));
    const CUresult r = drain.go_ungated();
    if (r != CUDA_SUCCESS) {
        open_gate();
        return r;
    }
    p.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

void drop_pages() {
    Process& p = process();
    for (const auto& [pages, size] : p.image_pages) {
        ::munmap(pages, size);
    }
    p.image_pages.clear();
    std::vector<uint8_t>().swap(p.image);
}

// Contents go to anonymous memory, so what was never written costs nothing in a dump.
CUresult fetch_contents(Call& snapshot) {
    Process& p = process();
    const auto count = snapshot.take<uint32_t>();
    for (uint32_t i = 0; i < count; ++i) {
        const auto size = snapshot.take<uint64_t>();
        void* pages = ::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages == MAP_FAILED) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        p.image_pages.emplace_back(static_cast<uint8_t*>(pages), size);
        Call copy(Op::SnapshotCopy);
        copy.in(i).in(reinterpret_cast<uint64_t>(pages));
        if (const CUresult r = copy.go_ungated(); r != CUDA_SUCCESS) {
            return r;
        }
    }
    return CUDA_SUCCESS;
}

CUresult checkpoint_process() {
    Process& p = process();
    if (p.state != CU_PROCESS_STATE_LOCKED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (p.checkpoint_failed) {
        return CUDA_ERROR_UNKNOWN;
    }
    Call snapshot(Op::Snapshot);
    CUresult r = snapshot.go_ungated();
    // Measured, also of a process that has managed memory: it was refused once and for all.
    p.checkpoint_failed = r == CUDA_ERROR_OUT_OF_MEMORY ||
                          (r == CUDA_ERROR_NOT_SUPPORTED && !p.managed_pieces.empty());
    if (r == CUDA_SUCCESS) {
        const std::string_view image = snapshot.take_blob();
        p.image.assign(image.begin(), image.end());
        r = fetch_contents(snapshot);
    }
    if (r != CUDA_SUCCESS) {
        drop_pages();
        return r;
    }
    Call detach(Op::Detach);
    detach.go_ungated();
    close_connections();
    drop_all_managed();
    for (auto& [context, pages] : p.context_pages) {
        unmap_context_pages(pages);
    }
    p.state = CU_PROCESS_STATE_CHECKPOINTED;
    return CUDA_SUCCESS;
}

CUresult reinstate(const Order& order) {
    Process& p = process();
    uint64_t client = 0;
    if (!bind_uvm_name()) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    const int control = open_connection(0, &client);
    if (control < 0) {
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    p.control = control;
    p.client_id = client;
    Call call(Op::Reinstate);
    call.in(order.pair_count);
    for (uint32_t i = 0; i < order.pair_count; ++i) {
        call.in(order.pairs[i]);
    }
    call.in_blob(p.image.data(), p.image.size());
    call.in(static_cast<uint32_t>(p.image_pages.size()));
    for (const auto& [pages, size] : p.image_pages) {
        call.in(reinterpret_cast<uint64_t>(pages));
    }
    if (const CUresult r = call.go_ungated(); r != CUDA_SUCCESS) {
        return r;
    }
    std::map<uint64_t, ContextPages> contexts;
    contexts.swap(p.context_pages);
    for (const auto& [context, pages] : contexts) {
        if (!map_context_pages(context, call.received_fd().get())) {
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    return CUDA_SUCCESS;
}

CUresult restore_process(const Order& order) {
    Process& p = process();
    if (p.state != CU_PROCESS_STATE_CHECKPOINTED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    const CUresult r = reinstate(order);
    if (r != CUDA_SUCCESS) {
        close_connections();
        // With pairs that the driver does not take the process stays as it was
        // (NVIDIA/cuda-checkpoint, issue 35).
        if (r != CUDA_ERROR_INVALID_VALUE) {
            p.state = CU_PROCESS_STATE_FAILED;
        }
        return r;
    }
    drop_pages();
    p.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

CUresult unlock_process() {
    Process& p = process();
    if (p.state != CU_PROCESS_STATE_LOCKED) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    p.state = CU_PROCESS_STATE_RUNNING;
    open_gate();
    return CUDA_SUCCESS;
}

Answer obey(const Order& order) {
    Process& p = process();
    switch (order.verb) {
    case Verb::kLock:
        return {p.service.empty() ? lock_process(order.timeout_ms) : CUDA_ERROR_NOT_SUPPORTED, 0};
    case Verb::kCheckpoint:
        return {checkpoint_process(), 0};
    case Verb::kRestore:
        return {restore_process(order), 0};
    case Verb::kUnlock:
        return {unlock_process(), 0};
    case Verb::kState:
        return {CUDA_SUCCESS, p.state};
    }
    return {CUDA_ERROR_INVALID_VALUE, 0};
}

bool may_order(int fd) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           (peer.uid == 0 || peer.uid == ::getuid());
}

// Real-time signals of the program's come to this driver's threads too.
template <typename T> bool receive(int fd, T* value) {
    ssize_t got;
    do {
        got = ::recv(fd, value, sizeof *value, MSG_WAITALL);
    } while (got < 0 && errno == EINTR);
    return got == static_cast<ssize_t>(sizeof *value);
}

void* run_helper(void* argument) {
    const int listener = static_cast<int>(reinterpret_cast<intptr_t>(argument));
    ::pthread_setname_np(::pthread_self(), kHelperName);
    for (;;) {
        UniqueFd peer(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        if (!peer) {
            if (errno == EINTR || errno == ECONNABORTED) {
                continue;
            }
            if (errno == EMFILE || errno == ENFILE) { // asked before anybody calls
                ::usleep(10'000);
                continue;
            }
            return nullptr;
        }
        const timeval patience{5, 0};
        ::setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        Order order{};
        if (may_order(peer.get()) && receive(peer.get(), &order) && order.pair_count <= kMaxPairs) {
            const Answer answer = obey(order);
            // Closed before the peer sees the end of the stream: a dump that follows at once
            // must not find this connection.
            ::send(peer.get(), &answer, sizeof answer, MSG_NOSIGNAL);
        }
    }
}

// Found from outside: the process may be stopped.
int helper_thread(int pid) {
    std::error_code error;
    const std::filesystem::path tasks = "/proc/" + std::to_string(pid) + "/task";
    for (const auto& task : std::filesystem::directory_iterator(tasks, error)) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        if (name == kHelperName) {
            return std::stoi(task.path().filename());
        }
    }
    return 0;
}

// By the socket on which it listens, not by the name: that tells the PID namespace in which it was
// bound, and a process that was restored may be in another.
UniqueFd connect_helper(int pid) {
    std::set<std::string> own;
    std::error_code error;
    const std::filesystem::path fds = "/proc/" + std::to_string(pid) + "/fd";
    for (const auto& fd : std::filesystem::directory_iterator(fds, error)) {
        own.insert(std::filesystem::read_symlink(fd, error));
    }
    std::ifstream sockets("/proc/net/unix");
    std::string line;
    while (std::getline(sockets, line)) {
        std::istringstream words(line);
        std::string number, references, protocol, flags, type, state, inode, name;
        words >> number >> references >> protocol >> flags >> type >> state >> inode >> name;
        if (flags != kListens || own.count("socket:[" + inode + "]") == 0 ||
            name.rfind(std::string("@") + kDeviceMark, 0) != 0) {
            continue;
        }
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path + 1, sizeof address.sun_path - 1, 1);
        const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
        UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (fd && ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) {
            return fd;
        }
    }
    return UniqueFd();
}

CUresult send_order(int pid, const Order& order, int32_t* value) {
    if (pid <= 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const int saved = errno;
    UniqueFd fd;
    // A child by fork has its parent's socket, and no such thread. The kernel's list may lack one
    // that is there if others go while it is read.
    for (int looks = 0; !fd && looks < 3 && helper_thread(pid) != 0; ++looks) {
        fd = connect_helper(pid);
    }
    CUresult result = CUDA_ERROR_OPERATING_SYSTEM;
    if (!fd) {
        result = ::kill(pid, 0) != 0 && errno == ESRCH ? CUDA_ERROR_INVALID_VALUE
                                                       : CUDA_ERROR_NOT_INITIALIZED;
    } else if (::send(fd.get(), &order, sizeof order, MSG_NOSIGNAL) ==
               static_cast<ssize_t>(sizeof order)) {
        Answer answer{};
        if (receive(fd.get(), &answer)) {
            char end;
            receive(fd.get(), &end);
            result = static_cast<CUresult>(answer.result);
            if (value != nullptr) {
                *value = answer.value;
            }
        }
    }
    errno = saved;
    return result;
}

Order order_of(Verb verb) {
    Order order{};
    order.verb = verb;
    return order;
}

} // namespace

bool start_helper() {
    UniqueFd listener = bind_own_name("");
    if (!listener || ::listen(listener.get(), 8) != 0) {
        return false;
    }
    sigset_t standard;
    sigset_t before;
    ::sigemptyset(&standard);
    for (int signal = 1; signal < 32; ++signal) {
        ::sigaddset(&standard, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &standard, &before);
    pthread_t thread;
    const int failed =
        ::pthread_create(&thread, nullptr, run_helper,
                         reinterpret_cast<void*>(static_cast<intptr_t>(listener.get())));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (failed != 0) {
        return false;
    }
    ::pthread_detach(thread);
    listener.release();
    return true;
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
    Order order = order_of(Verb::kLock);
    order.timeout_ms = args != nullptr ? args->timeoutMs : 0;
    return send_order(pid, order, nullptr);
}

CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs*) {
    return send_order(pid, order_of(Verb::kCheckpoint), nullptr);
}

CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
    Order order = order_of(Verb::kRestore);
    if (args != nullptr && args->gpuPairsCount != 0) {
        if (args->gpuPairs == nullptr || args->gpuPairsCount > kMaxPairs) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        order.pair_count = args->gpuPairsCount;
        std::copy_n(args->gpuPairs, args->gpuPairsCount, order.pairs);
    }
    return send_order(pid, order, nullptr);
}

CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs*) {
    return send_order(pid, order_of(Verb::kUnlock), nullptr);
}

CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState* state) {
    int32_t value = 0;
    if (state == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = send_order(pid, order_of(Verb::kState), &value);
    if (r == CUDA_SUCCESS) {
        *state = static_cast<CUprocessState>(value);
    }
    return r;
}

CUresult CUDAAPI cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
    if (tid == nullptr || pid <= 0 || (::kill(pid, 0) != 0 && errno == ESRCH)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *tid = helper_thread(pid);
    return *tid == 0 ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

} // extern "C"
