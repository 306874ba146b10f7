// The emulated libcuda inside its host process. Rules for code that lives in someone else's
// process: no exit or abort, nothing printed, no constructor, no thread before cuInit, errno kept.
// All state hangs off pointers in .bss and one pthread key, so a tool that puts the writable
// segments back gets a library as fresh as the loader made it.
#pragma once

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#ifndef __CUDA_API_PUSH_VISIBILITY_DEFAULT
#define __CUDA_API_PUSH_VISIBILITY_DEFAULT
#endif
#include <cuda.h>

// Declared by cudaProfiler.h, which comes with the toolkit but not with the runtime wheel.
extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI cuProfilerStart(void);
extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI cuProfilerStop(void);

#include "transport.h"

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <string>
#include <tuple>
#include <unordered_map>

namespace flowgpu::emu {

struct ThreadState {
    static constexpr int kMaxDepth = 64;
    uint64_t contexts[kMaxDepth];
    int depth;
    int entries; // nesting of Entry in this thread
    int per_thread_stream;
    int capture_mode; // CUstreamCaptureMode
    bool in_callback; // inside a host function: the API is not permitted there
    uint64_t tid;

    uint64_t current() const { return depth == 0 ? 0 : contexts[depth - 1]; }
};

ThreadState& thread_state();

struct FunctionLayout {
    struct Param {
        uint32_t offset, size;
    };
    std::vector<Param> params;
    uint32_t bytes = 0;
    bool kernel = false; // the handle is a library's kernel
};

// What cuGraphKernelNodeGetParams points its caller to.
struct NodeArguments {
    std::vector<uint8_t> bytes;
    std::vector<void*> params;
    size_t size = 0;
    void* extra[5] = {};
};

// What cuStreamGetCaptureInfo points its caller to.
struct CaptureFrontier {
    std::vector<CUgraphNode> nodes;
    std::vector<CUgraphEdgeData> edges;
};

struct Link; // api_link.cc

// What a context has mapped: of the device, and memory of the host that the device writes to.
struct ContextPages {
    void* device;
    void* host;
};

// Managed memory: mappings of the device's memory in regions of reserved addresses.
struct ManagedPiece {
    uint64_t size;
    bool variables;                    // of modules; the device says who has them
    std::map<uint64_t, uint64_t> used; // start, end
};
struct ManagedBlock {
    uint64_t piece;
    uint64_t context;
    uint64_t size;
    uint64_t pool = 0;
};

struct Process {
    std::mutex mutex;
    std::atomic<bool> initialized{false};
    std::atomic<bool> shut_down{false}; // by exit()
    pid_t pid = 0;
    bool eager = false; // modules are loaded whole
    // The device's socket, as the environment had it first: as with the real driver's devices, what
    // becomes of the environment does not matter later.
    std::string device_path;
    uint64_t client_id = 0;
    int control = -1;         // the connection that the device ties this client's life to
    int uvm = -1;             // bound to a name of this process's own, as the real driver's is
    std::vector<int> service; // from the Multi-Process Service; empty: it is no client
    std::vector<int> idle;    // connections that no call uses now
    std::vector<int> all;     // every open connection, the idle ones included
    std::map<uint64_t, ContextPages> context_pages;
    std::map<std::pair<uint64_t, void*>, void*> storage; // by context and key, from a private table
    std::map<void*, size_t> host_memory;                 // from cuMemHostAlloc, ours to unmap
    std::vector<std::pair<uint64_t, uint64_t>> taken;    // address ranges, at cuInit: start, end
    std::vector<uint64_t> pieces;                        // with small reservations
    std::map<uint64_t, uint64_t> small;                  // those: start, end
    uint64_t own_range = 0, own_bytes = 0;               // of the driver's; 0: there is none
    std::map<uint64_t, uint64_t> in_own_range;           // start, end
    std::mutex managed_mutex;                            // for what follows; taken before the other
    int managed_file = -1;                               // as long as there are regions
    std::map<uint64_t, uint64_t> managed_regions;        // start, end
    std::map<uint64_t, ManagedPiece> managed_pieces;
    std::map<uint64_t, ManagedBlock> managed;        // from cuMemAllocManaged and managed pools
    std::map<uint64_t, CUmemLocation> managed_pools; // where each prefers its memory
    std::map<std::pair<int, int>, uint64_t> managed_default, managed_set; // by location
    std::unordered_map<uint64_t, FunctionLayout> layouts; // handles are never reused
    bool callbacks_running = false;
    pthread_t callbacks{};   // the thread, as long as they run
    bool host_nodes = false; // a graph may hold host functions
    // The arguments of kernel nodes, by graph and node. They live as long as the graph.
    std::map<uint64_t, std::map<uint64_t, NodeArguments>> node_arguments;
    std::map<uint64_t, CaptureFrontier> capture_frontiers; // by stream, as last asked for
    std::map<uint64_t, std::shared_ptr<Link>> links;       // from cuLinkCreate

    // The gate: a lock by cuCheckpointProcessLock stops calls at their entry.
    std::atomic<int> active{0};
    std::atomic<bool> closed{false};
    std::mutex gate_mutex;
    std::condition_variable gate_opened;
    CUprocessState state = CU_PROCESS_STATE_RUNNING;
    bool checkpoint_failed = false;                       // once, for want of device memory
    std::vector<uint8_t> image;                           // device state while checkpointed
    std::vector<std::pair<uint8_t*, size_t>> image_pages; // contents of memory, one per object
};

Process& process();

// One API call: passes the gate, keeps errno, and says if the library may be used at all.
class Entry {
  public:
    Entry();
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    CUresult status() const { return status_; }

  private:
    ThreadState& thread_;
    CUresult status_;
    int saved_errno_;
    bool counted_ = false;
};

// One request to the device. Inputs are packed in order; outputs are taken in order after go().
class Call {
  public:
    explicit Call(Op op) : op_(op) {}
    template <class T> Call& in(const T& value) {
        writer_.put(value);
        return *this;
    }
    Call& in_blob(const void* data, size_t size) {
        writer_.put_blob(data, size);
        return *this;
    }
    Call& in_string(std::string_view text) {
        writer_.put_string(text);
        return *this;
    }
    Writer& writer() { return writer_; }
    Call& attach(int fd) {
        fd_ = fd;
        return *this;
    }
    CUresult go();
    CUresult go_ungated(); // for the library's own threads, while the gate may be closed
    template <class T> T take() { return reader_.take<T>(); }
    std::string take_string() { return reader_.take_string(); }
    std::string_view take_blob() { return reader_.take_blob(); }
    Reader& reader() { return reader_; }
    UniqueFd& received_fd() { return received_; }

  private:
    CUresult exchange(ThreadState& thread, int32_t* result);

    Op op_;
    int fd_ = -1;
    Writer writer_;
    std::vector<uint8_t> reply_;
    Reader reader_{nullptr, 0};
    UniqueFd received_;
};

template <class... Out> std::tuple<Out*...> outs(Out*... pointers) {
    return {pointers...};
}

// A request of plain values: packs `in`, and on success fills the outputs that are not null.
template <class... Out, class... In> CUresult rpc(Op op, std::tuple<Out*...> out, const In&... in) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) {
        return entry.status();
    }
    Call call(op);
    (call.in(in), ...);
    const CUresult result = call.go();
    if (result == CUDA_SUCCESS) {
        std::apply(
            [&]([[maybe_unused]] auto*... to) {
                [[maybe_unused]] auto store = [&](auto* one) {
                    const auto value = call.take<std::remove_pointer_t<decltype(one)>>();
                    if (one != nullptr) {
                        *one = value;
                    }
                };
                (store(to), ...);
            },
            out);
    }
    return result;
}

// Connections of this process.
int open_connection(uint64_t attach_to, uint64_t* client_id);
// A socket with a name that no process of another PID namespace has. None while another of this
// process's name is open: one that an earlier life has left.
UniqueFd bind_own_name(const char* what);
bool bind_uvm_name();
// False: a service was found and did not answer as one. Else `service` has what it gave, if any.
bool join_service();
CUresult take_connection(int* fd);
void return_connection(int fd, bool usable);
void close_connections();
bool map_context_pages(uint64_t context, int device);
void unmap_context_pages(ContextPages& pages);
void end_context(uint64_t context); // its pages, and what was stored with it

// api_managed.cc
CUresult give_managed_piece(uint64_t size); // to the device, for variables of modules
void drop_managed(uint64_t address);        // the device has freed it
// A pool of the device's that stays empty stands for a managed one.
bool is_managed_pool(uint64_t pool);
CUresult make_managed_pool(const CUmemPoolProps& props, CUmemoryPool* pool);
CUresult default_managed_pool(CUmemLocation location, CUmemoryPool* pool);
CUresult current_managed_pool(CUmemLocation location, CUmemoryPool* pool);
CUresult set_managed_pool(CUmemLocation location, uint64_t pool);
bool end_managed_pool(uint64_t pool); // false: it is a default one
CUresult allocate_from_managed_pool(uint64_t size, uint64_t pool, CUstream stream,
                                    CUdeviceptr* pointer);
uint64_t managed_pool_of(uint64_t address);                   // 0: none
uint64_t bytes_of_managed_pool(uint64_t pool, bool reserved); // in use, or that it has
void drop_managed_of(uint64_t context);
void drop_all_managed(); // nothing of it is used any more

// spawn.cc: a socket connected to the device, which is started if none answers; -1 if that fails.
int connect_device();

// checkpoint.cc: the thread that listens for cuCheckpointProcess* of other processes.
bool start_helper();

// api_launch.cc: a function's parameter layout, and the arguments packed after it if that is asked.
CUresult pack_arguments(uint64_t function, void** params, void** extra, FunctionLayout* layout,
                        std::vector<uint8_t>* packed);

// api_stream.cc: the thread that runs the host functions of this process.
CUresult ensure_callback_thread();

// Reserved, inaccessible address space of the application; null if there is none.
void* reserve_addresses(size_t size, size_t alignment, uint64_t hint);
// The same of less than a place, packed together with others. No wish is fulfilled: a real driver
// fulfils one only within a range of its own.
void* reserve_small(size_t size, size_t alignment);
// The range that a process's first context reserves if FLOWGPU_EMU_ROOM says so. The driver has
// memory of its own at its beginning, and looks for room there before it follows a wish, as a real
// one may.
bool reserve_own_range();
// The same of a place or more, in whole places. Small ones are packed into what is left of the
// last.
void* reserve_large(size_t size, size_t alignment, uint64_t hint);
// Gives back what one of these two has reserved.
void unreserve(void* at, size_t size);
// The driver's unit for what is reserved at a certain address (docs/design/hardware-notes.md).
constexpr uint64_t kPlaces = 32ull << 20;

CUresult unsupported(const char* name);
// Completes a request that says to what devices are to have access.
CUresult set_access(Call& call, const CUmemAccessDesc* access, size_t count);

template <class Handle> uint64_t handle_of(Handle handle) {
    return reinterpret_cast<uint64_t>(handle);
}

} // namespace flowgpu::emu
