// The functions of libnccl.so.2, as NCCL's documentation has them. Calls of its own exports go
// through the PLT, as in the real library, so a library that is preloaded sees them.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>

#include "group.h"

using namespace flowgpu::nccl;

#define FN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::mutex mutex;
std::set<Comm*> living;
std::map<uint64_t, std::vector<Comm*>> ending; // ranks of this process that wait for the others

bool lives(Comm* comm) {
    std::lock_guard<std::mutex> lock(mutex);
    return living.count(comm) != 0;
}

Comm* keep(std::unique_ptr<Comm> comm) {
    std::lock_guard<std::mutex> lock(mutex);
    return *living.insert(comm.release()).first;
}

void drop(Comm* comm) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        living.erase(comm);
    }
    wait_for_background(comm);
    delete comm;
}

Result no_comm(const char* function) {
    return failed(kInvalidArgument, "%s: this is no communicator", function);
}

bool blocks(const Config* config, Result* result) {
    if (!config)
        return true;
    if (config->magic != kConfigMagic || config->size < sizeof(Config))
        *result = failed(kInvalidArgument, "a configuration is not initialised");
    return config->blocking != 0;
}

// What is made is there at once; who it belongs to is found out later.
Result start(void** out, std::unique_ptr<Comm> made, std::function<Result(Comm*)> run,
             Comm* order) {
    if (!out)
        return failed(kInvalidArgument, "no place for a communicator");
    if (!made)
        return kUnhandledCudaError;
    Comm* comm = keep(std::move(made));
    *out = comm;
    return add({order ? order : comm, comm, [=] {
                    const Result result = run(comm);
                    if (result != kSuccess && comm->blocking) {
                        comm->close(false);
                        drop(comm);
                        *out = nullptr;
                    }
                    return result;
                }});
}

Result init(void** out, int ranks, const UniqueId& id, int rank, std::unique_ptr<Comm> made) {
    const Root root = root_of(id);
    if (ranks < 1 || rank < 0 || rank >= ranks || root.magic == 0)
        return failed(kInvalidArgument, "rank %d of %d, or no unique id", rank, ranks);
    return start(
        out, std::move(made), [=](Comm* comm) { return comm->init(root, rank, ranks); }, nullptr);
}

// All ranks of the process go together, because each waits for the others.
Result end_all(const std::vector<Comm*>& comms) {
    std::vector<Result> results(comms.size(), kSuccess);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < comms.size(); i++)
        threads.emplace_back([&, i] { results[i] = comms[i]->close(true); });
    for (std::thread& one : threads)
        one.join();
    for (Comm* comm : comms)
        drop(comm);
    for (const Result one : results)
        FN_TRY(one);
    return kSuccess;
}

Result end(Comm* comm) {
    wait_for_background(comm);
    std::vector<Comm*> comms;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto& waiting = ending[comm->magic()];
        waiting.push_back(comm);
        if (static_cast<int>(waiting.size()) < comm->ranks_in_this_process())
            return kSuccess;
        comms = std::move(waiting);
        ending.erase(comm->magic());
    }
    return end_all(comms);
}

} // namespace

FN_EXPORT Result ncclCommGetAsyncError(Comm* comm, Result* result) {
    if (!lives(comm) || !result)
        return no_comm("ncclCommGetAsyncError");
    *result = static_cast<Result>(comm->state.load());
    return kSuccess;
}

namespace {

Result ready(Comm* comm, const char* function) {
    Result state = kSuccess;
    if (!lives(comm))
        return no_comm(function);
    FN_TRY(ncclCommGetAsyncError(comm, &state));
    if (state == kInProgress)
        return failed(kInvalidArgument, "%s: an earlier call is still in progress", function);
    return state;
}

Result enqueue(const char* function, Comm* comm, CUstream stream, Work work, int type, int op) {
    FN_TRY(ready(comm, function));
    if (type < kI8 || type > kF8b)
        return failed(kInvalidArgument, "%s: data type %d", function, type);
    work.type = static_cast<Type>(type);
    const bool reduces =
        work.kind == kAllReduce || work.kind == kReduce || work.kind == kReduceScatter;
    const bool custom = reduces && op >= kPreMultiplied;
    const auto at = static_cast<size_t>(op - kPreMultiplied);
    if (reduces && (op < kSum || type > kBf16 ||
                    (custom && (at >= comm->scalars.size() || !comm->scalars[at].used ||
                                comm->scalars[at].type != type))))
        return failed(kInvalidArgument, "%s: operation %d on data type %d", function, op, type);
    if (custom) {
        work.scalar = comm->scalars[at].bits;
        work.scalar_is_on_device = comm->scalars[at].on_device;
    }
    work.reduction = static_cast<Reduction>(custom ? kPreMultiplied : op);
    if (work.peer < 0 || work.peer >= comm->ranks())
        return failed(kInvalidArgument, "%s: rank %d of %d", function, work.peer, comm->ranks());
    if (work.count == 0 && work.kind < kSend)
        return kSuccess;
    return add(comm, {work, stream});
}

Work work_of(Kind kind, const void* send, void* receive, size_t count, int peer) {
    Work work{};
    work.kind = kind;
    work.send = reinterpret_cast<u64>(send);
    work.receive = reinterpret_cast<u64>(receive);
    work.count = count;
    work.peer = peer;
    return work;
}

} // namespace

FN_EXPORT Result ncclGetVersion(int* version) {
    if (!version)
        return failed(kInvalidArgument, "no place for the version");
    *version = kVersion;
    return kSuccess;
}

FN_EXPORT const char* ncclGetErrorString(Result result) {
    static const char* const kTexts[] = {"no error",
                                         "unhandled cuda error",
                                         "unhandled system error",
                                         "internal error",
                                         "invalid argument",
                                         "invalid usage",
                                         "remote process exited or there was a network error",
                                         "NCCL operation in progress"};
    return result >= kSuccess && result <= kInProgress ? kTexts[result] : "unknown result code";
}

FN_EXPORT const char* ncclGetLastError(Comm* comm) {
    return comm && lives(comm) && !comm->error.empty() ? comm->error.c_str() : last_error();
}

FN_EXPORT Result ncclGetUniqueId(UniqueId* id) {
    return id ? make_root(id) : failed(kInvalidArgument, "no place for a unique id");
}

FN_EXPORT Result ncclCommInitRank(void** out, int ranks, UniqueId id, int rank) {
    return init(out, ranks, id, rank, Comm::on_current_device(true));
}

FN_EXPORT Result ncclCommInitRankConfig(void** out, int ranks, UniqueId id, int rank,
                                        const Config* config) {
    Result result = kSuccess;
    const bool blocking = blocks(config, &result);
    FN_TRY(result);
    return init(out, ranks, id, rank, Comm::on_current_device(blocking));
}

// Each of the ids would do: all ranks ask the first one's root.
FN_EXPORT Result ncclCommInitRankScalable(void** out, int ranks, int rank, int count,
                                          const UniqueId* ids, const Config* config) {
    if (count < 1 || !ids)
        return failed(kInvalidArgument, "no unique id");
    Result result = kSuccess;
    const bool blocking = blocks(config, &result);
    FN_TRY(result);
    return init(out, ranks, ids[0], rank, Comm::on_current_device(blocking));
}

FN_EXPORT Result ncclCommInitAll(void** out, int devices, const int* list) {
    if (!out || devices < 1)
        return failed(kInvalidArgument, "no place for communicators");
    UniqueId id;
    FN_TRY(ncclGetUniqueId(&id));
    group_start();
    Result result = kSuccess;
    for (int i = 0; i < devices && result == kSuccess; i++)
        result = init(&out[i], devices, id, i, Comm::on_device(list ? list[i] : i));
    const Result ended = group_end();
    return result != kSuccess ? result : ended;
}

FN_EXPORT Result ncclCommSplit(Comm* comm, int color, int key, void** out, const Config* config) {
    Result result = kSuccess;
    const bool blocking = config ? blocks(config, &result) : lives(comm) && comm->blocking;
    FN_TRY(result);
    FN_TRY(ready(comm, "ncclCommSplit"));
    return start(
        out, comm->sibling(blocking),
        [=](Comm* child) {
            bool in_it = false;
            const Result split = comm->split(child, color, key, &in_it);
            if (split == kSuccess && !in_it) {
                child->close(false);
                drop(child);
                *out = nullptr;
            }
            return split;
        },
        comm);
}

FN_EXPORT Result ncclCommShrink(Comm* comm, const int* left_out, int count, void** out,
                                const Config* config, int) {
    Result result = kSuccess;
    const bool blocking = config ? blocks(config, &result) : lives(comm) && comm->blocking;
    FN_TRY(result);
    FN_TRY(ready(comm, "ncclCommShrink"));
    const std::vector<int> out_of_it(left_out, left_out + count);
    return start(
        out, comm->sibling(blocking), [=](Comm* child) { return comm->shrink(child, out_of_it); },
        comm);
}

FN_EXPORT Result ncclCommFinalize(Comm* comm) {
    return ready(comm, "ncclCommFinalize");
}

FN_EXPORT Result ncclCommDestroy(Comm* comm) {
    if (!comm)
        return kSuccess;
    if (!lives(comm))
        return no_comm("ncclCommDestroy");
    return add({comm, nullptr, [=] { return end(comm); }});
}

FN_EXPORT Result ncclCommAbort(Comm* comm) {
    if (!comm)
        return kSuccess;
    if (!lives(comm))
        return no_comm("ncclCommAbort");
    comm->abort();
    wait_for_background(comm);
    comm->close(false);
    drop(comm);
    return kSuccess;
}

FN_EXPORT Result ncclCommRevoke(Comm* comm, int) {
    if (!lives(comm))
        return no_comm("ncclCommRevoke");
    comm->abort();
    return kSuccess;
}

FN_EXPORT Result ncclCommCount(Comm* comm, int* count) {
    FN_TRY(ready(comm, "ncclCommCount"));
    *count = comm->ranks();
    return kSuccess;
}

FN_EXPORT Result ncclCommUserRank(Comm* comm, int* rank) {
    FN_TRY(ready(comm, "ncclCommUserRank"));
    *rank = comm->rank();
    return kSuccess;
}

FN_EXPORT Result ncclCommCuDevice(Comm* comm, int* device) {
    FN_TRY(ready(comm, "ncclCommCuDevice"));
    *device = comm->device();
    return kSuccess;
}

FN_EXPORT Result ncclGroupStart() {
    group_start();
    return kSuccess;
}

FN_EXPORT Result ncclGroupEnd() {
    return group_end();
}

FN_EXPORT Result ncclGroupSimulateEnd(void*) {
    group_drop();
    return kSuccess;
}

FN_EXPORT Result ncclAllReduce(const void* from, void* to, size_t count, int type, int op,
                               Comm* comm, CUstream stream) {
    return enqueue("ncclAllReduce", comm, stream, work_of(kAllReduce, from, to, count, 0), type,
                   op);
}

FN_EXPORT Result ncclReduce(const void* from, void* to, size_t count, int type, int op, int root,
                            Comm* comm, CUstream stream) {
    return enqueue("ncclReduce", comm, stream, work_of(kReduce, from, to, count, root), type, op);
}

FN_EXPORT Result ncclReduceScatter(const void* from, void* to, size_t count, int type, int op,
                                   Comm* comm, CUstream stream) {
    return enqueue("ncclReduceScatter", comm, stream, work_of(kReduceScatter, from, to, count, 0),
                   type, op);
}

FN_EXPORT Result ncclBroadcast(const void* from, void* to, size_t count, int type, int root,
                               Comm* comm, CUstream stream) {
    return enqueue("ncclBroadcast", comm, stream, work_of(kBroadcast, from, to, count, root), type,
                   0);
}

FN_EXPORT Result ncclBcast(void* buffer, size_t count, int type, int root, Comm* comm,
                           CUstream stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

FN_EXPORT Result ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm,
                               CUstream stream) {
    return enqueue("ncclAllGather", comm, stream, work_of(kAllGather, from, to, count, 0), type, 0);
}

FN_EXPORT Result ncclAlltoAll(const void* from, void* to, size_t count, int type, Comm* comm,
                              CUstream stream) {
    return enqueue("ncclAlltoAll", comm, stream, work_of(kAllToAll, from, to, count, 0), type, 0);
}

FN_EXPORT Result ncclGather(const void* from, void* to, size_t count, int type, int root,
                            Comm* comm, CUstream stream) {
    return enqueue("ncclGather", comm, stream, work_of(kGather, from, to, count, root), type, 0);
}

FN_EXPORT Result ncclScatter(const void* from, void* to, size_t count, int type, int root,
                             Comm* comm, CUstream stream) {
    return enqueue("ncclScatter", comm, stream, work_of(kScatter, from, to, count, root), type, 0);
}

FN_EXPORT Result ncclSend(const void* from, size_t count, int type, int peer, Comm* comm,
                          CUstream stream) {
    return enqueue("ncclSend", comm, stream, work_of(kSend, from, nullptr, count, peer), type, 0);
}

FN_EXPORT Result ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, CUstream stream) {
    return enqueue("ncclRecv", comm, stream, work_of(kReceive, nullptr, to, count, peer), type, 0);
}

FN_EXPORT Result ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence,
                                          Comm* comm) {
    static constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    FN_TRY(ready(comm, "ncclRedOpCreatePreMulSum"));
    if (!op || !scalar || type < kI8 || type > kBf16)
        return failed(kInvalidArgument, "ncclRedOpCreatePreMulSum: data type %d", type);
    Scalar made{reinterpret_cast<uint64_t>(scalar), static_cast<Type>(type), residence == 0, true};
    if (!made.on_device) {
        made.bits = 0;
        memcpy(&made.bits, scalar, kBytes[type]);
    }
    const auto free = std::find_if(comm->scalars.begin(), comm->scalars.end(),
                                   [](const Scalar& one) { return !one.used; });
    *op = kPreMultiplied + static_cast<int>(free - comm->scalars.begin());
    if (free == comm->scalars.end())
        comm->scalars.push_back(made);
    else
        *free = made;
    return kSuccess;
}

FN_EXPORT Result ncclRedOpDestroy(int op, Comm* comm) {
    FN_TRY(ready(comm, "ncclRedOpDestroy"));
    const auto at = static_cast<size_t>(op - kPreMultiplied);
    if (op < kPreMultiplied || at >= comm->scalars.size() || !comm->scalars[at].used)
        return failed(kInvalidArgument, "ncclRedOpDestroy: %d is no operation of this communicator",
                      op);
    comm->scalars[at].used = false;
    return kSuccess;
}

namespace {

std::map<CUdeviceptr, Memory> given; // by ncclMemAlloc; under `mutex`

} // namespace

FN_EXPORT Result ncclMemAlloc(void** out, size_t bytes) {
    CUdevice device = 0;
    if (!out || bytes == 0)
        return failed(kInvalidArgument, "ncclMemAlloc: no place, or no bytes");
    if (!driver())
        return kUnhandledCudaError;
    FN_CU_TRY(cuCtxGetDevice, &device);
    Memory memory;
    FN_TRY(allocate(device, bytes, &memory));
    std::lock_guard<std::mutex> lock(mutex);
    given[memory.address] = memory;
    *out = reinterpret_cast<void*>(memory.address);
    return kSuccess;
}

FN_EXPORT Result ncclMemFree(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto at = given.find(reinterpret_cast<CUdeviceptr>(address));
    if (at == given.end())
        return failed(kInvalidArgument, "ncclMemFree: this is not from ncclMemAlloc");
    unmap(at->second, true);
    given.erase(at);
    return kSuccess;
}

// User buffers are never used directly, so there is nothing to register.
FN_EXPORT Result ncclCommRegister(Comm* comm, void* buffer, size_t, void** handle) {
    FN_TRY(ready(comm, "ncclCommRegister"));
    *handle = buffer;
    return kSuccess;
}

FN_EXPORT Result ncclCommDeregister(Comm* comm, void*) {
    return ready(comm, "ncclCommDeregister");
}

// NCCL answers this without symmetric memory.
FN_EXPORT Result ncclCommWindowRegister(Comm* comm, void*, size_t, void** window, int) {
    FN_TRY(ready(comm, "ncclCommWindowRegister"));
    *window = nullptr;
    return kSuccess;
}

FN_EXPORT Result ncclCommWindowDeregister(Comm* comm, void*) {
    return ready(comm, "ncclCommWindowDeregister");
}

FN_EXPORT Result ncclDevCommCreate(Comm*, const void*, void*) {
    return failed(kInvalidUsage, "this NCCL has no device communicators");
}

FN_EXPORT Result ncclDevCommDestroy(Comm*, const void*) {
    return failed(kInvalidUsage, "this NCCL has no device communicators");
}
