// What this process keeps: its device memory, its contexts, and the control page the coordinator
// reads.
#ifndef FLOWGPU_INTERCEPT_TASK_H
#define FLOWGPU_INTERCEPT_TASK_H

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "driver.h"
#include "flowgpu/wire.h"
#include "memory.h"

namespace flowgpu {

struct Task {
    Memory memory;
    std::atomic<uint32_t> captures{
        0}; // stream captures under way: draining a context would break them
    std::atomic<bool> initialised{false};

    std::mutex mutex;             // guards what follows
    std::set<CUcontext> contexts; // created by the program, to be drained
    std::map<CUmemGenericAllocationHandle, size_t> not_plain; // cuMemCreate's not taken over
    uint64_t not_plain_bytes = 0;
    std::set<uint64_t> managed_variables; // of modules, of which the program has the address
    std::set<void*> unknown_functions;
    std::vector<CUdeviceptr> deferred_frees; // freed during a capture; released after it

    // Never null: a private page stands in until the shared one is made, and in a forked child.
    std::atomic<flowgpu_control_page*> page;
    int page_fd = -1;

    Task();
    // Makes the shared page; false when the system refuses it.
    bool make_page();
    void update_page();
    bool draining() const; // whether device memory that is missing is free again soon
    void forget_drain();   // nobody says when it has ended
    // Memory of the driver's has begun or ended (kOfTheDriver), or managed memory.
    void driver_memory_changed();
    void add_not_plain(CUmemGenericAllocationHandle handle, size_t bytes);
    void remove_not_plain(CUmemGenericAllocationHandle handle);
    bool has_not_plain();
    // True if a module or library that lives is known to have managed variables. `ours_too`: also
    // in memory of FlowGPU's.
    bool has_managed_variables(bool ours_too);

  private:
    void count_driver_memory();
};

// Made on first use, never destroyed: the program's threads may call the driver while the process
// exits.
inline Task& task() {
    static Task* made = new Task();
    return *made;
}
inline AddressMap& address_map() {
    return task().memory.map();
}

// Managed memory that lives, in the driver's words.
bool is_managed(CUdeviceptr address);

// Frees what was freed during a capture, once none is under way.
void release_deferred();

} // namespace flowgpu

#endif
