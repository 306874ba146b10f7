#include "proxy.h"

#include <atomic>
#include <cstdio>

#include <sys/prctl.h>
#include <unistd.h>

namespace flowgpu::nccl {

namespace {

constexpr int kPollMs = 500; // as NCCL's thread looks whether it is to end
const Stop kNever{false};

std::string name_of(int rank, uint64_t magic) {
    char text[80];
    snprintf(text, sizeof text, "/tmp/nccl-socket-%d-%llx", rank,
             static_cast<unsigned long long>(magic));
    return text;
}

struct Made {
    Result result;
    Memory memory;
};
struct Question {
    uint64_t magic, number;
    char back[80]; // the name to answer to
};

} // namespace

Result Proxy::start(CUcontext context, CUdevice device, uint64_t magic, int rank,
                    const Stop& stop) {
    context_ = context;
    device_ = device;
    magic_ = magic;
    rank_ = rank;
    stop_ = &stop;
    unix_ = bind_abstract(name_of(rank, magic));
    if (unix_ < 0)
        return failed(kSystemError, "the name @%s is taken", name_of(rank, magic).c_str());
    sockaddr_in address{};
    FN_TRY(listen_tcp(&listener_, &address));
    FN_TRY(connect_tcp(address, &connection_, stop));
    int served = -1;
    FN_TRY(accept_tcp(listener_, &served, stop));
    service_ = std::thread(&Proxy::serve, this, served);
    answerer_ = std::thread(&Proxy::answer_peers, this);
    return kSuccess;
}

void Proxy::end() {
    ending_ = true;
    if (connection_ >= 0)
        ::close(connection_);
    if (service_.joinable())
        service_.join();
    if (answerer_.joinable())
        answerer_.join();
    if (listener_ >= 0)
        ::close(listener_);
    if (unix_ >= 0)
        ::close(unix_);
    connection_ = listener_ = unix_ = -1;
}

void Proxy::serve(int connection) {
    prctl(PR_SET_NAME, "NCCL Service");
    FN_CU(cuCtxSetCurrent, context_);
    uint64_t bytes = 0;
    while (receive_all(connection, &bytes, sizeof bytes, kNever) == kSuccess) {
        Made made{};
        made.result = allocate(device_, bytes, &made.memory);
        if (made.result == kSuccess)
            made_.push_back(made.memory);
        if (send_all(connection, &made, sizeof made, kNever) != kSuccess)
            break;
    }
    for (const Memory& one : made_)
        unmap(one, true);
    made_.clear();
    ::close(connection);
}

Result Proxy::make(size_t bytes, Memory* memory) {
    const uint64_t wanted = bytes;
    Made made{};
    FN_TRY(send_all(connection_, &wanted, sizeof wanted, *stop_));
    FN_TRY(receive_all(connection_, &made, sizeof made, *stop_));
    *memory = made.memory;
    return made.result == kSuccess ? kSuccess
                                   : failed(made.result, "memory for a peer cannot be made");
}

void Proxy::answer_peers() {
    prctl(PR_SET_NAME, "NCCL UDS Service");
    FN_CU(cuCtxSetCurrent, context_);
    while (!ending_ && !*stop_) {
        Question question{};
        int descriptor = -1;
        if (!readable(unix_, kPollMs) ||
            receive_datagram(unix_, &question, sizeof question, &descriptor) != sizeof question ||
            question.magic != magic_)
            continue;
        const CUresult result = FN_CU(cuMemExportToShareableHandle, &descriptor,
                                      static_cast<CUmemGenericAllocationHandle>(question.number),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        question.back[sizeof question.back - 1] = 0;
        const int answer = result;
        send_datagram(unix_, question.back, &answer, sizeof answer,
                      result == CUDA_SUCCESS ? descriptor : -1);
        if (result == CUDA_SUCCESS)
            ::close(descriptor);
    }
}

Result Proxy::import(int peer, uint64_t number, size_t bytes, Memory* memory) {
    static std::atomic<unsigned> serial{0};
    Question question{};
    question.magic = magic_;
    question.number = number;
    snprintf(question.back, sizeof question.back, "/tmp/nccl-socket-%d-%d-%u-%llx", rank_, getpid(),
             serial.fetch_add(1), static_cast<unsigned long long>(magic_));
    const int own = bind_abstract(question.back);
    if (own < 0)
        return failed(kSystemError, "no socket to ask rank %d for its memory", peer);
    int answer = CUDA_SUCCESS, descriptor = -1;
    Result result = kSuccess;
    if (!send_datagram(own, name_of(peer, magic_), &question, sizeof question))
        result = failed(kRemoteError, "rank %d does not answer for its memory", peer);
    while (result == kSuccess && !readable(own, kPollMs))
        result = *stop_ ? failed(kInternalError, "the communicator was aborted") : kSuccess;
    if (result == kSuccess &&
        (receive_datagram(own, &answer, sizeof answer, &descriptor) != sizeof answer ||
         answer != CUDA_SUCCESS || descriptor < 0))
        result =
            failed(kRemoteError, "rank %d cannot export its memory: CUDA error %d", peer, answer);
    ::close(own);
    if (result != kSuccess)
        return result;
    CUmemGenericAllocationHandle handle = 0;
    const CUresult imported = FN_CU(cuMemImportFromShareableHandle, &handle,
                                    reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    ::close(descriptor);
    if (imported != CUDA_SUCCESS)
        return cuda_failed("cuMemImportFromShareableHandle", imported);
    result = map(device_, handle, bytes, memory);
    if (result != kSuccess)
        FN_CU(cuMemRelease, handle);
    return result;
}

} // namespace flowgpu::nccl
