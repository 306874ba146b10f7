// What lies at which address of the task: one table for all memory that the program may name.
//
// A *region* is a range of one kind. The kinds have facts (kKindFacts): which queries FlowGPU
// answers in the driver's place, and which part of FlowGPU saves the bytes with each engine.
//
// Regions lie in layers, because they nest: a reservation holds a mapping, and a mapping holds
// memory of a pool. The host has a layer of its own, as the driver lets a registration stand when
// the program unmaps the memory. Regions of one layer never overlap. A lookup goes from the
// innermost layer outwards and gives the first region of the kinds that the caller asks for.
//
// Handles of the driver are no addresses and are never in here.
//
// Locking: one mutex, the last one that a thread takes. No call of the driver happens under it, so
// a lookup never waits for one.
#ifndef FLOWGPU_VMM_ADDRESS_MAP_H
#define FLOWGPU_VMM_ADDRESS_MAP_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include <cuda.h>

namespace flowgpu {

struct Block;

enum class MemoryKind : uint8_t {
    window,      // addresses that `Memory` gives allocations
    reservation, // addresses that the program, or FlowGPU for it, has reserved at the driver
    allocation,  // from cuMemAlloc, in a block of `Memory`
    mapping,     // the program's, of a block that it created (cuMemCreate)
    imported,    // of another process (cuIpcOpenMemHandle); it lies in a mapping
    managed,     // from cuMemAllocManaged or a managed pool; it lies in a tract
    pinned,      // memory of the host that the driver holds (cuMemHostRegister)
    driver,      // other memory that the driver placed
    pool,        // from a stream-ordered pool of the driver's; a checkpoint can copy it
    adopted,     // the same after the driver was made anew: it lies in a mapping
    variable,    // of a module, in an allocation
    cover,       // what the driver has reserved in one for small or adjoining reservations
    tract,       // managed memory of FlowGPU's, at an address of its choice
    unplaced,    // from cuMemAllocManaged, at one of the driver's
};
constexpr size_t kMemoryKinds = 14;

// A set of kinds.
using Kinds = unsigned;
template <class... Each> constexpr Kinds only(Each... kinds) {
    return (0u | ... | (1u << static_cast<unsigned>(kinds)));
}

enum class Layer : uint8_t { host, cover, space, memory, part };
constexpr size_t kLayers = 5;

// What FlowGPU answers where the driver does not know what the program knows.
enum Answers : uint8_t {
    kRange = 1,       // where it begins and ends
    kMappedRange = 2, // likewise, of what is mapped
    kContext = 4,
    kHandleTypes = 8,
    kIpcCapable = 16,
    kPool = 32,
};

// Who keeps the bytes over a checkpoint.
enum class Saver : uint8_t {
    nobody, // so that a checkpoint is refused
    blocks, // the ghost has them, with the block
    copies, // they are copied to a block of FlowGPU's first (pools.h)
    driver, // with its own checkpoint
    pages,  // they become ordinary memory of the process meanwhile (managed.h)
    record, // there are none that are the GPU's: the driver is told of the range again
};

struct KindFacts {
    MemoryKind kind;
    Layer layer;
    uint8_t answers;
    Saver native, replay;
    const char* name; // in a refusal; null: none, or the calls that led to it are named
};

constexpr KindFacts kKindFacts[kMemoryKinds] = {
    {MemoryKind::window, Layer::space, 0, Saver::driver, Saver::record, nullptr},
    {MemoryKind::reservation, Layer::space, 0, Saver::driver, Saver::record, nullptr},
    {MemoryKind::allocation, Layer::memory,
     kRange | kMappedRange | kContext | kHandleTypes | kIpcCapable, Saver::blocks, Saver::blocks,
     nullptr},
    {MemoryKind::mapping, Layer::memory, kHandleTypes, Saver::blocks, Saver::blocks, nullptr},
    {MemoryKind::imported, Layer::part, kRange, Saver::blocks, Saver::blocks, nullptr},
    // Driver 580 answers CUDA_ERROR_NOT_SUPPORTED when it is to save managed memory.
    {MemoryKind::managed, Layer::memory, kRange | kContext | kPool, Saver::nobody, Saver::pages,
     "memory from cuMemAllocManaged"},
    {MemoryKind::pinned, Layer::host, 0, Saver::driver, Saver::record, nullptr},
    {MemoryKind::driver, Layer::memory, 0, Saver::driver, Saver::nobody,
     "device memory of the driver's or the program's own"},
    {MemoryKind::pool, Layer::part, 0, Saver::driver, Saver::copies, nullptr},
    {MemoryKind::adopted, Layer::part, kRange | kContext | kPool, Saver::blocks, Saver::blocks,
     nullptr},
    {MemoryKind::variable, Layer::part, kRange | kMappedRange, Saver::blocks, Saver::blocks,
     nullptr},
    {MemoryKind::cover, Layer::cover, 0, Saver::driver, Saver::record, nullptr},
    {MemoryKind::tract, Layer::space, 0, Saver::record, Saver::record, nullptr},
    {MemoryKind::unplaced, Layer::memory, 0, Saver::nobody, Saver::nobody,
     "memory from cuMemAllocManaged"},
};

constexpr const KindFacts& facts_of(MemoryKind kind) {
    return kKindFacts[static_cast<size_t>(kind)];
}

constexpr Kinds kinds_that_answer(uint8_t what) {
    Kinds found = 0;
    for (const KindFacts& facts : kKindFacts)
        if (facts.answers & what)
            found |= only(facts.kind);
    return found;
}

// Memory that the driver has placed and may take back.
constexpr Kinds kOfTheDriver = only(MemoryKind::unplaced, MemoryKind::driver, MemoryKind::pool);

// Ranges of which FlowGPU gives parts to the program.
constexpr Kinds kShared = only(MemoryKind::window, MemoryKind::tract);

// Addresses that the driver holds, with memory or without.
constexpr Kinds kReserved = only(MemoryKind::window, MemoryKind::reservation);

struct Region {
    uint64_t address = 0;
    uint64_t bytes = 0;
    MemoryKind kind = MemoryKind::driver;
    int device = -1;             // -1: not asked yet
    CUcontext context = nullptr; // that it ends with
    Block* block = nullptr;      // of allocations and mappings
    CUmemoryPool pool = nullptr; // of pools; null: its device's, not asked yet; or of managed ones
    unsigned flags = 0;          // of pinned memory, with which it was registered
};

class AddressMap {
  public:
    // A region without bytes is none. What the map still has in that layer at these addresses has
    // ended unseen: it is forgotten.
    void put(const Region& region);
    // Forgets the region that starts there. False: none of these kinds does.
    bool remove(uint64_t address, Kinds kinds, Region* removed = nullptr);
    void remove_all(Kinds kinds);
    // The innermost region of these kinds that contains the address.
    bool find(uint64_t address, Kinds kinds, Region* found) const;
    bool starts_at(uint64_t address, Kinds kinds, Region* found = nullptr) const;
    // In an allocation or not: what the driver knows in a window (or tract) is blocks, of which the
    // program must not hear.
    bool in_window(uint64_t address) const;
    // Those that start in the range, by layer and address.
    std::vector<Region> all(Kinds kinds, uint64_t address = 0, uint64_t bytes = ~uint64_t{0}) const;

    // Without the lock.
    bool any(Kinds kinds) const { return kinds & present_.load(std::memory_order_relaxed); }
    uint64_t bytes(Kinds kinds) const;
    // False: the address is in no window.
    bool may_be_in_window(uint64_t address) const {
        return address >= lowest_.load(std::memory_order_relaxed) &&
               address < highest_.load(std::memory_order_relaxed);
    }
    // Another one whenever an allocation has been removed.
    uint64_t version() const { return version_.load(std::memory_order_acquire); }

    std::mutex& mutex() { return mutex_; }

  private:
    using Ranges = std::map<uint64_t, Region>; // by address

    const Region* find_locked(uint64_t address, Kinds kinds) const;
    // Both may be negative, in two's complement.
    void count(MemoryKind kind, uint64_t number, uint64_t bytes);
    Ranges::iterator forget(Ranges& layer, Ranges::iterator at);

    mutable std::mutex mutex_;
    Ranges layers_[kLayers];
    std::atomic<uint64_t> bytes_[kMemoryKinds] = {};
    uint64_t counts_[kMemoryKinds] = {};
    std::atomic<Kinds> present_{0}; // of which there are any
    std::atomic<uint64_t> version_{1};
    std::atomic<uint64_t> lowest_{~uint64_t{0}}, highest_{0}; // of windows and tracts
};

} // namespace flowgpu

#endif
