#include "network.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

namespace flowgpu::nccl {

namespace {

constexpr size_t kMemoryBytes = FN_FIFO_BYTES + FN_HEADER_BYTES;
constexpr unsigned kFirstNapUs = 20, kLastNapUs = 2000;

uint64_t load(const char* at) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE);
}

void store(char* at, uint64_t value) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(at), value, __ATOMIC_RELEASE);
}

// As NCCL's: a file in memory that has lost its name.
Result make_memory(char** memory, CUdeviceptr* seen) {
    char path[] = "/dev/shm/nccl-XXXXXX";
    const int file = mkostemp(path, O_CLOEXEC);
    if (file < 0)
        return failed(kSystemError, "%s: %s", path, strerror(errno));
    unlink(path);
    const bool sized = ftruncate(file, kMemoryBytes) == 0;
    void* at = sized ? mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                     : MAP_FAILED;
    const int error = errno;
    ::close(file);
    if (at == MAP_FAILED)
        return failed(kSystemError, "shared memory: %s", strerror(error));
    CUresult result = FN_CU(cuMemHostRegister, at, kMemoryBytes,
                            CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    const bool registered = result == CUDA_SUCCESS;
    if (registered)
        result = FN_CU(cuMemHostGetDevicePointer, seen, at, 0);
    if (result != CUDA_SUCCESS) {
        if (registered)
            FN_CU(cuMemHostUnregister, at);
        munmap(at, kMemoryBytes);
        return cuda_failed("host memory for the network", result);
    }
    *memory = static_cast<char*>(at);
    return kSuccess;
}

} // namespace

Result Network::accept(int listener, uint64_t magic, const Stop& stop, Lane* lane) {
    for (;;) {
        int connection = -1;
        uint64_t said = 0;
        FN_TRY(accept_tcp(listener, &connection, stop));
        if (receive_all(connection, &said, sizeof said, stop) == kSuccess && said == magic)
            return add(connection, false, lane);
        ::close(connection); // no rank of ours
    }
}

Result Network::connect(const sockaddr_in& address, uint64_t magic, const Stop& stop, Lane* lane) {
    int connection = -1;
    FN_TRY(connect_tcp(address, &connection, stop));
    if (const Result result = send_all(connection, &magic, sizeof magic, stop);
        result != kSuccess) {
        ::close(connection);
        return result;
    }
    return add(connection, true, lane);
}

Result Network::add(int connection, bool sends, Lane* lane) {
    char* memory = nullptr;
    CUdeviceptr seen = 0;
    if (const Result result = make_memory(&memory, &seen); result != kSuccess) {
        ::close(connection);
        return result;
    }
    *lane = {seen, seen + FN_FIFO_BYTES, 0};
    std::lock_guard<std::mutex> lock(mutex_);
    links_.push_back({connection, sends, false, memory, 0, 0, 0});
    if (!thread_.joinable())
        thread_ = std::thread(&Network::work, this);
    return kSuccess;
}

void Network::end() {
    ending_ = true;
    if (thread_.joinable())
        thread_.join();
    for (const Link& link : links_) {
        ::close(link.connection);
        FN_CU(cuMemHostUnregister, link.memory);
        munmap(link.memory, kMemoryBytes);
    }
    links_.clear();
}

void Network::work() {
    prctl(PR_SET_NAME, "NCCL Progress");
    unsigned nap = kFirstNapUs;
    while (!ending_) {
        bool moved = false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (Link& link : links_)
                moved |= !link.over && move(&link);
        }
        nap = moved ? kFirstNapUs : std::min(2 * nap, kLastNapUs);
        if (!moved)
            usleep(nap);
    }
}

// True if anything went on. Nothing here waits, since a peer may wait for another of the links.
bool Network::move(Link* link) {
    return link->sends ? send(link) : receive(link);
}

void Network::lost(Link* link) {
    link->over = true;
    if (!expects_end_)
        *state_ = kRemoteError;
}

bool Network::send(Link* link) {
    if (link->step == load(link->memory))
        return false;
    const uint64_t at = link->step % FN_SLOTS;
    link->bytes = load(link->memory + FN_SIZES + 8 * at);
    char* chunk = link->memory + FN_HEADER_BYTES + at * FN_SLOT_BYTES;
    iovec parts[] = {{&link->bytes, sizeof link->bytes}, {chunk, link->bytes}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    size_t done = link->done;
    for (iovec& part : parts) {
        const size_t here = std::min(done, part.iov_len);
        part.iov_base = static_cast<char*>(part.iov_base) + here;
        part.iov_len -= here;
        done -= here;
    }
    const ssize_t sent = sendmsg(link->connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EINTR)
            lost(link);
        return false;
    }
    link->done += static_cast<size_t>(sent);
    if (link->done < sizeof link->bytes + link->bytes)
        return true;
    link->done = 0;
    store(link->memory + FN_FIFO_BYTES, ++link->step);
    return true;
}

bool Network::receive(Link* link) {
    if (link->step - load(link->memory + FN_FIFO_BYTES) >= FN_SLOTS)
        return false;
    char* chunk = link->memory + FN_HEADER_BYTES + link->step % FN_SLOTS * FN_SLOT_BYTES;
    const bool knows = link->done >= sizeof link->bytes;
    char* to = knows ? chunk + (link->done - sizeof link->bytes)
                     : reinterpret_cast<char*>(&link->bytes) + link->done;
    const size_t wanted =
        (knows ? sizeof link->bytes + link->bytes : sizeof link->bytes) - link->done;
    const ssize_t got = recv(link->connection, to, wanted, MSG_DONTWAIT);
    if (got <= 0) {
        if (got == 0 || (errno != EAGAIN && errno != EINTR))
            lost(link);
        return false;
    }
    link->done += static_cast<size_t>(got);
    if (link->done < sizeof link->bytes)
        return true;
    if (link->bytes > FN_SLOT_BYTES) {
        lost(link);
        return false;
    }
    if (link->done < sizeof link->bytes + link->bytes)
        return true;
    link->done = 0;
    store(link->memory, ++link->step);
    return true;
}

} // namespace flowgpu::nccl
