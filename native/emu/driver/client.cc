#include "client.h"

#include <algorithm>
#include <cinttypes>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

pthread_key_t g_thread_key;
pthread_once_t g_thread_once = PTHREAD_ONCE_INIT;
Process* g_process;
pthread_once_t g_process_once = PTHREAD_ONCE_INIT;

// The device copies to and from this process's memory: under a restricted ptrace scope it may do
// so only when named here.
void allow_copies(int fd) {
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
        ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(peer.pid), 0, 0, 0);
    }
}

// Like the real driver's handler, it expects to find the life that has registered it.
void shut_down() {
    g_process->shut_down.store(true);
}

// The real driver handles a fork in the child alone, too. This handler also expects the life that
// has registered it.
void forget_in_child() {
    g_process->pid = 0;
    if (g_process->managed_file >= 0) {
        ::close(g_process->managed_file);
        g_process->managed_file = -1;
    }
}

void make_thread_key() {
    ::pthread_key_create(&g_thread_key, std::free);
}

// Never destroyed: other threads may still call while the process exits.
void make_process() {
    g_process = new Process;
}

} // namespace

Process& process() {
    ::pthread_once(&g_process_once, make_process);
    return *g_process;
}

// A pthread key and no thread_local, which could not be put back in the program's threads. The real
// library has no TLS segment; this one has the 16 bytes of its C++ runtime.
ThreadState& thread_state() {
    ::pthread_once(&g_thread_once, make_thread_key);
    auto* state = static_cast<ThreadState*>(::pthread_getspecific(g_thread_key));
    if (state == nullptr) {
        state = static_cast<ThreadState*>(std::calloc(1, sizeof(ThreadState)));
        state->tid = static_cast<uint64_t>(::syscall(SYS_gettid));
        ::pthread_setspecific(g_thread_key, state);
    }
    return *state;
}

Entry::Entry() : thread_(thread_state()), status_(CUDA_SUCCESS), saved_errno_(errno) {
    Process& p = process();
    // A forked child finds the parent's library in its memory: it may not use it.
    if (!p.initialized.load(std::memory_order_acquire) || p.pid != ::getpid()) {
        status_ = CUDA_ERROR_NOT_INITIALIZED;
        return;
    }
    if (p.shut_down.load(std::memory_order_relaxed)) {
        status_ = CUDA_ERROR_DEINITIALIZED;
        return;
    }
    if (thread_.in_callback) {
        status_ = CUDA_ERROR_NOT_PERMITTED;
        return;
    }
    if (thread_.entries++ == 0) {
        for (;;) {
            p.active.fetch_add(1);
            if (!p.closed.load()) {
                break;
            }
            p.active.fetch_sub(1);
            std::unique_lock<std::mutex> lock(p.gate_mutex);
            p.gate_opened.wait(lock, [&] { return !p.closed.load(); });
        }
    }
    counted_ = true;
}

Entry::~Entry() {
    if (counted_ && --thread_.entries == 0) {
        process().active.fetch_sub(1);
    }
    errno = saved_errno_;
}

int open_connection(uint64_t attach_to, uint64_t* client_id) {
    // A device that decides to exit while we connect closes the socket unanswered: ask again.
    for (int attempt = 0; attempt < 10; ++attempt) {
        const int fd = connect_device();
        if (fd < 0) {
            return -1;
        }
        Writer writer;
        writer.put(kWireMagic);
        writer.put(kWireVersion);
        writer.put(attach_to);
        const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
        writer.put(uint8_t{visible != nullptr});
        writer.put_string(visible == nullptr ? "" : visible);
        RequestHeader request{static_cast<uint32_t>(writer.buffer().size()), Op::Hello, 0, 0, 0};
        ReplyHeader reply{};
        std::vector<uint8_t> payload;
        if (send_message(fd, &request, sizeof request, writer.buffer(), -1) &&
            receive_message(fd, &reply, sizeof reply, payload, nullptr)) {
            if (reply.result == CUDA_SUCCESS) {
                Reader reader(payload.data(), payload.size());
                *client_id = reader.take<uint64_t>();
                allow_copies(fd);
                return fd;
            }
            ::close(fd);
            return -1;
        }
        ::close(fd);
        if (attach_to != 0) {
            return -1;
        }
    }
    return -1;
}

UniqueFd bind_own_name(const char* what) {
    struct stat pid_namespace{};
    if (::stat("/proc/self/ns/pid", &pid_namespace) != 0) {
        return UniqueFd();
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const int length =
        std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%s%s-%lu-%d", kDeviceMark,
                      what, pid_namespace.st_ino, static_cast<int>(::getpid()));
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto size =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
    if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
        return UniqueFd();
    }
    return fd;
}

bool bind_uvm_name() {
    process().uvm = bind_own_name("-uvmfd").release();
    return process().uvm >= 0;
}

CUresult take_connection(int* fd) {
    Process& p = process();
    uint64_t client;
    {
        std::lock_guard<std::mutex> lock(p.mutex);
        client = p.client_id;
        if (client == 0) {
            return CUDA_ERROR_DEVICE_UNAVAILABLE;
        }
        if (!p.idle.empty()) {
            *fd = p.idle.back();
            p.idle.pop_back();
            return CUDA_SUCCESS;
        }
    }
    const int opened = open_connection(client, &client);
    if (opened < 0) {
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    std::lock_guard<std::mutex> lock(p.mutex);
    p.all.push_back(opened);
    *fd = opened;
    return CUDA_SUCCESS;
}

void return_connection(int fd, bool usable) {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    const auto known = std::find(p.all.begin(), p.all.end(), fd);
    if (known == p.all.end()) {
        return;
    }
    if (usable) {
        p.idle.push_back(fd);
    } else {
        p.all.erase(known);
        ::close(fd);
        // The device is lost to this process, however soon the daemon notices: no way back by a new
        // connection.
        p.client_id = 0;
    }
}

void close_connections() {
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    for (const int fd : p.all) {
        ::shutdown(fd, SHUT_RDWR);
    }
    // It may be on its way back to its connection, and the number will be that of another file.
    if (p.callbacks_running) {
        ::pthread_join(p.callbacks, nullptr);
        p.callbacks_running = false;
    }
    for (const int fd : p.all) {
        ::close(fd);
    }
    p.all.clear();
    p.idle.clear();
    if (p.control >= 0) {
        ::close(p.control);
    }
    p.control = -1;
    for (const int fd : p.service) {
        ::close(fd);
    }
    p.service.clear();
    if (p.uvm >= 0) {
        ::close(p.uvm);
    }
    p.uvm = -1;
    p.client_id = 0;
}

namespace {

size_t page_bytes() {
    return static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

} // namespace

void unmap_context_pages(ContextPages& pages) {
    ::munmap(pages.device, page_bytes());
    ::munmap(pages.host, page_bytes());
    pages = {};
}

// Shared and anonymous memory of the host, as the real driver has it.
bool map_context_pages(uint64_t context, int device) {
    constexpr int kWritable = PROT_READ | PROT_WRITE;
    void* page = ::mmap(nullptr, page_bytes(), kWritable, MAP_SHARED, device, 0);
    void* host = ::mmap(nullptr, page_bytes(), kWritable, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    ContextPages pages = {page, host};
    const bool mapped = page != MAP_FAILED && host != MAP_FAILED;
    if (!mapped || !p.context_pages.emplace(context, pages).second) {
        unmap_context_pages(pages);
    }
    return mapped;
}

void end_context(uint64_t context) {
    drop_managed_of(context);
    Process& p = process();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.storage.erase(p.storage.lower_bound({context, nullptr}),
                    p.storage.lower_bound({context + 1, nullptr}));
    const auto found = p.context_pages.find(context);
    if (found != p.context_pages.end()) {
        unmap_context_pages(found->second);
        p.context_pages.erase(found);
    }
}

// As the real driver does, by fopen as well, and goes by it ever after
// (docs/design/hardware-notes.md).
void note_taken_addresses() {
    Process& p = process();
    p.taken.clear();
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    if (maps == nullptr) {
        return;
    }
    char line[512];
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        uint64_t start = 0;
        uint64_t end = 0;
        if (std::sscanf(line, "%" SCNx64 "-%" SCNx64, &start, &end) == 2) {
            p.taken.emplace_back(start, end);
        }
    }
    std::fclose(maps);
}

bool was_taken(uint64_t start, size_t size) {
    const auto& taken = process().taken;
    return std::any_of(taken.begin(), taken.end(), [=](const auto& range) {
        return range.first < start + size && start < range.second;
    });
}

void* reserve_addresses(size_t size, size_t alignment, uint64_t hint) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint != 0 && hint % alignment == 0 && !was_taken(hint, size)) {
        void* at = ::mmap(reinterpret_cast<void*>(hint), size, PROT_NONE,
                          kFlags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != MAP_FAILED && reinterpret_cast<uint64_t>(at) == hint) {
            return at;
        }
        if (at != MAP_FAILED) {
            ::munmap(at, size);
        }
    }
    void* wide = ::mmap(nullptr, size + alignment, PROT_NONE, kFlags, -1, 0);
    if (wide == MAP_FAILED) {
        return nullptr;
    }
    const auto start = reinterpret_cast<uint64_t>(wide);
    const uint64_t aligned = (start + alignment - 1) / alignment * alignment;
    if (aligned > start) {
        ::munmap(wide, aligned - start);
    }
    const uint64_t tail = start + size + alignment - (aligned + size);
    if (tail > 0) {
        ::munmap(reinterpret_cast<void*>(aligned + size), tail);
    }
    return reinterpret_cast<void*>(aligned);
}

namespace {

// Where the driver has its pools and packs small reservations (docs/design/hardware-notes.md).
constexpr uint64_t kFirstPlace = 0x302000000;
constexpr int kPlacesTried = 256;
constexpr uint64_t kOwnMemory = 8 << 20;

void* reserve_place(uint64_t size) {
    for (int i = 0; i < kPlacesTried; i++) {
        const uint64_t hint = kFirstPlace + static_cast<uint64_t>(i) * kPlaces;
        void* at = reserve_addresses(size, kPlaces, hint);
        if (at == nullptr || reinterpret_cast<uint64_t>(at) == hint) {
            return at;
        }
        ::munmap(at, size);
    }
    return reserve_addresses(size, kPlaces, 0);
}

// The first gap of `size` in a piece; 0: there is none.
uint64_t gap_in(const std::map<uint64_t, uint64_t>& used, uint64_t piece, size_t size,
                size_t alignment, size_t piece_size = kPlaces) {
    uint64_t at = piece;
    for (auto next = used.lower_bound(piece); at + size <= piece + piece_size; ++next) {
        if (next == used.end() || next->first >= at + size) {
            return at;
        }
        at = (next->second + alignment - 1) / alignment * alignment;
    }
    return 0;
}

} // namespace

void* reserve_small(size_t size, size_t alignment) {
    auto& p = process();
    std::lock_guard lock(p.mutex);
    uint64_t at = 0;
    for (auto piece = p.pieces.begin(); at == 0 && piece != p.pieces.end(); ++piece) {
        at = gap_in(p.small, *piece, size, alignment);
    }
    if (at == 0) {
        at = reinterpret_cast<uint64_t>(reserve_place(kPlaces));
        if (at == 0) {
            return nullptr;
        }
        p.pieces.push_back(at);
    }
    p.small[at] = at + size;
    return reinterpret_cast<void*>(at);
}

bool reserve_own_range() {
    const char* room = std::getenv("FLOWGPU_EMU_ROOM");
    auto& p = process();
    std::lock_guard lock(p.mutex);
    if (room == nullptr || p.own_range != 0) {
        return true;
    }
    p.own_bytes = std::strtoull(room, nullptr, 10) << 20;
    p.own_range = reinterpret_cast<uint64_t>(reserve_addresses(p.own_bytes, kPlaces, 0));
    p.in_own_range[p.own_range] = p.own_range + kOwnMemory;
    return p.own_range != 0;
}

void* reserve_large(size_t size, size_t alignment, uint64_t hint) {
    const size_t whole = (size + kPlaces - 1) / kPlaces * kPlaces;
    auto& p = process();
    std::lock_guard lock(p.mutex);
    if (p.own_range != 0) {
        if (const uint64_t at = gap_in(p.in_own_range, p.own_range, size, alignment, p.own_bytes)) {
            p.in_own_range[at] = at + size;
            return reinterpret_cast<void*>(at);
        }
    }
    void* start = hint == 0 && alignment == kPlaces ? reserve_place(whole)
                                                    : reserve_addresses(whole, alignment, hint);
    if (start != nullptr && size < whole) {
        const auto at = reinterpret_cast<uint64_t>(start);
        p.pieces.push_back(at + whole - kPlaces);
        p.small[at + whole - kPlaces] = at + size;
    }
    return start;
}

void unreserve(void* start, size_t size) {
    auto& p = process();
    std::lock_guard lock(p.mutex);
    const auto at = reinterpret_cast<uint64_t>(start);
    if (size < kPlaces) {
        p.small.erase(at);
        return;
    }
    if (p.in_own_range.erase(at) != 0) {
        return;
    }
    size_t whole = (size + kPlaces - 1) / kPlaces * kPlaces;
    if (size < whole) {
        const uint64_t last = at + whole - kPlaces;
        p.small.erase(last);
        const auto other = p.small.lower_bound(last);
        if (other != p.small.end() && other->first < last + kPlaces) {
            whole -= kPlaces;
        } else {
            p.pieces.erase(std::find(p.pieces.begin(), p.pieces.end(), last));
        }
    }
    if (whole > 0) {
        ::munmap(start, whole);
    }
}

CUresult Call::exchange(ThreadState& thread, int32_t* result) {
    int fd;
    if (const CUresult r = take_connection(&fd); r != CUDA_SUCCESS) {
        return r;
    }
    const int flags = (thread.per_thread_stream > 0 ? kFlagPerThreadStream : 0) |
                      thread.capture_mode << kCaptureModeShift;
    RequestHeader request{static_cast<uint32_t>(writer_.buffer().size()), op_,
                          static_cast<uint16_t>(flags), thread.current(), thread.tid};
    ReplyHeader reply{};
    const bool ok = send_message(fd, &request, sizeof request, writer_.buffer(), fd_) &&
                    receive_message(fd, &reply, sizeof reply, reply_, &received_);
    return_connection(fd, ok);
    if (!ok) {
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    reader_ = Reader(reply_.data(), reply_.size());
    *result = reply.result;
    return CUDA_SUCCESS;
}

CUresult Call::go() {
    Entry entry;
    return entry.status() != CUDA_SUCCESS ? entry.status() : go_ungated();
}

CUresult Call::go_ungated() {
    ThreadState& thread = thread_state();
    for (;;) {
        int32_t result;
        if (const CUresult r = exchange(thread, &result); r != CUDA_SUCCESS) {
            return r;
        }
        if (result != kNeedAddresses) {
            return static_cast<CUresult>(result);
        }
        const auto need = take<uint64_t>();
        if ((need & kForManaged) != 0) {
            if (const CUresult r = give_managed_piece(need & ~kForManaged); r != CUDA_SUCCESS) {
                return r;
            }
            continue;
        }
        const uint64_t size = (need + kPlaces - 1) / kPlaces * kPlaces;
        void* at = reserve_place(size);
        if (at == nullptr) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        Call add(Op::AddAddresses);
        add.in(reinterpret_cast<uint64_t>(at)).in(size);
        if (const CUresult r = add.go_ungated(); r != CUDA_SUCCESS) {
            return r;
        }
    }
}

CUresult unsupported(const char* name) {
    Entry entry;
    if (entry.status() == CUDA_SUCCESS) {
        Call call(Op::Unsupported);
        call.in_string(name);
        call.go();
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult set_access(Call& call, const CUmemAccessDesc* access, size_t count) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    if (access == nullptr || count == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    call.in(uint64_t{count});
    for (size_t i = 0; i < count; ++i) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
            return unsupported("access outside a device");
        }
        call.in(access[i].location.id).in(static_cast<uint32_t>(access[i].flags));
    }
    return call.go();
}

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const int saved = errno;
    Process& p = process();
    static std::mutex init_mutex;
    CUresult result = CUDA_SUCCESS;
    if (p.initialized.load(std::memory_order_acquire)) {
        return p.pid == ::getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    }
    std::lock_guard<std::mutex> lock(init_mutex);
    if (!p.initialized.load(std::memory_order_acquire)) {
        p.pid = ::getpid();
        note_taken_addresses();
        uint64_t client = 0;
        int control = -1;
        if (!bind_uvm_name()) {
            result = CUDA_ERROR_OPERATING_SYSTEM;
        } else if (!join_service()) {
            close_connections();
            result = CUDA_ERROR_MPS_CONNECTION_FAILED;
        } else if ((control = open_connection(0, &client)) < 0) {
            close_connections();
            result = CUDA_ERROR_NO_DEVICE;
        } else {
            p.control = control;
            p.client_id = client;
            Call devices(Op::DeviceCount);
            if (devices.go_ungated() != CUDA_SUCCESS || devices.take<int32_t>() == 0) {
                close_connections();
                result = CUDA_ERROR_NO_DEVICE;
            } else if (!start_helper() || std::atexit(shut_down) != 0 ||
                       ::pthread_atfork(nullptr, nullptr, forget_in_child) != 0) {
                close_connections();
                result = CUDA_ERROR_OPERATING_SYSTEM;
            } else {
                const char* loading = std::getenv("CUDA_MODULE_LOADING");
                p.eager = loading != nullptr && std::strcmp(loading, "EAGER") == 0;
                p.initialized.store(true, std::memory_order_release);
            }
        }
    }
    errno = saved;
    return result;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
    if (version == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *version = 13000;
    return CUDA_SUCCESS;
}

} // extern "C"
