// What the device keeps for one client process. All of it is guarded by Client::mutex unless it
// says otherwise; nothing of it is reachable by another client.
#pragma once

#include "element.h"
#include "image.h"
#include "space.h"
#include "stream.h"
#include "wire.h"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace flowgpu::emu {

struct Object {
    explicit Object(uint64_t h) : handle(h) {}
    virtual ~Object() = default;
    uint64_t handle;
    Owner owner;
};

struct Stream;
struct Capture; // graph.h

// What a number means that kernels are given for a texture or a surface object.
struct Binding {
    // The driver's own, and one whose object has ended, are no object.
    enum class Kind : uint8_t { kTexture, kSurface, kDriver, kEnded };
    Kind kind = Kind::kDriver;
    bool is_programs() const { return kind == Kind::kTexture || kind == Kind::kSurface; }
    CUDA_RESOURCE_DESC resource{};
    CUDA_TEXTURE_DESC texture{};
    bool viewed = false;
    CUDA_RESOURCE_VIEW_DESC view{};
};

struct Context : Object {
    using Object::Object;
    Device* device = nullptr;
    uint64_t memory = 0; // of the device, as long as the context is not destroyed
    uint32_t flags = 0;
    uint64_t id = 0;
    bool primary = false;
    int32_t cache_config = 0;
    std::map<int, uint64_t> limits;
    std::set<uint64_t> peers;                               // contexts whose memory it may reach
    std::map<uint64_t, Binding> bindings;                   // by number
    bool copied_arrays = false;                             // once: the driver has its number
    std::shared_ptr<Stream> null_stream;                    // the legacy default stream
    std::map<uint64_t, std::shared_ptr<Stream>> per_thread; // by thread id
    std::map<uint64_t, std::shared_ptr<Stream>> streams;    // by handle
    std::vector<std::shared_ptr<Stream>> ended;             // destroyed, with work left
    std::atomic<int> sticky{CUDA_SUCCESS};                  // not guarded
    std::atomic<bool> cancel{false};                        // not guarded
};

struct Stream : Object {
    using Object::Object;
    std::shared_ptr<Context> context;
    uint32_t flags = 0;
    int32_t priority = 0;
    uint64_t id = 0;
    std::map<int32_t, CUstreamAttrValue> attributes; // that were set, but the priority
    TicketRef last;                                  // the newest task; null if there was none
    std::shared_ptr<Worker> worker = std::make_shared<Worker>();
    std::shared_ptr<Capture> capture; // that it is part of
    std::vector<uint64_t> frontier;   // nodes that the next one captured will depend on

    ~Stream() override { worker->close(); }
    bool idle() const { return last == nullptr || last->done(); }
};

struct EventStamp {
    std::atomic<int64_t> nanoseconds{0};
};

struct Event : Object {
    using Object::Object;
    std::shared_ptr<Context> context;
    uint32_t flags = 0;
    bool recorded = false;
    TicketRef ticket; // null after a restore: done
    std::shared_ptr<EventStamp> stamp;
    bool captured = false;          // last recorded in a capturing stream
    std::weak_ptr<Capture> capture; // the one, while it goes on
    std::vector<uint64_t> frontier; // of the stream when it was recorded

    bool done() const { return ticket == nullptr || ticket->done(); }
};

struct Module : Object {
    using Object::Object;
    std::shared_ptr<Context> context;
    std::shared_ptr<const Image> image;
    std::vector<uint64_t> variables;    // the driver's copies, in the order of the code's variables
    std::vector<uint64_t> kernels_know; // where kernels find them, in the same order
    uint64_t code = 0;                  // where the addresses of its functions begin
    std::map<std::string, uint64_t> functions;
    uint64_t library = 0; // the library that this module belongs to
};

struct Function : Object {
    using Object::Object;
    std::shared_ptr<Module> module;
    const ptx::Function* code = nullptr;
    int32_t max_dynamic_shared = 48 << 10;
    int32_t carveout = -1;
    bool loaded = false; // as a lazily loading driver says of it
};

// A library is a module in every context that asks for it.
struct Library : Object {
    using Object::Object;
    std::shared_ptr<const Image> image;
    std::map<uint64_t, uint64_t> modules; // by context
    std::map<size_t, uint64_t> managed;   // variables that those modules share, by index
    std::map<std::string, uint64_t> kernels;
};

struct Kernel : Object {
    using Object::Object;
    std::shared_ptr<Library> library;
    std::string name;
    int32_t max_dynamic_shared = 48 << 10;
    int32_t carveout = -1;
};

struct MemHandle : Object {
    using Object::Object;
    std::shared_ptr<Phys> phys;
    uint32_t handle_types = 0;
    uint8_t rdma = 0; // gpuDirectRDMACapable, as it was asked for; an import does not have it
    uint32_t references = 1; // times that the client must release it
    uint32_t mappings = 0;
};

constexpr int kOnHost = -1; // the place of a pool that gives no memory here

struct Pool : Object {
    using Object::Object;
    int device = 0;
    std::map<int, uint64_t> attributes;
    uint32_t readers = 0; // devices that may reach its memory, a bit for each
    uint32_t writers = 0;
};

// Rows and slices follow each other without gaps.
struct Array : Object {
    using Object::Object;
    std::shared_ptr<Phys> phys;
    uint64_t offset = 0;
    uint64_t context = 0;
    uint64_t mipmap = 0; // that it is a level of
    CUDA_ARRAY3D_DESCRIPTOR about{};

    uint64_t row() const; // bytes
    uint64_t rows() const { return std::max<uint64_t>(about.Height, 1); }
    uint64_t slices() const { return std::max<uint64_t>(about.Depth, 1); } // layers and faces too
    uint64_t bytes() const { return row() * rows() * slices(); }
};

struct Mipmap : Object {
    using Object::Object;
    std::shared_ptr<Phys> phys;
    uint64_t context = 0;
    uint64_t number = 0; // the driver's own, while it lives
    CUDA_ARRAY3D_DESCRIPTOR about{};
    std::vector<uint64_t> levels; // arrays
};

struct HostRange {
    uint64_t size = 0;
    uint32_t flags = 0;
    bool owned = false;   // from cuMemHostAlloc
    uint64_t context = 0; // handle of the one that was current; it ends with it
    // What kernels reach of it; null until one asks, or if this device cannot map it.
    std::shared_ptr<Phys> phys = nullptr;
};

// A 2 MiB piece of device memory from which small allocations are cut.
struct Chunk {
    std::shared_ptr<Phys> phys;
    uint64_t context = 0;
    std::map<uint64_t, uint64_t> used; // offset -> end, multiples of the small alignment
};

// Memory that the client has mapped as well, at the same address.
struct ManagedPiece {
    std::shared_ptr<Phys> phys;
    bool variables = false;            // the device gives it to modules, the client all else
    std::map<uint64_t, uint64_t> used; // offset -> end
};

// What holds for pages of managed memory; a location of type 0 is none.
struct ManagedPages {
    uint64_t end = 0;
    bool read_mostly = false;
    uint32_t accessed_by = 0; // a bit for each device, and kHostBit
    CUmemLocation preferred{};
    CUmemLocation prefetched{}; // as was last asked
    Device* resident = nullptr; // where they were prefetched to; null: the host
    static constexpr uint32_t kHostBit = 1u << 31;
};

struct Primary {
    uint64_t context = 0; // none while it is not active
    uint64_t handle = 0;  // the same each time that it is made again
    uint32_t references = 0;
    uint32_t flags = 0;
};

struct Client : std::enable_shared_from_this<Client> {
    Client(Machine* m, uint64_t client_id, pid_t p, std::vector<int> devices)
        : machine(m), id(client_id), pid(p), visible(std::move(devices)) {}

    Machine* machine;
    const uint64_t id;
    const pid_t pid;
    int control = -1; // its first connection, open while the server knows the client
    std::mutex mutex;
    bool gone = false;

    // The machine's index of each device that the client may use, by the client's ordinal of it.
    // Everything below goes by the machine's index; only what is said to the client does not.
    std::vector<int> visible;
    Device* device(int ordinal) const;
    int ordinal(const Device& device) const; // CU_DEVICE_INVALID for one that it may not use
    // A checkpoint moved it to another device of this machine, of which it sees only some: it can
    // import no memory of those any more (docs/design/hardware-notes.md).
    bool moved_in_part = false;

    uint64_t nonce = 0;
    uint64_t next_handle = 0;
    uint64_t next_id = 0; // of contexts, streams and buffers
    std::unordered_map<uint64_t, std::shared_ptr<Object>> objects;
    std::map<uint64_t, std::shared_ptr<Context>> contexts;
    std::map<int, Primary> primaries;
    std::map<int, uint64_t> default_pools;
    std::map<int, uint64_t> current_pools;
    std::map<uint64_t, HostRange> host_ranges;
    std::map<uint64_t, Chunk> chunks;                // by address
    UniqueFd managed_file;                           // the address is the offset
    std::map<uint64_t, ManagedPiece> managed_pieces; // by address
    std::map<uint64_t, ManagedPages> managed_pages;  // by address, whole pages
    std::vector<std::shared_ptr<Capture>> captures;
    Space space;

    std::mutex callback_mutex; // one host function at a time, on the connection below
    int callback_socket = -1;
    std::condition_variable callbacks_end;       // the client is gone
    std::vector<std::shared_ptr<Phys>> snapshot; // what SnapshotCopy refers to

    // What the client has made on the device holds this; who else does when it is gone is a leak.
    Owner owner = std::make_shared<char>();
    // An object without a place in the table.
    template <class T> std::shared_ptr<T> make_own(uint64_t handle) {
        auto object = std::make_shared<T>(handle);
        object->owner = owner;
        return object;
    }
    uint64_t new_handle();
    template <class T> std::shared_ptr<T> make(uint64_t handle = 0) {
        auto object = make_own<T>(handle != 0 ? handle : new_handle());
        objects[object->handle] = object;
        return object;
    }
    template <class T> std::shared_ptr<T> find(uint64_t handle) const {
        const auto found = objects.find(handle);
        return found == objects.end() ? nullptr : std::dynamic_pointer_cast<T>(found->second);
    }
    template <class T> std::vector<std::shared_ptr<T>> every() const {
        std::vector<std::shared_ptr<T>> out;
        for (const auto& [handle, object] : objects) {
            if (auto typed = std::dynamic_pointer_cast<T>(object)) {
                out.push_back(std::move(typed));
            }
        }
        return out;
    }
    // True if this connection made the handle, even if the object has ended since.
    bool made(uint64_t handle) const;
    const HostRange* host_range(uint64_t address, uint64_t size) const;
    // The range around an address as kernels reach it: it begins at `*begin`. Null: they do not.
    std::shared_ptr<Phys> reach_host(uint64_t address, uint64_t* begin);

    // Streams of a context, the default ones included.
    std::vector<std::shared_ptr<Stream>> streams_of(const Context& context) const;
    // Null when the device has no memory for it.
    std::shared_ptr<Context> make_context(Device* device, uint32_t flags, uint64_t handle = 0);
    // Under the handle that the device's primary context always has.
    std::shared_ptr<Context> make_primary(Device* device, Primary& primary);
    // The device memory that a context takes.
    bool take_context_memory(Context& context, Device* device);
    void destroy_context(const std::shared_ptr<Context>& context);
    // The device whose primary context this is, if it has one but is not active; else null.
    Device* ended_primary(uint64_t handle) const;
    void unload(const std::shared_ptr<Module>& module);

    // Device memory for cuMemAlloc and for module variables. kNeedAddresses asks for `*need`.
    int32_t allocate(const Context& context, MapKind kind, uint64_t size, uint64_t* address,
                     uint64_t* need);
    void release(uint64_t address);
    // ops_managed.cc: the same for variables that are managed. A context of 0 is all of them.
    int32_t allocate_managed(uint64_t context, uint64_t size, uint64_t* address, uint64_t* need);
    void release_managed(uint64_t address);
    std::shared_ptr<Phys> make_managed(uint64_t begin, uint64_t size, Device* device);
    void map_managed(uint64_t piece, uint64_t address, uint64_t size, uint64_t context);
    // Applies to [begin, end), widened to pages. What is not there yet has no advice.
    void each_managed_page(uint64_t begin, uint64_t end,
                           const std::function<void(ManagedPages&)>& change);
    void forget_managed_pages(uint64_t begin, uint64_t end);
    void move_managed(uint64_t from, ManagedPages& pages, Device* to);
    // The client is gone: everything stops and goes.
    void destroy();
    // How much of it is left all the same, memory that other processes hold aside.
    long left_behind() const;

  private:
    int32_t allocate_small(const Context& context, Mapping mapping, uint64_t size,
                           uint64_t* address, uint64_t* need);
};

// One request while it is handled, the client's mutex held.
struct Session {
    Client& client;
    const RequestHeader& header;
    Reader in;
    Writer out;
    UniqueFd fd_in;
    int fd_out = -1; // borrowed unless owned below
    UniqueFd fd_out_owned;
    std::unique_lock<std::mutex> lock;

    Machine& machine() { return *client.machine; }
    // The calling thread's context or another; null with *error set if there is none or it is
    // broken.
    std::shared_ptr<Context> context(CUresult* error, uint64_t handle = 0);
    // A context by handle, 0 meaning the current one, broken or not.
    std::shared_ptr<Context> context_by(uint64_t handle, CUresult* error);
    bool current_has_ended(); // the thread's context
    std::shared_ptr<Stream> stream(uint64_t handle, CUresult* error);
    // The same for one that is given work: what captures forbid is refused, and breaks them.
    std::shared_ptr<Stream> work_stream(uint64_t handle, CUresult* error);
    // A call that is no work for a stream and that a capture would not see: refused, and the
    // captures in its way broken, after the mode of the calling thread and theirs.
    CUresult unsafe_call();
    // The calling thread's context for such a call; null with *error set.
    std::shared_ptr<Context> context_for_unsafe(CUresult* error);
    // A call that conflicts with the capture of the stream, or of any stream of the context.
    CUresult breaks_capture(const Stream& stream);
    CUresult breaks_captures(const Context& context);
    void wait(const TicketRef& ticket);
    CUresult wait_idle(const Context& context);
    int32_t need(uint64_t bytes) {
        out = Writer();
        out.put(bytes);
        return kNeedAddresses;
    }
};

// Puts work into a queue that is no stream's.
TicketRef submit_to(Worker& worker, std::shared_ptr<Context> context, std::function<void()> run,
                    std::vector<TicketRef> after);
// Puts work into a stream, in CUDA's order; what it returns is finished when the work is.
TicketRef submit(Client& client, const std::shared_ptr<Stream>& stream, std::function<void()> run,
                 std::vector<TicketRef> after = {});
// The same and waits; in this thread when nothing is before it.
void run_and_wait(Session& session, const std::shared_ptr<Stream>& stream,
                  std::function<void()> run);

// A texture reads linear memory only within these limits.
constexpr uint64_t kTextureAlignment = 512;
constexpr uint64_t kPitchAlignment = 32;
constexpr uint64_t kLinearWidth = 1u << 28; // elements
constexpr uint64_t kPitchWidth = 131072;
constexpr uint64_t kPitchHeight = 65000;
constexpr uint64_t kMostPitch = 2097120; // bytes

constexpr uint32_t kSharedOptIn = 163u << 10; // shared memory of a block that asks for more

// ops_module.cc
int32_t place_variables(Client& client, Module& module, Library* library, uint64_t* need);
int32_t refuse(Session& s, CUresult error, const std::string& message);
int32_t resolve_function(Session& s, uint64_t handle, uint64_t where,
                         std::shared_ptr<Function>* out);

// ops_memory.cc
bool read_client(pid_t pid, uint64_t address, uint8_t* to, uint64_t size);
// Says whether all of a range is memory that the kernel pins for a device: mapped, open to its
// accesses, and there.
bool can_be_pinned(pid_t pid, uint64_t address, const HostRange& range);
bool write_client(pid_t pid, uint64_t address, const uint8_t* from, uint64_t size);

// ops_managed.cc
int32_t free_managed(Session& s, uint64_t address);

// ops_array.cc: whether there are such elements here
CUresult check_element(Client& client, CUarray_format format, unsigned int channels);

// ops_binding.cc: the lowest number that is free in the context becomes this
uint64_t bind(Context& context, Binding binding);
// No work is left in the context: numbers whose objects have ended are free.
void free_numbers(Context& context);
// What kernels of the context see under a number. `keep` holds its memory.
bool image_of(const Client& client, const Context& context, uint64_t number, ptx::Image* image,
              std::shared_ptr<Phys>* keep);

// snapshot_arrays.cc: memory goes by its place in the snapshot's table
void save_arrays(const Client& client, Writer& w,
                 const std::function<uint32_t(const std::shared_ptr<Phys>&)>& index_of);
void load_arrays(Client& client, Reader& r,
                 const std::function<std::shared_ptr<Phys>()>& take_phys);
void save_bindings(const Context& context, Writer& w);
void load_bindings(Context& context, Reader& r);

// ops_vmm.cc: the handle of the device's pool for cuMemAllocAsync
uint64_t current_pool(Client& client, int device);

#define FLOWGPU_EMU_OP(name) int32_t op_##name(Session& s);
FLOWGPU_EMU_OPS(FLOWGPU_EMU_OP)
#undef FLOWGPU_EMU_OP

} // namespace flowgpu::emu
