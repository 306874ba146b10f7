// What exists in the driver and how it came to be: enough to make it again in a driver that knows
// nothing.
//
// Not a log of calls but the objects that live, each with the call that made it and the calls that
// last changed it: a program may create and destroy for as long as it likes. Objects are made again
// in the order in which they were made; each needs only older ones.
#ifndef FLOWGPU_INTERCEPT_REPLAY_RECORD_H
#define FLOWGPU_INTERCEPT_REPLAY_RECORD_H

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "recipe.h"

namespace flowgpu::replay {

// Successful calls of functions of which the table says replay:refuse.
extern std::atomic<uint64_t> unsaved_calls[kSymbols];
// The driver's own function, behind the translation.
#define FG_DRIVER(name)                                                                            \
    (reinterpret_cast<decltype(&::name)>(                                                          \
        ::flowgpu::flowgpu_page.functions[::flowgpu::I_##name].driver))

struct Object;

// The program's address of a constant, and the driver's in its present life.
struct Alias {
    Object* context;
    CUdeviceptr program;
    CUdeviceptr driver;
    size_t bytes;
};

// A variable of a module and its bytes while the driver is away.
struct Variable {
    std::string name;
    bool asked = false; // the program has the driver's address of it
    struct Address {
        uint64_t offset;
        bool code; // of a function
    };
    std::vector<Address> addresses; // with which it begins, sorted (modimage.h)
    struct Instance {
        Object* context;
        CUdeviceptr address;
        size_t size;
        std::vector<char> bytes; // empty: it is as it was loaded
    };
    std::vector<Instance> instances;
    // The program has these addresses of our memory in the variable's place, one a context.
    std::vector<std::pair<const Object*, CUdeviceptr>> stand_ins;
    std::vector<Alias> aliases; // of a constant, of which the program has the address
};

struct Code;       // code.h
struct GraphState; // graphs.h

struct Object {
    Kind kind;
    uint64_t serial = 0;
    Slot* slot = nullptr;
    Object* context = nullptr; // current when it was made; it ends with it
    Object* parent = nullptr;  // module, library, kernel, graph or node that it ends with
    Make make;                 // empty: cannot be made again, for the reason in `why`
    std::string why;
    std::map<std::pair<unsigned, uint64_t>, Set> state; // by symbol and by what of it is set
    std::atomic<uint64_t> last_set{0};                  // of a kernel, what of its attributes
    CUdevice primary = -1; // of which this is the primary context, which keeps its handle for ever
    uint64_t uses = 0;     // retains of it; of an executable, its flags
    bool active = true;
    bool listed = false; // a function that its module's list gave, which loads when it is used
    std::atomic<bool> marked{false}; // event: was recorded; code: was used
    // Event: milliseconds from its record by the program to the one that stands for it since CUDA
    // was made anew; negative when the driver has the program's own.
    std::atomic<double> age{-1};
    double kept_age = -1;              // the same, for when CUDA is made anew next
    std::vector<Variable> variables;   // of a module or library
    std::shared_ptr<Code> code;        // what a module or library is loaded from
    std::shared_ptr<GraphState> graph; // of a graph, a node or an executable
    template <class H> H driver() const { return static_cast<H>(slot->driver); }
};

// What the driver holds for an address of the host or a reservation: made again, never renamed.
struct HostMemory {
    size_t bytes = 0;
    unsigned flags = 0; // of cuMemHostRegister, or
    bool ours = false;  // of cuMemHostAlloc, for which the pages were mapped
    bool dead = false;  // no driver takes it again: the program has let go of the memory
    Object* context = nullptr;
};

// Prepares this process for the engine, if its environment says so: before the driver's first call.
// `driver`: the library as dlopen gave it.
bool prepare(void* driver);
bool asked_for(); // by the environment, as it was then
// After the first cuInit: what is asked of the environment later is answered as it is now.
void keep_environment();
bool forces_compilation();    // of PTX text, whatever code there is
bool tries(const char* what); // that no real GPU has shown (`run --untried`)
bool prepared();
const char* why_not(); // not prepared

// Notes an object and returns the program's handle; the driver's own when no slot is left. `fresh`:
// the driver has just made it. Else it may be one that is known already: of functions, kernels and
// primary contexts the driver gives the same handle again. `fill` completes one that is new to us.
using Fill = std::function<void(Object&)>;
void* note(Kind kind, void* driver, bool fresh, const Fill& fill);
template <class H> H note(H driver, bool fresh, const Fill& fill) {
    return static_cast<H>(note(KindOf<H>::kind, static_cast<void*>(driver), fresh, fill));
}
// The program's handle for the driver's; one of an object of which the making was not seen is noted
// as such.
void* to_program(Kind kind, void* driver);
template <class H> H to_program(H driver) {
    return static_cast<H>(to_program(KindOf<H>::kind, static_cast<void*>(driver)));
}

// An object has ended, and all that end with it.
void end(const void* handle);
// A primary context was released (one use less) or reset; unless it is still active, what was in it
// has ended.
void end_of_primary(CUdevice device, bool one_use, bool active);
// A call that changed an object: the last one of each `what` counts.
void set(const void* handle, unsigned symbol, uint64_t what, Set again);
inline uint64_t number_of(const void* handle) {
    return reinterpret_cast<uintptr_t>(handle);
}

Object* object_of(const void* handle);
// Any context that has not ended, of which the driver needs one to be current; null: there is none.
// The registry is locked.
const Object* any_context();
// The program gives a function or kernel to be launched: notes the first time. Called quietly.
extern "C" Slot* flowgpu_replay_note_launch(Slot* slot);
void with_object(const void* handle, const std::function<void(Object&)>& work);

CUresult register_memory(void* address, const HostMemory& place);
void note_host(void* address, const HostMemory& place);
bool take_host(void* address, HostMemory* place);
// `inside`: by any address of the place, not only its first.
bool find_host(void* address, HostMemory* place, bool inside = false);
void set_primary_flags(CUdevice device, unsigned flags);

// A primary context that the driver named; `used`: and retained.
CUcontext note_primary(CUcontext driver, CUdevice device, bool used);
// The handle of a primary context, which is not made for that. False: it cannot be had so.
bool find_primary(CUcontext* driver, CUdevice device);
// A function of the program's module that the driver named.
CUfunction note_function(CUfunction driver, CUmodule module, unsigned place);
// Leads the slots of private tables to us that were before, after a rewind put others there.
bool change_tables();

// Names what of this process cannot be made again; empty when everything can. `still`: nobody is in
// the driver, and graphs are read for it.
std::string unsaved(bool still);

// True if the driver has made managed variables for a module or library that lives. `ours_too`: or
// FlowGPU has.
bool has_managed_variables(bool ours_too);
// True if a library has managed variables, and is led to memory of FlowGPU's for them once a
// context is current.
bool awaits_context(const void* library);

// Around fork().
void lock();
void unlock();

} // namespace flowgpu::replay

#endif
