// Handles that outlive the driver: what a program holds of a context, stream, event, module,
// library, kernel, function, pool, array, graph, node or executable is the address of a slot of
// ours, and the slot holds the driver's.
//
// All slots lie in one range of addresses, so that one comparison tells a handle of ours from the
// special values (null, legacy and per-thread stream) and from handles we do not know, which pass
// as they are; translating one takes one load.
#ifndef FLOWGPU_INTERCEPT_REPLAY_HANDLES_H
#define FLOWGPU_INTERCEPT_REPLAY_HANDLES_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "driver.h"

namespace flowgpu::replay {

// Below the window (native/vmm/memory.h), and as empty.
constexpr uintptr_t kHandleBase = 0x1f0000000000;
constexpr size_t kHandleBytes = size_t{1} << 26;

enum class Kind : uint8_t {
    context,
    stream,
    event,
    module,
    library,
    kernel,
    function,
    pool,
    array,
    mipmap,
    graph,
    node,
    executable
};
constexpr size_t kKinds = 13;
extern const char* const kind_names[kKinds];

struct Object; // record.h

struct Slot {
    static constexpr uintptr_t kEnded = 1, kLaunched = 2;
    void* driver; // after the object's end its last handle, for the driver to refuse
    // The object's address; after its end another ended slot's, with kEnded.
    std::atomic<uintptr_t> link;
    Object* object() const {
        const uintptr_t found = link.load(std::memory_order_relaxed);
        return found & kEnded ? nullptr : reinterpret_cast<Object*>(found & ~kLaunched);
    }
    // Code that may have run, or be part of a graph. Here, as each launch asks: what lies elsewhere
    // has to be waited for (page.h).
    bool launched() const { return link.load(std::memory_order_relaxed) & kLaunched; }
    bool may_be_first_launch() const {
        return !(link.load(std::memory_order_relaxed) & (kEnded | kLaunched));
    }
    // The registry is locked, and the object lives.
    void set_launched(bool now) {
        const uintptr_t before = link.load(std::memory_order_relaxed) & ~kLaunched;
        link.store(before | (now ? kLaunched : 0), std::memory_order_relaxed);
    }
};

template <class H> struct KindOf;
#define FG_KIND(type, name)                                                                        \
    template <> struct KindOf<type> {                                                              \
        static constexpr Kind kind = Kind::name;                                                   \
    }
FG_KIND(CUcontext, context);
FG_KIND(CUstream, stream);
FG_KIND(CUevent, event);
FG_KIND(CUmodule, module);
FG_KIND(CUlibrary, library);
FG_KIND(CUkernel, kernel);
FG_KIND(CUfunction, function);
FG_KIND(CUmemoryPool, pool);
FG_KIND(CUarray, array);
FG_KIND(CUmipmappedArray, mipmap);
FG_KIND(CUgraph, graph);
FG_KIND(CUgraphNode, node);
FG_KIND(CUgraphExec, executable);
#undef FG_KIND

template <class H, class = void> struct IsHandle : std::false_type {};
template <class H> struct IsHandle<H, std::void_t<decltype(KindOf<H>::kind)>> : std::true_type {};

inline Slot* slot_of(const void* handle) {
    auto address = reinterpret_cast<uintptr_t>(handle);
    return address - kHandleBase < kHandleBytes ? reinterpret_cast<Slot*>(address) : nullptr;
}

// The driver's handle for a program's.
template <class H> H to_driver(H handle) {
    Slot* slot = slot_of(handle);
    return slot ? static_cast<H>(slot->driver) : handle;
}

// Reserves the range. False: something else is there.
bool make_slots();
// A slot for a handle of the driver; null when the range is used up. Slots of ended objects are
// used again, the longest ended first.
Slot* take_slot(void* driver, Object* object);
void free_slot(Slot* slot);

} // namespace flowgpu::replay

#endif
