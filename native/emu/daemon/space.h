// The device address space of one client: what is mapped where, and who may touch it.
#pragma once

#include "machine.h"

#include "ptx.h"

namespace flowgpu::emu {

enum class MapKind : uint8_t { kAlloc, kVmm, kGlobal, kManaged };

struct Mapping {
    uint64_t begin = 0;
    uint64_t end = 0;
    std::shared_ptr<Phys> phys;
    uint64_t offset = 0;
    uint32_t readers = 0; // a bit for each device
    uint32_t writers = 0;
    MapKind kind = MapKind::kAlloc;
    uint64_t context = 0; // of all but kVmm: they go with it; 0 of what contexts share
    uint64_t handle = 0;  // of kVmm: the allocation handle that was mapped
    uint64_t id = 0;      // CU_POINTER_ATTRIBUTE_BUFFER_ID
    uint64_t pool = 0;    // it is from: of cuMemAllocAsync

    uint8_t* host() const { return phys->host() + offset; }
    uint64_t size() const { return end - begin; }
};

struct Segment {
    uint8_t* host;
    uint64_t size;
};

// An immutable picture of the mappings, shared by everything that was started under it.
struct View {
    uint64_t generation = 0;
    std::vector<Mapping> maps; // by address
    const Mapping* find(uint64_t address) const;
    // The pieces of [address, address + size); false unless all of it may be accessed so.
    // One cuMemAlloc allocation is never left, even where its neighbour follows at once.
    bool resolve(uint64_t address, uint64_t size, uint32_t device_bit, bool write,
                 std::vector<Segment>* out) const;
};

class Space {
  public:
    Space() : view_(std::make_shared<View>()) {}

    // Address space for ordinary allocations, given by the client on demand.
    void add_internal(uint64_t begin, uint64_t size);
    uint64_t take_internal(uint64_t size); // 0: none that is large enough
    void give_internal(uint64_t begin, uint64_t size);

    bool reserve(uint64_t begin, uint64_t size);
    CUresult unreserve(uint64_t begin, uint64_t size);
    // The last one that begins at the address or before it, or the end.
    std::map<uint64_t, uint64_t>::const_iterator reservation_from(uint64_t address) const;
    bool inside_reservation(uint64_t begin, uint64_t size) const;

    bool any(uint64_t begin, uint64_t size) const; // whether something is mapped there
    bool map(Mapping mapping);                     // false: overlaps a live one
    void unmap(uint64_t begin);
    const Mapping* at(uint64_t address) const;      // the mapping around an address
    bool is_device_address(uint64_t address) const; // mapped or not
    bool is_managed(uint64_t address) const;
    std::vector<Mapping*> exactly(uint64_t begin, uint64_t size); // empty: not whole mappings
    std::vector<Mapping*> all();
    void changed();

    uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
    std::shared_ptr<const View> view();

    std::map<uint64_t, uint64_t> reservations;  // begin -> end, the application's
    std::map<uint64_t, uint64_t> internal_all;  // begin -> end
    std::map<uint64_t, uint64_t> internal_free; // begin -> end
    std::map<uint64_t, Mapping> maps;           // guarded by the client's mutex

  private:
    std::mutex view_mutex_;
    std::atomic<uint64_t> generation_{1};
    std::shared_ptr<View> view_;
};

// What a kernel sees. Views it used stay alive until the launch ends: the interpreter may hold
// host addresses from an older one until it asks for the epoch again.
class KernelMemory : public ptx::AddressSpace {
  public:
    KernelMemory(Space* space, std::mutex* guard, int device)
        : space_(space), guard_(guard), bit_(1u << device) {}
    bool find(uint64_t address, Range* range) override;
    uint64_t epoch() const override { return space_->generation(); }

  private:
    Space* space_;
    std::mutex* guard_;
    uint32_t bit_;
    std::vector<std::shared_ptr<const View>> views_;
};

} // namespace flowgpu::emu
