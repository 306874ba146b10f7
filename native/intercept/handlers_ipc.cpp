// A handle names a socket of the process that has the memory. There a thread gives whoever asks a
// descriptor of the block, as long as the allocation lives; who opens the handle maps the block.
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

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
#include "task.h"

namespace flowgpu::ipc {

namespace {

constexpr char kMagic[8] = {'F', 'l', 'o', 'w', 'G', 'P', 'U', '1'};
constexpr int kQuestionMs = 10000;

struct Token {
    uint8_t bytes[16];
    bool operator==(const Token& other) const { return !memcmp(bytes, other.bytes, sizeof bytes); }
};

// What is in a CUipcMemHandle of ours.
struct Ticket {
    char magic[sizeof kMagic];
    Token token; // of the process that has the memory
    uint64_t address;
    uint8_t unused[32];
};
static_assert(sizeof(Ticket) == sizeof(CUipcMemHandle));

struct Question {
    flowgpu_header header;
    uint64_t address;
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

struct State {
    std::mutex mutex; // guards what follows
    int listener = -1;
    Token token = {}; // once there is a listener
    std::map<CUdeviceptr, Opened> opened;
};

// Made on first use, never destroyed, as Task.
State& state() {
    static auto* made = new State();
    return *made;
}

// An abstract address of the network namespace; gives its length.
socklen_t address_of(const Token& token, sockaddr_un* address) {
    *address = {};
    address->sun_family = AF_UNIX;
    char* at = address->sun_path + 1;
    at += sprintf(at, "flowgpu-ipc-");
    for (uint8_t byte : token.bytes)
        at += sprintf(at, "%02x", byte);
    return static_cast<socklen_t>(at - reinterpret_cast<char*>(address));
}

bool is_same_user(int socket) {
    ucred peer = {};
    socklen_t bytes = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

void answer(int socket, Packet* packet) {
    if (!is_same_user(socket) || receive_packet(socket, packet, kQuestionMs) != Received::ok)
        return;
    packet->close_fds();
    if (packet->size != sizeof(Question))
        return;
    Question question;
    memcpy(&question, packet->bytes, sizeof question);
    Answer said = {};
    said.header = make_header(0, sizeof said);
    said.result = task().memory.share(question.address, &said.shared);
    const bool shared = said.result == CUDA_SUCCESS;
    send_packet(socket, &said, sizeof said, &said.shared.fd, shared ? 1 : 0);
    if (shared)
        close(said.shared.fd);
}

void* serve(void* listener) {
    const int socket = static_cast<int>(reinterpret_cast<intptr_t>(listener));
    static auto* packet = new Packet; // too large for a small stack
    // A checkpoint of this process is refused, and who asks must not wait for that behind its gate.
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
    Token token;
    int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket < 0)
        return false;
    socket = move_high(socket);
    if (getrandom(token.bytes, sizeof token.bytes, 0) != sizeof token.bytes ||
        bind(socket, reinterpret_cast<sockaddr*>(&address), address_of(token, &address)) != 0 ||
        listen(socket, 64) != 0 ||
        !start_in_background(serve, reinterpret_cast<void*>(static_cast<intptr_t>(socket)))) {
        close(socket);
        return false;
    }
    s.listener = socket;
    s.token = token;
    return true;
}

// Asks the process that has the memory. Its end, or that of the allocation, is the driver's
// CUDA_ERROR_INVALID_VALUE.
CUresult ask(const Ticket& ticket, Shared* shared) {
    sockaddr_un address;
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    const socklen_t length = address_of(ticket.token, &address);
    Question question = {make_header(0, sizeof question), ticket.address};
    const auto packet = std::make_unique<Packet>();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (connect(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
        is_same_user(socket) && send_packet(socket, &question, sizeof question) &&
        receive_packet(socket, packet.get()) == Received::ok && packet->size == sizeof(Answer)) {
        Answer said;
        memcpy(&said, packet->bytes, sizeof said);
        if (said.result == CUDA_SUCCESS && packet->fd_count == 1) {
            *shared = said.shared;
            shared->fd = packet->take_fd(0);
            result = CUDA_SUCCESS;
        }
    }
    packet->close_fds();
    close(socket);
    return result;
}

CUresult allow(const Opened& one, CUdevice device) {
    const CUmemAccessDesc access = access_of(device, true);
    return FG_REAL(cuMemSetAccess)(one.block, one.block_bytes, &access, 1);
}

// Maps the block of which `fd` is, and closes it.
CUresult map(int fd, CUdevice device, Opened* one) {
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = FG_REAL(cuMemImportFromShareableHandle)(
        &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    if (result != CUDA_SUCCESS)
        return result;
    result = FG_REAL(cuMemAddressReserve)(&one->block, one->block_bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = FG_REAL(cuMemMap)(one->block, one->block_bytes, 0, handle, 0);
        if (result == CUDA_SUCCESS) {
            result = allow(*one, device);
            if (result != CUDA_SUCCESS)
                FG_REAL(cuMemUnmap)(one->block, one->block_bytes);
        }
        if (result != CUDA_SUCCESS)
            FG_REAL(cuMemAddressFree)(one->block, one->block_bytes);
    }
    FG_REAL(cuMemRelease)(handle); // the mapping keeps the memory
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
    if (s.listener >= 0 && ticket.token == s.token)
        return CUDA_ERROR_INVALID_CONTEXT; // its own
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
    result = ask(ticket, &shared);
    if (result != CUDA_SUCCESS)
        return result;
    Opened one = {ticket, 0, shared.block_bytes, 1};
    result = map(shared.fd, device, &one);
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
    *result = FG_REAL(cuMemUnmap)(it->second.block, it->second.block_bytes);
    FG_REAL(cuMemAddressFree)(it->second.block, it->second.block_bytes);
    s.opened.erase(it);
    return true;
}

CUresult open_any(unsigned symbol, CUdeviceptr* out, const CUipcMemHandle& handle, unsigned flags,
                  decltype(&::cuIpcOpenMemHandle_v2) real) {
    Ticket ticket;
    memcpy(&ticket, &handle, sizeof ticket);
    const bool ours = memcmp(ticket.magic, kMagic, sizeof kMagic) == 0;
    const CUresult result = ours ? open(out, ticket, flags) : real(out, handle, flags);
    if (result == CUDA_SUCCESS)
        handle::count_refused(symbol);
    return result;
}

} // namespace

void lock() {
    state().mutex.lock();
}

void unlock() {
    state().mutex.unlock();
}

void forget_parents() {
    State& s = state();
    if (s.listener >= 0)
        close(s.listener);
    s.listener = -1;
    s.opened.clear();
}

} // namespace flowgpu::ipc

namespace flowgpu::handle {

CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
    Region allocation;
    CUresult result = CUDA_SUCCESS;
    if (!address_map().find(dptr, only(MemoryKind::allocation), &allocation)) {
        result = FG_REAL(cuIpcGetMemHandle)(pHandle, dptr);
    } else if (!pHandle) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        ipc::State& s = ipc::state();
        std::lock_guard<std::mutex> lock(s.mutex);
        if (!ipc::listen_once())
            return CUDA_ERROR_OPERATING_SYSTEM;
        ipc::Ticket ticket = {{}, s.token, allocation.address, {}};
        memcpy(ticket.magic, ipc::kMagic, sizeof ticket.magic);
        memcpy(pHandle, &ticket, sizeof ticket);
    }
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
    return ipc::shut(dptr, &result) ? result : FG_REAL(cuIpcCloseMemHandle)(dptr);
}

} // namespace flowgpu::handle
