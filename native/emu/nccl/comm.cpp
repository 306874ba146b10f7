#include "comm.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

namespace flowgpu::nccl {

namespace {

enum Tag { kFromSender = 1, kFromReceiver, kToLeader, kFromLeader };

uint64_t mix(uint64_t seed, const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; i++)
        seed = (seed ^ at[i]) * 0x100000001b3u;
    return seed;
}

// As NCCL's: ranks with another one are on another host.
uint64_t host_hash() {
    const char* chosen = getenv("NCCL_HOSTID");
    std::string text = chosen ? chosen : "";
    if (!chosen) {
        char name[256] = "";
        gethostname(name, sizeof name - 1);
        std::string boot;
        std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
        text = name + boot;
    }
    return mix(0xcbf29ce484222325u, text.data(), text.size());
}

uint64_t pid_namespace() {
    struct stat about{};
    return stat("/proc/self/ns/pid", &about) == 0 ? about.st_ino : 0;
}

bool is_pair(const Task& task) {
    return task.work.kind >= kSend;
}

// NCCL has another algorithm for these.
bool is_large(const Task& task) {
    return !is_pair(task) && task.work.count >= FN_LARGE;
}

} // namespace

Comm::Comm(CUcontext context, CUdevice device, bool is_blocking)
    : blocking(is_blocking), context_(context), device_(device) {}

std::unique_ptr<Comm> Comm::on_current_device(bool blocking) {
    if (!driver())
        return nullptr;
    CUcontext context = nullptr;
    CUdevice device = 0;
    FN_CU(cuCtxGetCurrent, &context);
    if (!context)
        return on_device(0);
    if (FN_CU(cuCtxGetDevice, &device) != CUDA_SUCCESS) {
        failed(kUnhandledCudaError, "the current context has no device");
        return nullptr;
    }
    return std::unique_ptr<Comm>(new Comm(context, device, blocking));
}

std::unique_ptr<Comm> Comm::on_device(int device) {
    CUcontext context = nullptr;
    if (!driver())
        return nullptr;
    if (FN_CU(cuDevicePrimaryCtxRetain, &context, device) != CUDA_SUCCESS) {
        failed(kInvalidArgument, "there is no device %d", device);
        return nullptr;
    }
    return std::unique_ptr<Comm>(new Comm(context, device, true));
}

std::unique_ptr<Comm> Comm::sibling(bool blocking) const {
    return std::unique_ptr<Comm>(new Comm(context_, device_, blocking));
}

Result Comm::describe(Info* own) {
    *own = {};
    own->host = host_hash();
    own->pid_namespace = pid_namespace();
    own->pid = getpid();
    own->device = device_;
    return bootstrap_.open(own);
}

bool Comm::is_local(int peer) const {
    const Info& own = bootstrap_.table()[static_cast<size_t>(rank_)];
    const Info& other = bootstrap_.table()[static_cast<size_t>(peer)];
    return own.host == other.host && own.pid == other.pid &&
           own.pid_namespace == other.pid_namespace;
}

bool Comm::is_far(int peer) const {
    const std::vector<Info>& table = bootstrap_.table();
    return table[static_cast<size_t>(peer)].host != table[static_cast<size_t>(rank_)].host;
}

int Comm::ranks_in_this_process() const {
    int found = 0;
    for (int peer = 0; peer < ranks_; peer++)
        found += is_local(peer);
    return found;
}

Result Comm::init(const Root& root, int rank, int ranks) {
    Info own{};
    rank_ = rank;
    ranks_ = ranks;
    if (ranks > FN_RANKS)
        return failed(kInvalidUsage, "%d ranks: this NCCL has at most %d", ranks, FN_RANKS);
    FN_TRY(describe(&own));
    FN_TRY(bootstrap_.meet(root, rank, ranks, own, stop_));
    return establish();
}

Result Comm::establish() {
    Current current(context_);
    Relaxed relaxed;
    sends_connected_.resize(static_cast<size_t>(ranks_));
    receives_connected_.resize(static_cast<size_t>(ranks_));
    FN_CU_TRY(cuStreamCreate, &side_, CU_STREAM_NON_BLOCKING);
    for (CUevent* event : {&serial_, &captured_, &joint_})
        FN_CU_TRY(cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
    FN_TRY(allocate(device_, sizeof(Communicator), &state_memory_));
    Communicator start{};
    start.rank = static_cast<u32>(rank_);
    start.ranks = static_cast<u32>(ranks_);
    FN_TRY(write(state_memory_.address, &start, sizeof start));
    FN_TRY(proxy_.start(context_, device_, bootstrap_.magic(), rank_, stop_));
    return bootstrap_.barrier(stop_); // all answer for their memory from now on
}

Result Comm::found(Comm* child, std::vector<Info> members, int rank) {
    child->rank_ = rank;
    child->ranks_ = static_cast<int>(members.size());
    const uint64_t magic = mix(this->magic(), &members[0].address, sizeof members[0].address);
    FN_TRY(child->bootstrap_.meet(magic, rank, std::move(members), child->stop_));
    return child->establish();
}

Result Comm::split(Comm* child, int color, int key, bool* in_it) {
    struct Part {
        int32_t color, key, rank;
        Info info;
    };
    std::vector<Part> parts(static_cast<size_t>(ranks_));
    Part& own = parts[static_cast<size_t>(rank_)];
    own = {color, key, rank_, {}};
    FN_TRY(child->describe(&own.info));
    FN_TRY(bootstrap_.all_gather(parts.data(), sizeof(Part), stop_));
    *in_it = color >= 0;
    if (!*in_it)
        return kSuccess;
    parts.erase(std::remove_if(parts.begin(), parts.end(),
                               [&](const Part& one) { return one.color != color; }),
                parts.end());
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.key < b.key; });
    std::vector<Info> members;
    int rank = 0;
    for (const Part& one : parts) {
        if (one.rank == rank_)
            rank = static_cast<int>(members.size());
        members.push_back(one.info);
    }
    return found(child, std::move(members), rank);
}

Result Comm::shrink(Comm* child, const std::vector<int>& left_out) {
    std::vector<int> left;
    for (int rank = 0; rank < ranks_; rank++)
        if (std::find(left_out.begin(), left_out.end(), rank) == left_out.end())
            left.push_back(rank);
    const auto own = std::find(left.begin(), left.end(), rank_);
    if (own == left.end())
        return failed(kInvalidArgument, "rank %d leaves itself out", rank_);
    const int place = static_cast<int>(own - left.begin());
    std::vector<Info> members(left.size());
    FN_TRY(child->describe(&members[static_cast<size_t>(place)]));
    const size_t bytes = members.size() * sizeof(Info);
    if (place != 0) {
        FN_TRY(bootstrap_.send(left[0], kToLeader, &members[static_cast<size_t>(place)],
                               sizeof(Info), stop_));
        FN_TRY(bootstrap_.receive(left[0], kFromLeader, members.data(), bytes, stop_));
        return found(child, std::move(members), place);
    }
    for (size_t i = 1; i < left.size(); i++)
        FN_TRY(bootstrap_.receive(left[i], kToLeader, &members[i], sizeof(Info), stop_));
    for (size_t i = 1; i < left.size(); i++)
        FN_TRY(bootstrap_.send(left[i], kFromLeader, members.data(), bytes, stop_));
    return found(child, std::move(members), place);
}

// By a stream of its own, because the program's streams may be captured or busy.
Result Comm::write(CUdeviceptr to, const void* from, size_t bytes) {
    FN_CU_TRY(cuMemcpyHtoDAsync, to, from, bytes, side_);
    FN_CU_TRY(cuStreamSynchronize, side_);
    return kSuccess;
}

Result Comm::own_memory(size_t bytes, Memory* memory) {
    FN_TRY(proxy_.make(bytes, memory));
    FN_CU_TRY(cuMemsetD8Async, memory->address, 0, FN_HEADER_BYTES, side_);
    FN_CU_TRY(cuStreamSynchronize, side_);
    return kSuccess;
}

// A peer's memory: in the same process the handle is mapped once more, as NCCL does it.
Result Comm::reach(int peer, uint64_t number, size_t bytes, CUdeviceptr* address) {
    Memory memory;
    if (is_local(peer))
        FN_TRY(map(device_, number, bytes, &memory));
    else
        FN_TRY(proxy_.import(peer, number, bytes, &memory));
    reached_.push_back(memory);
    imported_.push_back(!is_local(peer));
    *address = memory.address;
    return kSuccess;
}

Result Comm::set_lane(bool sends, Route route, int peer, const Lane& lane) {
    const auto at = static_cast<size_t>(route) * FN_RANKS + static_cast<size_t>(peer);
    const size_t offset = (sends ? offsetof(Communicator, send) : offsetof(Communicator, receive)) +
                          at * sizeof(Lane);
    return write(state_memory_.address + offset, &lane, sizeof lane);
}

Result Comm::connect_collectives() {
    // What a rank tells each of the others: its memory, or where it listens.
    struct Offer {
        uint64_t fifo, fifo_bytes, credit, credit_bytes;
        sockaddr_in address;
    };
    const auto ranks = static_cast<size_t>(ranks_), rank = static_cast<size_t>(rank_);
    std::vector<Offer> offers(ranks * ranks);
    std::vector<Memory> fifos(ranks), credits(ranks);
    std::vector<Listener> listeners(ranks);
    for (size_t peer = 0; peer < ranks; peer++) {
        if (peer == rank)
            continue;
        if (is_far(static_cast<int>(peer))) {
            FN_TRY(listeners[peer].open(&offers[rank * ranks + peer].address));
            continue;
        }
        FN_TRY(own_memory(FN_FIFO_BYTES, &fifos[peer]));
        FN_TRY(own_memory(FN_HEADER_BYTES, &credits[peer]));
        offers[rank * ranks + peer] = {
            fifos[peer].handle, fifos[peer].bytes, credits[peer].handle, credits[peer].bytes, {}};
    }
    FN_TRY(bootstrap_.all_gather(offers.data(), ranks * sizeof(Offer), stop_));
    for (int peer = 0; peer < ranks_; peer++) {
        const auto other = static_cast<size_t>(peer);
        if (other == rank)
            continue;
        const Offer& offer = offers[other * ranks + rank];
        if (is_far(peer)) {
            Lane lane{};
            FN_TRY(network_.connect(offer.address, magic(), stop_, &lane));
            FN_TRY(set_lane(true, kCollectives, peer, lane));
            continue;
        }
        CUdeviceptr fifo = 0, credit = 0;
        FN_TRY(reach(peer, offer.fifo, offer.fifo_bytes, &fifo));
        FN_TRY(reach(peer, offer.credit, offer.credit_bytes, &credit));
        FN_TRY(set_lane(true, kCollectives, peer, {fifo, credits[other].address, 0}));
        FN_TRY(set_lane(false, kCollectives, peer, {fifos[other].address, credit, 0}));
    }
    for (int peer = 0; peer < ranks_; peer++) { // all have been called before one is waited for
        if (!is_far(peer))
            continue;
        Lane lane{};
        FN_TRY(network_.accept(listeners[static_cast<size_t>(peer)].descriptor, magic(), stop_,
                               &lane));
        FN_TRY(set_lane(false, kCollectives, peer, lane));
    }
    collectives_connected_ = true;
    return kSuccess;
}

// They take the same fifos here, but their first one waits for the other ranks as well.
Result Comm::connect_large() {
    std::vector<uint64_t> met(static_cast<size_t>(ranks_));
    FN_TRY(bootstrap_.all_gather(met.data(), sizeof met[0], stop_));
    large_connected_ = true;
    return kSuccess;
}

Result Comm::connect_pairs(const std::vector<Task>& tasks) {
    struct New {
        int peer;
        bool sends;
        Memory own;
        Listener listener; // of a receiver, for a peer on another host
    };
    struct Offer {
        uint64_t number, bytes;
        sockaddr_in address;
    };
    std::vector<New> all;
    for (const Task& task : tasks) {
        const bool sends = task.work.kind == kSend;
        auto& connected = sends ? sends_connected_ : receives_connected_;
        const int peer = task.work.peer;
        if (!is_pair(task) || peer == rank_ || connected[static_cast<size_t>(peer)])
            continue;
        connected[static_cast<size_t>(peer)] = true;
        all.push_back({peer, sends, {}, {}});
    }
    std::stable_partition(all.begin(), all.end(), [](const New& one) { return one.sends; });
    for (New& one : all) { // all are told before any is waited for
        Offer offer{};
        if (!is_far(one.peer)) {
            FN_TRY(own_memory(one.sends ? FN_HEADER_BYTES : FN_FIFO_BYTES, &one.own));
            offer = {one.own.handle, one.own.bytes, {}};
        } else if (!one.sends) {
            FN_TRY(one.listener.open(&offer.address));
        }
        FN_TRY(bootstrap_.send(one.peer, one.sends ? kFromSender : kFromReceiver, &offer,
                               sizeof offer, stop_));
    }
    for (const New& one : all) { // senders first: who accepts waits for one
        Offer offer{};
        CUdeviceptr theirs = 0;
        FN_TRY(bootstrap_.receive(one.peer, one.sends ? kFromReceiver : kFromSender, &offer,
                                  sizeof offer, stop_));
        if (is_far(one.peer)) {
            Lane lane{};
            if (one.sends)
                FN_TRY(network_.connect(offer.address, magic(), stop_, &lane));
            else
                FN_TRY(network_.accept(one.listener.descriptor, magic(), stop_, &lane));
            FN_TRY(set_lane(one.sends, kPairs, one.peer, lane));
            continue;
        }
        FN_TRY(reach(one.peer, offer.number, offer.bytes, &theirs));
        const CUdeviceptr own = one.own.address;
        const Lane lane = one.sends ? Lane{theirs, own, 0} : Lane{own, theirs, 0};
        FN_TRY(set_lane(one.sends, kPairs, one.peer, lane));
    }
    return kSuccess;
}

Result Comm::connect(const std::vector<Task>& tasks) {
    Current current(context_);
    Relaxed relaxed;
    const bool collective = !std::all_of(tasks.begin(), tasks.end(), is_pair);
    if (collective && !collectives_connected_)
        FN_TRY(connect_collectives());
    if (!large_connected_ && std::any_of(tasks.begin(), tasks.end(), is_large))
        FN_TRY(connect_large());
    return connect_pairs(tasks);
}

namespace {

// Sends and receives of a rank to itself become copies. False: one has no partner.
bool pair_own(std::vector<Task>* pairs, int rank) {
    std::vector<Task> others, sends, receives;
    for (const Task& task : *pairs)
        (task.work.peer != rank    ? others
         : task.work.kind == kSend ? sends
                                   : receives)
            .push_back(task);
    if (sends.size() != receives.size())
        return false;
    for (size_t i = 0; i < sends.size(); i++) {
        sends[i].work.kind = kCopy;
        sends[i].work.receive = receives[i].work.receive;
        others.push_back(sends[i]);
    }
    *pairs = std::move(others);
    return true;
}

// Both ends of a pair have the same distance, so kernels that take them in its order never wait
// for one that comes later.
int distance(const Work& work, int rank, int ranks) {
    return work.kind == kSend      ? (work.peer - rank + ranks) % ranks
           : work.kind == kReceive ? (rank - work.peer + ranks) % ranks
                                   : 0;
}

} // namespace

Result Comm::launch(std::vector<Task> tasks) {
    Current current(context_);
    std::vector<CUstream> streams;
    std::vector<Task> works, pairs;
    for (const Task& task : tasks) {
        if (std::find(streams.begin(), streams.end(), task.stream) == streams.end())
            streams.push_back(task.stream);
        (is_pair(task) ? pairs : works).push_back(task);
    }
    if (!pair_own(&pairs, rank_))
        return failed(kInvalidUsage, "a send to the own rank has no receive in its group");
    std::stable_sort(pairs.begin(), pairs.end(), [&](const Task& a, const Task& b) {
        return distance(a.work, rank_, ranks_) < distance(b.work, rank_, ranks_);
    });
    works.insert(works.end(), pairs.begin(), pairs.end());
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t capture = 0;
    const CUstream main = streams[0];
    const CUresult looked = reinterpret_cast<CaptureInfo>(driver()->cuStreamGetCaptureInfo_address)(
        main, &status, &capture, nullptr, nullptr, nullptr);
    if (looked != CUDA_SUCCESS)
        return cuda_failed("cuStreamGetCaptureInfo", looked);
    if (status == CU_STREAM_CAPTURE_STATUS_NONE)
        capture = 0;
    for (size_t i = 1; i < streams.size(); i++) {
        FN_CU_TRY(cuEventRecord, joint_, streams[i]);
        FN_CU_TRY(cuStreamWaitEvent, main, joint_, 0);
    }
    FN_TRY(before(main, capture));
    for (size_t at = 0; at < works.size(); at += FN_WORKS) {
        Arguments arguments{};
        arguments.communicator = state_memory_.address;
        arguments.works = static_cast<u32>(std::min<size_t>(works.size() - at, FN_WORKS));
        for (u32 i = 0; i < arguments.works; i++)
            arguments.work[i] = works[at + i].work;
        void* parameters[] = {&arguments};
        FN_CU_TRY(cuLaunchKernel, reinterpret_cast<CUfunction>(driver()->kernel), 1, 1, 1,
                  FN_THREADS, 1, 1, 0, main, parameters, nullptr);
    }
    FN_TRY(after(main, capture));
    for (size_t i = 1; i < streams.size(); i++) {
        FN_CU_TRY(cuEventRecord, joint_, main);
        FN_CU_TRY(cuStreamWaitEvent, streams[i], joint_, 0);
    }
    return kSuccess;
}

// The kernels of a communicator run one after another, on whatever streams they are. A graph has
// nodes that wait for and record the same event.
Result Comm::before(CUstream stream, uint64_t capture) {
    if (capture && capture == last_capture_)
        FN_CU_TRY(cuStreamWaitEvent, stream, captured_, 0);
    if (capture)
        FN_CU_TRY(cuStreamWaitEvent, stream, serial_, CU_EVENT_WAIT_EXTERNAL);
    else if (launched_)
        FN_CU_TRY(cuStreamWaitEvent, stream, serial_, 0);
    return kSuccess;
}

Result Comm::after(CUstream stream, uint64_t capture) {
    launched_ = true;
    if (!capture) {
        FN_CU_TRY(cuEventRecord, serial_, stream);
        return kSuccess;
    }
    FN_CU_TRY(cuEventRecordWithFlags, serial_, stream, CU_EVENT_RECORD_EXTERNAL);
    FN_CU_TRY(cuEventRecord, captured_, stream);
    last_capture_ = capture;
    return kSuccess;
}

void Comm::abort() {
    Current current(context_);
    Relaxed relaxed;
    stop_ = true;
    const u32 yes = 1;
    if (state_memory_.address)
        write(state_memory_.address + offsetof(Communicator, aborted), &yes, sizeof yes);
}

Result Comm::close(bool wait_for_peers) {
    Current current(context_);
    Relaxed relaxed;
    Result result = kSuccess;
    if (launched_)
        FN_CU(cuEventSynchronize, serial_);
    network_.expect_end();
    if (wait_for_peers && !bootstrap_.table().empty())
        result = bootstrap_.barrier(stop_);
    for (size_t i = 0; i < reached_.size(); i++)
        unmap(reached_[i], imported_[i]);
    reached_.clear();
    network_.end();
    proxy_.end();
    if (state_memory_.address)
        unmap(state_memory_, true);
    for (const CUevent event : {serial_, captured_, joint_})
        if (event)
            FN_CU(cuEventDestroy, event);
    if (side_)
        FN_CU(cuStreamDestroy, side_);
    bootstrap_.close();
    return result;
}

} // namespace flowgpu::nccl
