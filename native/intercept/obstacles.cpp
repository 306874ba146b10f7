#include "obstacles.h"

#include "communicators.h"
#include "contexts.h"
#include "pinned.h"
#include "replay/record.h"
#include "task.h"

namespace flowgpu {

namespace {

// Appends the name, with a comma between names.
void add(std::string* names, const std::string& name) {
    if (!name.empty())
        *names += (names->empty() ? "" : ", ") + name;
}

std::string if_so(bool so, const char* name) {
    return so ? name : "";
}

std::string refused_calls(bool) {
    std::string names;
    for (unsigned i = 0; i < kSymbols; i++)
        if (refuses[i] && flowgpu_refused_calls[i].load(std::memory_order_relaxed))
            add(&names, symbol_names[i]);
    return names;
}

std::string shared_gpu(bool) {
    return if_so(contexts::on_shared_gpu(), "a GPU of the Multi-Process Service (MPS)");
}

template <bool may_be_tried> std::string part_of_gpu(bool) {
    const bool tried = may_be_tried && replay::tries("mig");
    return if_so(!tried && contexts::on_part_of_gpu(), "a part of a GPU (MIG)");
}

// Those that the coordinator cannot see; it looks at the others itself.
std::string unseen_communicators(bool) {
    const bool unseen = communicators::living() && communicators::counts_fd() < 0;
    return if_so(unseen, "NCCL communicators (libnccl) without counts");
}

// Replay saves those that are in memory of FlowGPU's.
template <bool ours_too> std::string managed_variables(bool) {
    return if_so(task().has_managed_variables(ours_too), "managed variables of a module");
}

// Memory that nobody saves, by the kinds of which there is any.
template <Saver KindFacts::* saver> std::string unsaved_memory(bool) {
    std::string names;
    for (const KindFacts& facts : kKindFacts)
        if (facts.*saver == Saver::nobody && facts.name && address_map().any(only(facts.kind)))
            add(&names, facts.name);
    return names;
}

std::string not_plain_memory(bool) {
    return if_so(task().has_not_plain(), "memory from cuMemCreate that is not plain device memory");
}

// It is not known that the driver takes such memory again, as replay has a new driver do.
std::string gaps_in_pinned_memory(bool) {
    return if_so(pinned::Gaps(pinned::all()).any(),
                 "registered memory of the host that was unmapped, closed or cut");
}

constexpr unsigned kNative = 1u << FLOWGPU_ENGINE_NATIVE, kReplay = 1u << FLOWGPU_ENGINE_REPLAY,
                   kNone = 1u << FLOWGPU_ENGINE_NONE, kEach = kNative | kReplay | kNone;
constexpr struct {
    unsigned engines;
    std::string (*find)(bool still);
} kRows[] = {
    {kEach, refused_calls},
    {kNative, shared_gpu},
    {kNative, part_of_gpu<false>},
    {kReplay | kNone, part_of_gpu<true>},
    {kEach, unseen_communicators},
    {kNative, managed_variables<true>},
    {kReplay, managed_variables<false>},
    {kNative, unsaved_memory<&KindFacts::native>},
    {kReplay, unsaved_memory<&KindFacts::replay>},
    {kReplay, not_plain_memory},
    {kNative, gaps_in_pinned_memory},
    {kReplay, replay::unsaved},
};

} // namespace

std::string obstacles(uint32_t engine, bool still) {
    if (engine == FLOWGPU_ENGINE_REPLAY && !replay::prepared())
        return replay::why_not();
    std::string names;
    for (const auto& row : kRows)
        if (row.engines >> engine & 1)
            add(&names, row.find(still));
    return names;
}

} // namespace flowgpu
