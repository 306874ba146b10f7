#include "renewal.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "communicators.h"
#include "connections.h"
#include "flowgpu/wire.h"

namespace flowgpu::nccl {

namespace {

constexpr uint32_t kMost = 1024; // as there are places
constexpr long kLookNs = 200000;
constexpr int kHoldLooks = 5000;

std::atomic<uint32_t> calls{0}; // that are under way
std::atomic<bool> fixed_ids{false};

// The service thread's alone.
Communicator* chosen[kMost];
uint32_t count;
void* made[kMost];

uint32_t held() {
    return __atomic_load_n(&header().held, __ATOMIC_SEQ_CST);
}

void hold(flowgpu_nccl_constant state) {
    __atomic_store_n(&header().held, static_cast<uint32_t>(state), __ATOMIC_SEQ_CST);
}

Result (*group_start)();
Result (*group_end)();
Result (*destroy)(void*);
Result (*async_error)(void*, Result*);
Result (*unique_id)(UniqueId*);
Result (*init)(void**, int, UniqueId, int);
Result (*init_configured)(void**, int, UniqueId, int, void*);
Result (*ask_count)(void*, int*);
Result (*ask_rank)(void*, int*);
Result (*ask_device)(void*, int*);
Result (*add_buffer)(void*, void*, size_t, void**);
Result (*add_reduction)(int*, void*, int, int, void*);

// In an order that is the same on all ranks.
bool comes_before(const Communicator* one, const Communicator* other) {
    const flowgpu_nccl_row &a = row(one->row), &b = row(other->row);
    return a.communicator != b.communicator ? a.communicator < b.communicator : a.rank < b.rank;
}

bool lives(const Communicator& one) {
    return one.real != nullptr;
}

// The coordinator has no id for a communicator that has lost a rank.
bool has_id(const Communicator& one) {
    constexpr UniqueId none{};
    return memcmp(id_of(one.row), none.bytes, sizeof none) != 0;
}

void choose(bool (*which)(const Communicator&)) {
    count = 0;
    each(
        [](Communicator& one, void* argument) {
            if (reinterpret_cast<bool (*)(const Communicator&)>(argument)(one))
                chosen[count++] = &one;
        },
        reinterpret_cast<void*>(which));
    std::sort(chosen, chosen + count, comes_before);
}

bool is_quiet() {
    return calls == 0 && !anybody_inside();
}

// Besides what the page says.
const char* obstacle() {
    if (fixed_ids)
        return "NCCL communicators by NCCL_COMM_ID, which cannot be made anew";
    for (uint32_t i = 0; i < count; i++) {
        int blocking = 1;
        constexpr size_t kBlocking = 16; // in ncclConfig_t
        if (chosen[i]->how.config_bytes >= kBlocking + sizeof blocking)
            memcpy(&blocking, chosen[i]->how.config + kBlocking, sizeof blocking);
        if (blocking == 0)
            return "an NCCL communicator that does not block, which cannot be made anew";
    }
    return nullptr;
}

int refuse(flowgpu_status status, const char* text, char* detail, size_t bytes) {
    snprintf(detail, bytes, "%s", text);
    return status;
}

int failed(const char* function, Result result, char* detail, size_t bytes) {
    snprintf(detail, bytes, "%s: NCCL error %d", function, result);
    return FLOWGPU_SYSTEM;
}

int hold_all(char* detail, size_t bytes) {
    if (held() == FLOWGPU_NCCL_ENDED)
        return FLOWGPU_OK;
    hold(FLOWGPU_NCCL_HELD);
    for (int i = 0; !is_quiet(); i++) {
        if (i == kHoldLooks)
            return refuse(FLOWGPU_BUSY, "a call of NCCL does not return", detail, bytes);
        const timespec pause = {0, kLookNs};
        nanosleep(&pause, nullptr);
    }
    choose(lives);
    if (const char* what = obstacle())
        return refuse(FLOWGPU_REFUSED, what, detail, bytes);
    for (uint32_t i = 0; i < count; i++) {
        Result state = kSuccess;
        const auto ask = nccl(async_error, "ncclCommGetAsyncError");
        const Result result = ask ? ask(chosen[i]->real, &state) : kSystemError;
        if (result != kSuccess || state != kSuccess)
            return refuse(FLOWGPU_REFUSED, "an NCCL communicator that has failed", detail, bytes);
    }
    return FLOWGPU_OK;
}

int end_all(char* detail, size_t bytes) {
    if (held() == FLOWGPU_NCCL_ENDED)
        return FLOWGPU_OK;
    if (!nccl(group_start, "ncclGroupStart") || !nccl(group_end, "ncclGroupEnd") ||
        !nccl(destroy, "ncclCommDestroy"))
        return refuse(FLOWGPU_SYSTEM, "functions of NCCL are missing", detail, bytes);
    choose(lives);
    hold(FLOWGPU_NCCL_ENDED);
    Result first = group_start();
    for (uint32_t i = 0; i < count; i++) {
        const Result result = destroy(chosen[i]->real);
        if (!good(result) && good(first))
            first = result;
        chosen[i]->real = nullptr;
    }
    const Result ended = group_end();
    if (good(first))
        first = ended;
    return good(first) ? FLOWGPU_OK : failed("ncclCommDestroy", first, detail, bytes);
}

int make_ids(char* detail, size_t bytes) {
    choose([](const Communicator& one) { return row(one.row).rank == 0; });
    for (uint32_t i = 0; i < count; i++) {
        UniqueId id;
        const auto make = nccl(unique_id, "ncclGetUniqueId");
        const Result result = make ? make(&id) : kSystemError;
        if (result != kSuccess)
            return failed("ncclGetUniqueId", result, detail, bytes);
        memcpy(id_of(chosen[i]->row), id.bytes, sizeof id);
    }
    return FLOWGPU_OK;
}

Result make_one(Communicator& one, void** out) {
    const In in(one.how);
    UniqueId id;
    memcpy(id.bytes, id_of(one.row), sizeof id);
    const auto ranks = static_cast<int>(row(one.row).ranks);
    const auto rank = static_cast<int>(row(one.row).rank);
    if (!in.good())
        return kSystemError;
    if (one.how.config_bytes)
        return nccl(init_configured, "ncclCommInitRankConfig")
                   ? init_configured(out, ranks, id, rank, one.how.config)
                   : kSystemError;
    return nccl(init, "ncclCommInitRank") ? init(out, ranks, id, rank) : kSystemError;
}

void attach_again(Attached& one, void* argument) {
    auto* first = static_cast<Result*>(argument);
    void* comm = one.of->real;
    if (!comm)
        return;
    const In in(one.of->how);
    Result result = kSystemError;
    if (one.reduces) {
        int operation = 0;
        constexpr int kOnHost = 1;
        void* scalar = one.residence == kOnHost ? static_cast<void*>(&one.bytes) : one.data;
        if (nccl(add_reduction, "ncclRedOpCreatePreMulSum"))
            result = add_reduction(&operation, scalar, one.type, one.residence, comm);
        one.real = static_cast<uint64_t>(operation);
    } else {
        void* handle = nullptr;
        if (nccl(add_buffer, "ncclCommRegister"))
            result = add_buffer(comm, one.data, one.bytes, &handle);
        one.real = reinterpret_cast<uint64_t>(handle);
    }
    if (!good(result) && good(*first))
        *first = result;
}

int make_all(char* detail, size_t bytes) {
    if (held() != FLOWGPU_NCCL_ENDED)
        return FLOWGPU_OK;
    choose(has_id);
    if (!nccl(group_start, "ncclGroupStart") || !nccl(group_end, "ncclGroupEnd"))
        return refuse(FLOWGPU_SYSTEM, "functions of NCCL are missing", detail, bytes);
    Result first = group_start();
    for (uint32_t i = 0; i < count; i++) {
        made[i] = nullptr;
        const Result result = make_one(*chosen[i], &made[i]);
        if (!good(result) && good(first))
            first = result;
    }
    const Result ended = group_end();
    if (good(first))
        first = ended;
    for (uint32_t i = 0; i < count; i++)
        chosen[i]->real = made[i];
    if (!good(first))
        return failed("ncclCommInitRank", first, detail, bytes);
    now_names();
    each_attached(attach_again, &first);
    if (!good(first))
        return failed("ncclCommRegister", first, detail, bytes);
    first = connect_all(chosen, count);
    if (!good(first))
        return failed("connecting a communicator", first, detail, bytes);
    hold(FLOWGPU_NCCL_HELD);
    return FLOWGPU_OK;
}

} // namespace

bool ask_ranks(void* comm, int* ranks, int* rank) {
    return nccl(ask_count, "ncclCommCount") && nccl(ask_rank, "ncclCommUserRank") &&
           ask_count(comm, ranks) == kSuccess && ask_rank(comm, rank) == kSuccess;
}

void ids_are_fixed() {
    fixed_ids = true;
}

void note_device(Communicator& place, void* comm) {
    const AsNccl as_nccl;
    if (!nccl(ask_device, "ncclCommCuDevice") || ask_device(comm, &place.how.device) != kSuccess)
        header().forgotten = 1;
}

void begin_call() {
    for (;;) {
        const uint32_t wake = __atomic_load_n(&header().wake, __ATOMIC_SEQ_CST);
        calls++;
        if (!is_held())
            return;
        calls--;
        syscall(SYS_futex, &header().wake, FUTEX_WAIT, wake, nullptr, nullptr, 0);
    }
}

void end_call() {
    calls--;
}

bool is_held() {
    return held() != FLOWGPU_NCCL_FREE;
}

} // namespace flowgpu::nccl

FGN_EXPORT int flowgpu_nccl_renew(int step, char* detail, size_t bytes) {
    using namespace flowgpu::nccl;
    const AsNccl as_nccl;
    switch (step) {
    case FLOWGPU_RENEWAL_HOLD:
        return hold_all(detail, bytes);
    case FLOWGPU_RENEWAL_END:
        return end_all(detail, bytes);
    case FLOWGPU_RENEWAL_IDS:
        return make_ids(detail, bytes);
    case FLOWGPU_RENEWAL_MAKE:
        return make_all(detail, bytes);
    }
    return FLOWGPU_PROTOCOL;
}
