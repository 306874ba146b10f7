// A child of fork() inherits the driver's device descriptors and mappings, which are dead weight to
// it (the driver answers CUDA_ERROR_NOT_INITIALIZED there) but make CRIU refuse the whole tree
// (P23). The child drops them, and forgets the parent's gate, sockets and control page.
#include "fork.h"

#include <cerrno>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device.h"
#include "gate.h"
#include "ipc.h"
#include "managed.h"
#include "nvml.h"
#include "pools.h"
#include "proc.h"
#include "replay/code.h"
#include "replay/record.h"
#include "rewind.h"
#include "task.h"

namespace flowgpu::fork_guard {

namespace {

void (*close_sockets)();

// Plain pages take the place of device mappings: whatever still looks there at exit reads zeros.
void drop_mappings() {
    proc::each_mapping([](const proc::Mapping& old) {
        if (!device::is_mapping(old.name))
            return;
        int protection = old.mode[0] == 'r' ? PROT_READ | PROT_WRITE : PROT_NONE;
        mmap(reinterpret_cast<void*>(old.start), old.end - old.start, protection,
             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    });
}

uint32_t inside; // of the one fork at a time, what gate::enter() gave

// The gate is first: the driver's own handlers, which came before ours and so run after them, wait
// there as well where they are watched, and a checkpoint needs the locks.
void before() {
    const uint32_t found = gate::enter();
    nvml::wait_until_back();
    ipc::lock();
    managed::lock();
    pools::lock();
    replay::code_mutex().lock();
    task().memory.mutex().lock();
    task().mutex.lock();
    replay::lock();
    address_map().mutex().lock();
    inside = found;
}

void unlock() {
    const uint32_t found = inside;
    address_map().mutex().unlock();
    replay::unlock();
    task().mutex.unlock();
    task().memory.mutex().unlock();
    replay::code_mutex().unlock();
    pools::unlock();
    managed::unlock();
    ipc::unlock();
    gate::leave(found);
}

void in_child() {
    int error = errno;
    Task& t = task();
    unlock();
    gate::reset_after_fork();
    static flowgpu_control_page childs_page;
    t.page.store(&childs_page);
    if (t.page_fd >= 0)
        close(t.page_fd);
    t.page_fd = -1;
    close_sockets();
    ipc::forget_parents();
    t.memory.forget_parents();
    rewind::leave_parents();
    device::close_descriptors();
    drop_mappings();
    t.memory.unmap_windows();
    errno = error;
}

} // namespace

void install(void (*close_in_child)()) {
    close_sockets = close_in_child;
    pthread_atfork(before, unlock, in_child);
}

} // namespace flowgpu::fork_guard
