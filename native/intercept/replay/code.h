// What a module or library was loaded from, and where its variables are.
#ifndef FLOWGPU_INTERCEPT_REPLAY_CODE_H
#define FLOWGPU_INTERCEPT_REPLAY_CODE_H

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "image.h"
#include "movable.h"

namespace flowgpu::replay {

// Memory of the program's for variables of code.
struct Block {
    bool tried = false;
    bool complete = false; // no variable of its kind is the driver's
    CUdeviceptr start = 0; // 0: there is none
    const Object* context = nullptr;
    std::map<std::string, CUdeviceptr> places; // of the variables in it, by their names
    // Offsets of addresses of functions in them. The driver has those in its own copies.
    std::map<std::string, std::vector<uint64_t>> code_addresses;
    void leave(); // without freeing it
};

struct Code {
    using Load = std::function<CUresult(void** made, const void* from)>;
    Code(Image read, Load how, Options<CUjit_option> by)
        : image(std::move(read)), load(std::move(how)), options(std::move(by)) {}
    ~Code() {
        plain.leave();
        managed.leave();
    }
    Code(const Code&) = delete;
    Code& operator=(const Code&) = delete;

    const Image image;
    const Load load;
    const Options<CUjit_option> options;

    // CodeLock guards the rest, for a library.
    // The code that finds its variables in the blocks; empty: all are where the driver has put
    // them.
    std::string moved;
    Block plain, managed; // for the two kinds of variables; the second is managed memory
    bool of_library = false;
    // A library that was loaded where no context was current, or lost its plain variables with
    // their context: its variables are led to memory of the program's at its next use in one.
    bool due = false;
    // The context of a block has ended, and the driver still has the code for variables there.
    bool stale = false;
    void* replaced = nullptr; // the driver's library before, until the library ends

    Block& block_of(MovableCubin::Which which) {
        return which == MovableCubin::Which::plain ? plain : managed;
    }
    CUdeviceptr place_of(const std::string& name) const; // 0: it is the driver's
    bool drivers_managed() const { // the driver has managed variables that code uses
        return image.managed && !image.by_address_alone && !managed.complete;
    }
    // Loads it as it was. Code for variables in blocks that is for another GPU is made for this
    // one.
    CUresult again(void** made);
    bool link_for_this_gpu(); // False: the variables would not be where they are
    bool is_constant(const std::string& name) const {
        return std::binary_search(image.constants.begin(), image.constants.end(), name);
    }
};

// Loads code that the driver has just loaded as `made` once more, with its variables in memory of
// the program's, and ends the other. Returns what to use: `made` itself where that is not possible.
void* load_moved(Code& code, Kind kind, void* made);

// Before the registry's lock, and that of memory.
std::mutex& code_mutex();

// Its holder finds, sets or for the first time launches something of a library. Meanwhile the
// library's handles of the driver do not change; a module's never do. `handle` is the program's for
// the library or for a part of it. Where a context is current, the constructor may load the library
// anew first: if its variables are still to be led elsewhere, or if their context has ended.
class CodeLock {
  public:
    explicit CodeLock(const void* handle);

  private:
    std::unique_lock<std::mutex> lock_;
};

// As load_moved, of a library of which the program asks where a variable is, with all that it has
// of the library. False: nothing happened, as once something of it was launched. The lock is held.
bool move_variables(const void* handle);
// A context ends: the variables in it do. The registry is locked.
void forget_blocks_in(const Object* context);

// Where the driver has put a variable of a module or library.
CUresult variable_of(Kind kind, void* driver, const std::string& name, CUdeviceptr* address,
                     size_t* bytes);

Object& root_of(Object& object); // the module or library that code belongs to

} // namespace flowgpu::replay

#endif
