// A ticket names a socket of the process that has the memory. There a thread gives whoever asks a
// descriptor of the block, as long as that lives; who imports the ticket gets a block of `Memory`.
#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "background.h"
#include "channel.h"
#include "descriptor.h"
#include "gate.h"
#include "handlers.h"
#include "ipc.h"
#include "memstub.h"
#include "proc.h"
#include "requests.h"
#include "task.h"

namespace flowgpu::ipc {

namespace {

constexpr int kQuestionMs = 10000;
constexpr int kSeals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

struct Question {
    flowgpu_header header;
    Ticket ticket;
    Token asker;
};

struct Answer {
    flowgpu_header header;
    CUresult result;
    Shared shared; // with success; its descriptor comes beside it
};

struct Opened {
    Ticket ticket;
    CUdeviceptr block;
    uint64_t block_bytes;
    unsigned times;
};

struct Asker {
    Token token = {};
    pid_t pid;
    uint64_t began; // 0: it is not known
};

struct State {
    std::mutex mutex; // guards what follows
    int listener = -1;
    Token token = {};
    std::map<CUdeviceptr, Opened> opened;

    // Taken by the thread that answers, which waits for nobody: two processes may ask each other.
    std::mutex askers_mutex; // guards what follows
    std::vector<Asker> askers;
};

// Made on first use, never destroyed, as Task.
State& state() {
    static auto* made = new State();
    return *made;
}

// With the state's lock held.
Token token_of(State& s) {
    if (!s.token && getrandom(&s.token, sizeof s.token, 0) != sizeof s.token)
        s.token = Token();
    return s.token;
}

// An abstract address of the network namespace; gives its length.
socklen_t address_of(const Token& token, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    char* at = address->sun_path + 1;
    at += sprintf(at, "flowgpu-ipc-");
    at += sprintf(at, "%016" PRIx64 "%016" PRIx64, token.high, token.low);
    return static_cast<socklen_t>(at - reinterpret_cast<char*>(address));
}

bool is_same_user(int socket, ucred* peer) {
    socklen_t bytes = sizeof *peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, peer, &bytes) == 0 && peer->uid == geteuid();
}

// When a process began, in clock ticks since the system's start; 0: there is none.
uint64_t start_of(pid_t pid) {
    char path[32], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
    proc::File file(path);
    const size_t got = file.fd() < 0 ? 0 : file.read_some(line, sizeof line - 1);
    line[got] = '\0';
    const char* at = strrchr(line, ')'); // the end of its name, the second field
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, nullptr, 10) : 0;
}

bool lives(const Asker& one) {
    return !one.began || start_of(one.pid) == one.began;
}

bool is_ticket_of(const char* magic, const Ticket& ticket) {
    return !memcmp(ticket.magic, magic, sizeof ticket.magic);
}

void note_asker(const Token& token, pid_t pid) {
    State& s = state();
    const Asker found = {token, pid, pid ? start_of(pid) : 0};
    std::lock_guard<std::mutex> lock(s.askers_mutex);
    auto known = std::find_if(s.askers.begin(), s.askers.end(),
                              [&](const Asker& one) { return one.token == token; });
    if (known != s.askers.end())
        *known = found;
    else
        s.askers.push_back(found);
}

void answer(int socket, Packet* packet) {
    ucred peer = {};
    if (!is_same_user(socket, &peer) || receive_packet(socket, packet, kQuestionMs) != Received::ok)
        return;
    packet->close_fds();
    if (packet->size != sizeof(Question))
        return;
    Question question;
    memcpy(&question, packet->bytes, sizeof question);
    Answer said = {};
    said.header = make_header(0, sizeof said);
    const bool is_event = is_ticket_of(kEventMagic, question.ticket);
    said.result = is_event ? event_state(question.ticket.what)
                           : task().memory.share(question.ticket.what, &said.shared);
    const bool shared = said.result == CUDA_SUCCESS && !is_event;
    if (shared)
        note_asker(question.asker, peer.pid);
    send_packet(socket, &said, sizeof said, &said.shared.fd, shared ? 1 : 0);
    if (shared)
        close(said.shared.fd);
}

void* serve(void* listener) {
    const int socket = static_cast<int>(reinterpret_cast<intptr_t>(listener));
    static auto* packet = new Packet; // too large for a small stack
    // Who asks is inside its own gate, and must not wait for a checkpoint of this process.
    gate::exempt();
    for (;;) {
        const int peer = accept4(socket, nullptr, nullptr, SOCK_CLOEXEC);
        if (peer >= 0) {
            answer(peer, packet);
            close(peer);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            usleep(10000); // no descriptor is free, or no memory
        }
    }
}

// With the state's lock held.
bool listen_once() {
    State& s = state();
    if (s.listener >= 0)
        return true;
    sockaddr_un address;
    const Token token = token_of(s);
    int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket < 0)
        return false;
    socket = move_high(socket);
    if (!token ||
        bind(socket, reinterpret_cast<sockaddr*>(&address), address_of(token, &address)) != 0 ||
        listen(socket, 64) != 0 ||
        !start_in_background(serve, reinterpret_cast<void*>(static_cast<intptr_t>(socket)))) {
        close(socket);
        return false;
    }
    s.listener = socket;
    return true;
}

// The owner's answer; false: it has ended. A descriptor in it is the caller's.
bool ask(const Ticket& ticket, const Token& asker, Answer* said) {
    const int error = errno; // the driver's function that it stands for leaves it alone
    sockaddr_un address;
    ucred peer = {};
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket < 0)
        return false;
    const socklen_t length = address_of(ticket.owner, &address);
    Question question = {make_header(0, sizeof question), ticket, asker};
    const auto packet = std::make_unique<Packet>();
    bool answered =
        connect(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
        is_same_user(socket, &peer) && send_packet(socket, &question, sizeof question) &&
        receive_packet(socket, packet.get()) == Received::ok && packet->size == sizeof(Answer);
    if (answered) {
        memcpy(said, packet->bytes, sizeof *said);
        if (packet->fd_count == 1)
            said->shared.fd = packet->take_fd(0);
        else if (said->result == CUDA_SUCCESS)
            said->shared.fd = -1;
    }
    packet->close_fds();
    close(socket);
    errno = error;
    return answered;
}

// Its end, or that of the allocation, is the driver's CUDA_ERROR_INVALID_VALUE.
CUresult ask_memory(const Ticket& ticket, const Token& asker, Shared* shared) {
    if (ticket.owner == asker)
        return task().memory.share(ticket.what, shared);
    Answer said = {};
    if (!ask(ticket, asker, &said) || said.result != CUDA_SUCCESS || said.shared.fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *shared = said.shared;
    return CUDA_SUCCESS;
}

// A handle for the block that a ticket names, and what the owner has said of it.
CUresult import(const Ticket& ticket, const Token& asker, Shared* shared,
                CUmemGenericAllocationHandle* handle) {
    service::ManyDescriptors many; // the block keeps one, which the program's limit is not for
    CUresult result = ask_memory(ticket, asker, shared);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = nullptr;
    FG_REAL(cuCtxGetCurrent)(&context);
    const Origin origin = {ticket.owner, shared->id};
    return task().memory.import_block(origin, shared->block_bytes, shared->fd, context, handle);
}

CUresult allow(const Opened& one, CUdevice device) {
    const CUmemAccessDesc access = access_of(device, true);
    return task().memory.set_access(one.block, one.block_bytes, &access, 1);
}

// Maps the block, whose handle stays the caller's.
CUresult map(CUmemGenericAllocationHandle handle, CUdevice device, Opened* one) {
    Memory& memory = task().memory;
    CUresult result = FG_REAL(cuMemAddressReserve)(&one->block, one->block_bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = memory.map_handle(one->block, one->block_bytes, 0, handle, 0);
    if (result == CUDA_SUCCESS) {
        result = allow(*one, device);
        if (result != CUDA_SUCCESS)
            memory.unmap_range(one->block, one->block_bytes);
    }
    if (result != CUDA_SUCCESS)
        FG_REAL(cuMemAddressFree)(one->block, one->block_bytes);
    return result;
}

CUresult open(CUdeviceptr* out, const Ticket& ticket, unsigned flags) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    CUresult result = FG_REAL(cuCtxGetDevice)(&device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    FG_REAL(cuCtxGetCurrent)(&context);
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    const Token own = token_of(s);
    if (ticket.owner == own)
        return CUDA_ERROR_INVALID_CONTEXT;
    for (auto& [address, one] : s.opened) {
        if (memcmp(&one.ticket, &ticket, sizeof ticket) != 0)
            continue;
        result = allow(one, device);
        if (result == CUDA_SUCCESS) {
            one.times++;
            *out = address;
        }
        return result;
    }
    Shared shared;
    CUmemGenericAllocationHandle handle = 0;
    result = import(ticket, own, &shared, &handle);
    if (result != CUDA_SUCCESS)
        return result;
    Opened one = {ticket, 0, shared.block_bytes, 1};
    result = map(handle, device, &one);
    task().memory.release_handle(handle); // the mapping keeps the memory
    if (result != CUDA_SUCCESS)
        return result;
    *out = one.block + shared.offset;
    memstub::forget(one.block, one.block_bytes);
    s.opened[*out] = one;
    address_map().put(Region{*out, shared.bytes, MemoryKind::imported, device, context});
    return CUDA_SUCCESS;
}

// False: no allocation of another process is open there.
bool shut(CUdeviceptr address, CUresult* result) {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto it = s.opened.find(address);
    if (it == s.opened.end())
        return false;
    *result = CUDA_SUCCESS;
    if (--it->second.times)
        return true;
    FG_REAL(cuCtxSynchronize)(); // as the driver does
    address_map().remove(address, only(MemoryKind::imported));
    *result = task().memory.unmap_range(it->second.block, it->second.block_bytes);
    FG_REAL(cuMemAddressFree)(it->second.block, it->second.block_bytes);
    s.opened.erase(it);
    return true;
}

CUresult open_any(unsigned symbol, CUdeviceptr* out, const CUipcMemHandle& handle, unsigned flags,
                  decltype(&::cuIpcOpenMemHandle_v2) real) {
    Ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    if (is_ticket_of(kMemoryMagic, ticket)) {
        const CUresult result = open(out, ticket, flags);
        if (result == CUDA_SUCCESS)
            task().update_page();
        return result;
    }
    const CUresult result = real(out, handle, flags);
    if (result == CUDA_SUCCESS)
        handle::count_refused(symbol);
    return result;
}

bool read_ticket(int fd, Ticket* ticket) {
    const int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & kSeals) == kSeals &&
           pread(fd, ticket, sizeof *ticket, 0) == sizeof *ticket &&
           is_ticket_of(kMemoryMagic, *ticket);
}

} // namespace

Token token() {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    return token_of(s);
}

CUresult make(const char* magic, uint64_t what, Ticket* ticket) {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!listen_once())
        return CUDA_ERROR_OPERATING_SYSTEM;
    *ticket = {{}, s.token, what, {}};
    memcpy(ticket->magic, magic, sizeof ticket->magic);
    return CUDA_SUCCESS;
}

CUresult ask_event(const Ticket& ticket) {
    Answer said = {};
    return ask(ticket, token(), &said) ? said.result : CUDA_ERROR_INVALID_HANDLE;
}

std::vector<flowgpu_asker> askers() {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.askers_mutex);
    s.askers.erase(std::remove_if(s.askers.begin(), s.askers.end(),
                                  [](const Asker& one) { return !lives(one); }),
                   s.askers.end());
    std::vector<flowgpu_asker> rows;
    for (const Asker& one : s.askers)
        rows.push_back(
            flowgpu_asker{one.token.low, one.token.high, static_cast<uint32_t>(one.pid), 0});
    return rows;
}

CUresult make_ticket(CUmemGenericAllocationHandle handle, int* fd) {
    Ticket ticket;
    const CUresult result = make(kMemoryMagic, handle, &ticket);
    if (result != CUDA_SUCCESS)
        return result;
    const int made = memfd_create("flowgpu-ticket", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (write(made, &ticket, sizeof ticket) != sizeof ticket ||
        fcntl(made, F_ADD_SEALS, kSeals) != 0) {
        close(made);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    // Opened again: as it was made, the kernel does not count it among those open for writing.
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", made);
    *fd = ::open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0) { // then only whoever has imported it keeps the memory
        *fd = made;
        return CUDA_SUCCESS;
    }
    service::ManyDescriptors many;
    const int watch = ::open(path, O_RDONLY | O_CLOEXEC);
    if (watch >= 0)
        task().memory.note_ticket(handle, move_high(watch));
    close(made);
    return CUDA_SUCCESS;
}

bool import_ticket(int fd, CUmemGenericAllocationHandle* handle, CUresult* result) {
    Ticket ticket;
    if (!read_ticket(fd, &ticket))
        return false;
    Shared shared;
    *result = import(ticket, token(), &shared, handle);
    return true;
}

bool is_opened(CUdeviceptr address) {
    if (!address_map().any(only(MemoryKind::imported)))
        return false;
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    return std::any_of(s.opened.begin(), s.opened.end(), [&](const auto& entry) {
        return address - entry.second.block < entry.second.block_bytes;
    });
}

void lock() {
    state().mutex.lock();
    state().askers_mutex.lock();
    lock_events();
}

void unlock() {
    unlock_events();
    state().askers_mutex.unlock();
    state().mutex.unlock();
}

void forget_parents() {
    State& s = state();
    if (s.listener >= 0)
        close(s.listener);
    s.listener = -1;
    s.token = Token();
    s.opened.clear();
    s.askers.clear();
    forget_parents_events();
}

} // namespace flowgpu::ipc

namespace flowgpu::handle {

CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
    Region allocation;
    if (address_map().find(dptr, only(MemoryKind::allocation), &allocation)) {
        if (!pHandle)
            return CUDA_ERROR_INVALID_VALUE;
        ipc::Ticket ticket;
        const CUresult result = ipc::make(ipc::kMemoryMagic, allocation.address, &ticket);
        if (result == CUDA_SUCCESS)
            memcpy(pHandle, &ticket, sizeof ticket);
        return result;
    }
    const CUresult result = FG_REAL(cuIpcGetMemHandle)(pHandle, dptr);
    if (result == CUDA_SUCCESS)
        count_refused(I_cuIpcGetMemHandle);
    return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags) {
    return ipc::open_any(I_cuIpcOpenMemHandle, pdptr, handle, Flags, FG_REAL(cuIpcOpenMemHandle));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags) {
    return ipc::open_any(I_cuIpcOpenMemHandle_v2, pdptr, handle, Flags,
                         FG_REAL(cuIpcOpenMemHandle_v2));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
    CUresult result = CUDA_SUCCESS;
    if (!ipc::shut(dptr, &result))
        return FG_REAL(cuIpcCloseMemHandle)(dptr);
    task().update_page();
    return result;
}

} // namespace flowgpu::handle
