#include "connections.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include <cuda.h>

#include "uses.h"

namespace flowgpu::nccl {

namespace {

// A larger operation is done with as many elements as have room in this. NCCL chooses between its
// algorithms by size, but far below it.
constexpr uint64_t kMostBytes = 256ull << 20;
constexpr uint64_t kPieceBytes = 2ull << 20;
constexpr uint32_t kUses = 1024;                                    // of one communicator
constexpr size_t kBytesOf[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; // by ncclDataType_t

using Reduces = Result (*)(const void*, void*, size_t, int, int, void*, void*);
using ReducesTo = Result (*)(const void*, void*, size_t, int, int, int, void*, void*);
using Moves = Result (*)(const void*, void*, size_t, int, void*, void*);
using MovesRooted = Result (*)(const void*, void*, size_t, int, int, void*, void*);
using Sends = Result (*)(const void*, size_t, int, int, void*, void*);
using Receives = Result (*)(void*, size_t, int, int, void*, void*);

Result (*group_start)();
Result (*group_end)();
Reduces all_reduce, reduce_scatter;
ReducesTo reduce;
MovesRooted broadcast, gather, scatter;
Moves all_gather, all_to_all;
Sends send_to;
Receives receive_from;
Result (*add_reduction)(int*, void*, int, int, void*);
Result (*drop_reduction)(int, void*);

// What an operation reads and writes: addresses for all of it, with one piece of memory behind
// them, since the bytes do not matter. Its stream waits for no other.
struct Scratch {
    CUdeviceptr address = 0;
    uint64_t bytes = 0, mapped = 0;
    CUmemGenericAllocationHandle memory = 0;
    CUstream stream = nullptr;
    int reduction = 0; // of the kind that programs make; 0: none
};

// A rank of this process, its communicator's context current meanwhile.
struct Member {
    Communicator* of;
    int device;
    Scratch scratch;
    Use* uses;
    uint32_t count;
};

size_t bytes_of(const Use& use) {
    const auto type = static_cast<size_t>(use.type);
    return type < std::size(kBytesOf) ? kBytesOf[type] : 8;
}

// How many times the elements an operation has, all that it reads and writes together.
uint64_t parts(const Use& use, uint64_t ranks) {
    switch (use.kind) {
    case kAllReduce:
    case kReduce:
    case kBroadcast:
        return 1;
    case kReduceScatter:
    case kAllGather:
        return ranks;
    default:
        return 2 * ranks;
    }
}

uint64_t limited(const Use& use, uint64_t elements, uint64_t ranks) {
    return std::max<uint64_t>(1,
                              std::min(elements, kMostBytes / (bytes_of(use) * parts(use, ranks))));
}

bool let_in(const Scratch& scratch, int device) {
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return drive("cuMemSetAccess", scratch.address, size_t{scratch.bytes},
                 static_cast<const CUmemAccessDesc*>(&access), size_t{1});
}

bool take(Scratch& scratch, uint64_t bytes, int device) {
    CUmemAllocationProp asked{};
    asked.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    asked.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    const uint64_t pieces = std::max<uint64_t>(1, (bytes + kPieceBytes - 1) / kPieceBytes);
    const auto flags = static_cast<unsigned>(CU_STREAM_NON_BLOCKING);
    const unsigned long long none = 0;
    if (!drive("cuStreamCreate", &scratch.stream, flags) ||
        !drive("cuMemCreate", &scratch.memory, size_t{kPieceBytes}, &asked, none) ||
        !drive("cuMemAddressReserve", &scratch.address, size_t{pieces * kPieceBytes}, size_t{0},
               CUdeviceptr{0}, none))
        return false;
    scratch.bytes = pieces * kPieceBytes;
    for (; scratch.mapped < scratch.bytes; scratch.mapped += kPieceBytes)
        if (!drive("cuMemMap", scratch.address + scratch.mapped, size_t{kPieceBytes}, size_t{0},
                   scratch.memory, none))
            return false;
    return let_in(scratch, device);
}

void give_back(const Scratch& scratch) {
    for (uint64_t at = 0; at < scratch.mapped; at += kPieceBytes)
        drive("cuMemUnmap", scratch.address + at, size_t{kPieceBytes});
    if (scratch.bytes)
        drive("cuMemAddressFree", scratch.address, size_t{scratch.bytes});
    if (scratch.memory)
        drive("cuMemRelease", scratch.memory);
    if (scratch.stream)
        drive("cuStreamDestroy_v2", scratch.stream);
}

template <class F, class... As> Result call(F& slot, const char* name, As... arguments) {
    return nccl(slot, name) ? slot(arguments...) : kSystemError;
}

// The reduction, or one like the program's, which may have none of this kind any more.
Result reduction_of(Member& member, const Use& use, int* reduction) {
    *reduction = use.with;
    if (use.with <= kLastOperation)
        return kSuccess;
    uint64_t scalar = 0;
    constexpr int kOnHost = 1;
    const Result result =
        call(add_reduction, "ncclRedOpCreatePreMulSum", reduction, static_cast<void*>(&scalar),
             use.type, kOnHost, member.of->real.load());
    member.scratch.reduction = *reduction;
    return result;
}

Result do_once(Member& member, const Use& use, uint64_t elements) {
    const flowgpu_nccl_row& own = row(member.of->row);
    const In in(member.of->how);
    int reduction = 0;
    const bool reduces = use.kind <= kReduceScatter;
    if (const Result result = reduces ? reduction_of(member, use, &reduction) : kSuccess;
        !good(result))
        return result;
    const size_t n = limited(use, elements, own.ranks), part = n * bytes_of(use);
    auto* first = reinterpret_cast<char*>(member.scratch.address);
    char *mine = first + own.rank * part, *second = first + own.ranks * part;
    void *comm = member.of->real, *stream = member.scratch.stream;
    switch (use.kind) {
    case kAllReduce:
        return call(all_reduce, "ncclAllReduce", first, first, n, use.type, reduction, comm,
                    stream);
    case kReduce:
        return call(reduce, "ncclReduce", first, first, n, use.type, reduction, 0, comm, stream);
    case kReduceScatter:
        return call(reduce_scatter, "ncclReduceScatter", first, mine, n, use.type, reduction, comm,
                    stream);
    case kBroadcast:
        return call(broadcast, "ncclBroadcast", first, first, n, use.type, 0, comm, stream);
    case kAllGather:
        return call(all_gather, "ncclAllGather", mine, first, n, use.type, comm, stream);
    case kAlltoAll:
        return call(all_to_all, "ncclAlltoAll", first, second, n, use.type, comm, stream);
    case kGather:
        return call(gather, "ncclGather", first, second, n, use.type, use.with, comm, stream);
    case kScatter:
        return call(scatter, "ncclScatter", first, second, n, use.type, use.with, comm, stream);
    }
    return kSystemError;
}

// The messages of a rank, one byte each.
Result pass_messages(Member& member) {
    struct Passing {
        Member* member;
        Result first;
    } passing{&member, kSuccess};
    const In in(member.of->how);
    const auto pass = [](bool sends, int peer, void* argument) {
        auto& at = *static_cast<Passing*>(argument);
        void *comm = at.member->of->real, *stream = at.member->scratch.stream;
        auto* byte = reinterpret_cast<char*>(at.member->scratch.address);
        const Result result =
            sends ? call(send_to, "ncclSend", byte, size_t{1}, 0, peer, comm, stream)
                  : call(receive_from, "ncclRecv", byte + 1, size_t{1}, 0, peer, comm, stream);
        if (!good(result) && good(at.first))
            at.first = result;
    };
    each_message(member.of, pass, &passing);
    return passing.first;
}

// The ranks of one communicator wait for each other, so all of this process go in one group.
template <class F> Result together(Member* members, uint32_t count, F act) {
    Result first = group_start();
    for (uint32_t i = 0; i < count; i++) {
        const Result result = act(members[i]);
        if (!good(result) && good(first))
            first = result;
    }
    const Result ended = group_end();
    for (uint32_t i = 0; i < count; i++)
        if (int& reduction = members[i].scratch.reduction) {
            call(drop_reduction, "ncclRedOpDestroy", reduction, members[i].of->real.load());
            reduction = 0;
        }
    return good(first) ? ended : first;
}

Result prepare(Member& member) {
    const In in(member.of->how);
    const uint32_t ranks = row(member.of->row).ranks;
    member.uses = static_cast<Use*>(calloc(kUses, sizeof(Use)));
    member.count = member.uses ? uses_of(member.of->row, member.uses, kUses) : kUses + 1;
    if (member.count > kUses)
        return kSystemError;
    uint64_t bytes = 2;
    for (uint32_t i = 0; i < member.count; i++) {
        const Use& use = member.uses[i];
        bytes = std::max(bytes, limited(use, use.most, ranks) * bytes_of(use) * parts(use, ranks));
    }
    int device = 0;
    const bool ready =
        in.good() && drive("cuCtxGetDevice", &device) && take(member.scratch, bytes, device);
    return ready ? kSuccess : kSystemError;
}

Result connect(Member* members, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (const Result result = prepare(members[i]); !good(result))
            return result;
    // Where GPUs of one process reach each other, the kernel of one writes into memory of the
    // other.
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < count; k++)
            if (members[i].device != members[k].device)
                let_in(members[i].scratch, members[k].device);
    const auto of_use = [](uint32_t number, bool largest) {
        return [=](Member& member) {
            const Use& use = member.uses[number];
            return do_once(member, use, largest ? use.most : use.least);
        };
    };
    for (uint32_t i = 0; i < members[0].count; i++) {
        const Use& use = members[0].uses[i];
        if (const Result result = together(members, count, of_use(i, false)); !good(result))
            return result;
        if (use.most == use.least)
            continue;
        if (const Result result = together(members, count, of_use(i, true)); !good(result))
            return result;
    }
    if (const Result result = together(members, count, pass_messages); !good(result))
        return result;
    for (uint32_t i = 0; i < count; i++) {
        const In in(members[i].of->how);
        if (!drive("cuStreamSynchronize", members[i].scratch.stream))
            return kSystemError;
    }
    return kSuccess;
}

} // namespace

Result connect_all(Communicator* const* sorted, uint32_t count) {
    if (!nccl(group_start, "ncclGroupStart") || !nccl(group_end, "ncclGroupEnd"))
        return kSystemError;
    Result result = kSuccess;
    for (uint32_t i = 0, next = 0; i < count && good(result); i = next) {
        const uint64_t communicator = row(sorted[i]->row).communicator;
        while (next < count && row(sorted[next]->row).communicator == communicator)
            next++;
        if (row(sorted[i]->row).ranks == 1)
            continue;
        auto* members = static_cast<Member*>(calloc(next - i, sizeof(Member)));
        if (!members)
            return kSystemError;
        for (uint32_t k = i; k < next; k++)
            members[k - i].of = sorted[k];
        result = connect(members, next - i);
        for (uint32_t k = 0; k < next - i; k++) {
            const In in(members[k].of->how);
            give_back(members[k].scratch);
            free(members[k].uses);
        }
        free(members);
    }
    return result;
}

} // namespace flowgpu::nccl
