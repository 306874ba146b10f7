// Device memory of the task: every cuMemAlloc of the program lives in exportable VMM blocks inside
// one window of virtual addresses a GPU, so that a second process can take the bytes over and every
// address can be had again.
//
// An *allocation* is what the program asked for. A *block* is one VMM handle, mapped at one
// address: an allocation of at least the granularity (2 MiB) has a block of its own; smaller ones
// share blocks. Blocks leave the task at a hand-over and come back by import, at the same
// addresses.
//
// Memory that the program creates and maps itself (cuMemCreate) is a block as well, one a handle;
// it lives while the handle is held or a mapping exists, in the program's own reservations, which
// stay the driver's. The driver's handle is another one after a hand-over, so the program holds a
// *program handle*, a number of ours (program_memory.cpp).
//
// Besides, the task keeps a *room* on each device where it has memory (room.cpp). Neither the
// program nor any count here knows of it.
//
// What lies where is in an AddressMap, with the memory that is not ours.
//
// Locking: one mutex, taken by every public function. Nothing here allocates device objects outside
// the window, prints, or ends the process. Driver calls go through `VmmDriver`, so the library is
// tested against a driver of the test's own.
#ifndef FLOWGPU_VMM_MEMORY_H
#define FLOWGPU_VMM_MEMORY_H

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <cuda.h>

#include "address_map.h"
#include "ranges.h"

namespace flowgpu {

// The driver calls this library makes. Semantics as in cuda.h.
struct VmmDriver {
    CUresult (*address_reserve)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*address_free)(CUdeviceptr, size_t);
    CUresult (*create)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
    CUresult (*export_handle)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType);
    CUresult (*properties)(CUmemAllocationProp*, CUmemGenericAllocationHandle);
    CUresult (*granularity)(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags);
    CUresult (*total)(size_t*, CUdevice);
    CUresult (*attribute)(int*, CUdevice_attribute, CUdevice);
};

// Where windows start, and how far apart (E17: 16 TiB cost nothing; x86-64 ASLR and libcuda leave
// this area empty).
constexpr uint64_t kWindowBase = 0x200000000000;
constexpr uint64_t kWindowBytes = 1ull << 44;
// cuMemAlloc aligns to this and spaces the smallest allocations by it (E19).
constexpr uint64_t kSmallGranule = 512;
constexpr int kMaxDevices = 64;
// Program handles count up from here, each by its memory's size: no address, no number that a
// driver was seen to give (pointers and small numbers), and as addresses of blocks they never
// overlap.
constexpr uint64_t kFirstProgramHandle = 1ull << 60;

// A mapping that the program made of a handle of its own.
struct ProgramMapping {
    uint64_t bytes;
    uint64_t offset;    // in the handle
    bool mapped = true; // false between release_all and map_back
    std::map<std::pair<CUmemLocationType, int>, CUmemAccess_flags> access; // as it was set last
};

// What the program did with a handle of its own.
struct ProgramHandle {
    CUmemAllocationProp asked; // at cuMemCreate; ours is exportable even when it did not ask
    CUcontext context;         // current then, null once it has ended
    uint64_t references = 1;   // cuMemCreate and cuMemRetainAllocationHandle less cuMemRelease
    bool waits = false;        // it is mapped nowhere yet, wherever it is to be
    std::map<uint64_t, ProgramMapping> mappings; // by address
};

// A process that makes blocks which others may import: a number nobody else has. Zeros: none.
struct Token {
    uint64_t low, high;
    bool operator==(const Token& other) const { return low == other.low && high == other.high; }
    explicit operator bool() const { return low || high; }
};

// A block of another process, or of this one by way of a descriptor: its owner and its id there.
struct Origin {
    Token owner = {};
    uint64_t id = 0;
    bool operator==(const Origin& other) const { return owner == other.owner && id == other.id; }
};

struct Block {
    uint64_t id;
    uint64_t address; // the program handle of memory that the program maps itself
    uint64_t bytes;
    int device;
    bool small = false;
    bool present = true; // mapped and accessible; false between release_all and map_back
    bool sent = false;   // handed to the ghost since the last forget_sent()
    int fd = -1; // an imported handle cannot be exported again (E2), so its fd is kept; owned
    CUmemGenericAllocationHandle handle = 0;
    std::unique_ptr<Ranges> pieces;         // small blocks only
    std::unique_ptr<ProgramHandle> program; // of memory that the program maps itself
    Origin origin = {};                     // of an import; its bytes count as nobody's here
    std::vector<int> tickets; // descriptors that tell whether somebody has a ticket for it; owned

    bool imported() const { return static_cast<bool>(origin.owner); }
};

// Memory that the program may use at `address`. Its bytes are those of the block that contains
// `place`: the address itself, except where the program mapped a handle of its own, or holds one
// that is mapped nowhere (then both are a program handle and an offset).
struct LiveRange {
    uint64_t address;
    uint64_t bytes;
    uint64_t place;
};

// A block that another process is to map, or an allocation in one.
struct Shared {
    int fd;      // of the block, the caller's to close
    uint64_t id; // of the block
    uint64_t block_bytes;
    uint64_t offset; // of the allocation in the block
    uint64_t bytes;
};

struct MemoryTotals {
    uint64_t allocations = 0; // handles of the program included
    uint64_t allocation_bytes = 0;
    uint64_t blocks = 0;
    uint64_t block_bytes = 0;
    uint64_t devices = 0; // a bit for each that ever had any
};

// For reading and writing by a device, or for nothing.
CUmemAccessDesc access_of(int device, bool enabled);

class Memory {
  public:
    explicit Memory(const VmmDriver& driver) : driver_(driver) {}

    // Windows, allocations and mappings are entered and removed here, other kinds elsewhere.
    AddressMap& map() { return map_; }
    const AddressMap& map() const { return map_; }

    // bytes > 0. CUDA_ERROR_OUT_OF_MEMORY as from cuMemAlloc; the address is a multiple of
    // kSmallGranule.
    CUresult allocate(int device, CUcontext context, uint64_t bytes, CUdeviceptr* address);
    // CUDA_ERROR_INVALID_VALUE when no allocation starts there. The caller has drained the work
    // that may use it.
    CUresult release(CUdeviceptr address);
    // Frees what was allocated under a context that has ended, and every block without an
    // allocation.
    void release_context(CUcontext context);
    // From now on `accessor` may use the memory of `device` as well (or no more).
    CUresult set_peer(int device, int accessor, bool enabled);

    MemoryTotals totals() const;
    // Everything that is live; parts of a program handle that are mapped nowhere included. `visit`
    // must not call back.
    void for_each_allocation(const std::function<void(const LiveRange&)>& visit) const;

    // --- memory that the program maps itself: the driver's calls, with program handles ---
    // True if memory of this kind can be handed over. Other memory stays the driver's alone, and
    // the program gets the driver's handle.
    static bool takes_over(uint64_t bytes, const CUmemAllocationProp& asked,
                           unsigned long long flags);
    CUresult create_handle(uint64_t bytes, const CUmemAllocationProp& asked, CUcontext context,
                           CUmemGenericAllocationHandle* handle);
    bool is_program_handle(CUmemGenericAllocationHandle handle) const;
    // The driver's handle for the program's; any other number is itself.
    CUmemGenericAllocationHandle driver_handle(CUmemGenericAllocationHandle handle) const;
    // False: none of ours is mapped there.
    bool retain_handle(CUdeviceptr address, CUmemGenericAllocationHandle* handle);
    CUresult release_handle(CUmemGenericAllocationHandle handle);
    // `handle` is a program handle; the other two take any address of the driver's.
    CUresult map_handle(CUdeviceptr address, uint64_t bytes, uint64_t offset,
                        CUmemGenericAllocationHandle handle, unsigned long long flags);
    CUresult unmap_range(CUdeviceptr address, uint64_t bytes);
    CUresult set_access(CUdeviceptr address, uint64_t bytes, const CUmemAccessDesc* access,
                        size_t count);
    // Somebody may have a descriptor that stands for the block; `watch` (owned by this call) is a
    // file of which is_held() tells that. As the driver's descriptor does, it keeps the memory.
    void note_ticket(CUmemGenericAllocationHandle handle, int watch);
    // Succeeds where the driver's answer to such a call is a descriptor.
    CUresult may_export(void* out, CUmemGenericAllocationHandle handle,
                        CUmemAllocationHandleType type, unsigned long long flags);
    // A handle for a block of another process, of which `fd` is (owned by this call). Several
    // imports of one block have one handle with as many references.
    CUresult import_block(const Origin& origin, uint64_t bytes, int fd, CUcontext context,
                          CUmemGenericAllocationHandle* handle);
    // Notes that a handle is to be mapped at an address, all of it and for its own device, and lets
    // it go: it lives as long as the mapping. Until stop_waiting() it stays unmapped.
    void map_later(CUdeviceptr address, CUmemGenericAllocationHandle handle);
    // From now on what map_later() has noted is mapped when its block is mapped back.
    void stop_waiting();
    // Or it is released.
    void drop_waiting();
    // What the program asked for at cuMemCreate; false: not a program handle, or none of ours is
    // mapped there.
    bool asked_for(CUmemGenericAllocationHandle handle, CUmemAllocationProp* asked) const;
    bool asked_at(CUdeviceptr address, CUmemAllocationProp* asked) const;

    // --- hand-over ---
    // Takes a block's row and a file descriptor (owned by the callee, which closes it) ; false
    // stops.
    using Sink = std::function<bool(const Block&, int fd)>;
    // Exports each present block not sent yet. CUDA_SUCCESS, the driver's error, or
    // CUDA_ERROR_OPERATING_SYSTEM when the sink stopped.
    CUresult send_new(const Sink& sink);
    void forget_sent();
    // What another process needs to map the allocation that starts at `address`, or the block that
    // has this program handle. CUDA_ERROR_INVALID_VALUE: there is none.
    CUresult share(uint64_t address, Shared* shared);
    std::vector<uint64_t> live_ids() const;
    // Unmaps and releases every block, then the rooms; addresses stay reserved, the tables stay.
    // After a failure the blocks that are still present say so, and the rooms stay.
    CUresult release_all();
    // The same where the driver is gone with all that it had, and must not be asked.
    void lose_all();
    // Imports a block from fd (owned by this call) and maps it where it was. A block that is still
    // present (release_all() failed midway) is left alone. CUDA_ERROR_INVALID_VALUE: no such block
    // or another size or address than the row says.
    CUresult map_back(uint64_t id, uint64_t address, uint64_t bytes, int fd);
    bool all_present() const;
    // Takes again what rooms are missing, where the driver lets it.
    void refill_rooms();
    // The size of the room that is kept on the device now; 0 if there is none.
    uint64_t room_bytes(int device) const;
    // How large a room is on a device of `total` bytes; 0: it has none.
    static uint64_t room_for(uint64_t total, uint64_t granularity);
    // The driver has shut down in this process, which is about to end: nothing can be mapped back.
    void forget_all();
    std::set<CUcontext> contexts() const;

    // In the child of a fork: forget what is the parent's business, descriptors and rooms.
    void forget_parents();
    // There too: a child has no use for the windows, but CRIU looks at each page that a process may
    // share with its parent, and these are of 16 TiB.
    void unmap_windows();
    std::mutex& mutex() { return mutex_; }

  private:
    struct Window {
        uint64_t base = 0;
        std::unique_ptr<Ranges> ranges;
        uint64_t granularity = 0;
        std::set<int> peers;
        std::vector<Block*> small_blocks;
    };

    struct Room {
        CUmemGenericAllocationHandle handle = 0;
        uint64_t bytes = 0; // 0: it is not there now
    };

    CUmemAllocationProp properties(int device) const;
    CUresult open_window(int device, Window** window);
    CUresult make_block(int device, Window& window, uint64_t bytes, Block** block);
    CUresult map_block(Block& block, const Window& window);
    CUresult drop_block(Block* block);
    CUresult export_block(const Block& block, int* fd) const;
    CUresult allocate_small(int device, Window& window, uint64_t bytes, Block** block,
                            uint64_t* address);
    CUresult release_locked(const Region& allocation);
    CUresult drop_small(Block* block);
    void note_away(Block& block); // its memory is elsewhere alone
    // Map (with access) and unmap all that belongs to a block; both change nothing when they fail,
    // unless the driver refuses to undo as well.
    CUresult map_all_of(Block& block);
    CUresult unmap_all_of(Block& block);
    CUresult map_program_block(Block& block);
    CUresult unmap_program_block(Block& block);
    CUresult drop_if_unused(Block* block);
    // Blocks of which nothing was left but tickets, where nobody has those any more.
    void drop_given();
    void make_room(int device);
    void fill_room(int device, Room& room);
    void empty_room(Room& room);
    // Frees the rooms on devices that have no block.
    void drop_unused_rooms();
    void add_program_block(std::unique_ptr<Block> block);
    Block* program_block(CUmemGenericAllocationHandle handle) const;
    Block* mapped_block(CUdeviceptr address) const;
    void note_mapping(CUdeviceptr address, Block& block, ProgramMapping mapping);
    static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

    const VmmDriver driver_;
    mutable std::mutex mutex_;
    std::map<int, Window> windows_;
    std::map<uint64_t, std::unique_ptr<Block>> blocks_; // by id
    std::map<uint64_t, Block*> program_blocks_;         // by program handle
    std::set<uint64_t> given_; // program handles of blocks that tickets alone keep
    AddressMap map_;
    std::map<int, Room> rooms_; // by device
    MemoryTotals totals_;
    uint64_t next_id_ = 1;
    uint64_t next_program_handle_ = kFirstProgramHandle;
};

} // namespace flowgpu

#endif
