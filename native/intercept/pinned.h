// Memory of the host that the driver holds pinned for the program (cuMemHostRegister,
// cuMemHostAlloc). The driver lets a registration stand when the program unmaps the memory, closes
// it (mprotect) or cuts its file. A new driver pins only what is mapped and may be accessed, so
// that pages of ours stand in for the rest while it does.
#ifndef FLOWGPU_INTERCEPT_PINNED_H
#define FLOWGPU_INTERCEPT_PINNED_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda.h>

namespace flowgpu::pinned {

struct Range {
    uintptr_t start, end;
    bool read_only; // to the device
};
Range range_of(const void* address, size_t bytes, unsigned register_flags);
Range all_memory();
// Sorted, and apart from each other.
std::vector<Range> merged(std::vector<Range> ranges);

// What the driver holds, whichever engine the job is prepared for. The registration ends with the
// current context.
void note(const void* address, size_t bytes, unsigned register_flags);
void forget(const void* address);
void end_of(CUcontext context);
std::vector<Range> all();
// From now on what is noted stays so: a device may have written it. Gives all since then, behind
// the closed gate.
void begin_to_keep();
std::vector<Range> since_then();

// Finds what of these ranges no driver can pin, as it is when this is made. It is used behind the
// closed gate, and threads of the program may change it meanwhile.
class Gaps {
  public:
    explicit Gaps(std::vector<Range> ranges);
    ~Gaps() { close(); }
    Gaps(const Gaps&) = delete;
    Gaps& operator=(const Gaps&) = delete;

    bool any() const { return !gaps_.empty(); }
    bool in(const Range& range) const;
    // Maps pages where nothing is mapped: before a new driver starts, which may map something of
    // its own there.
    void fill();
    // Makes the rest memory that can be pinned, or what stands for it. Not for long: what the
    // program does with it meanwhile is undone.
    void open();
    // The program has it all as before.
    void close();

  private:
    enum class Kind {
        hole,
        closed, // to the accesses that pinning needs
        cut,    // its file ends before it
    };
    struct Gap {
        Kind kind;
        uintptr_t start, end;
        int protection, wanted;
        bool is_file;
        bool changed;        // by us
        uintptr_t elsewhere; // where the program's mapping is meanwhile
    };
    bool move(Gap& gap);

    std::vector<Gap> gaps_;
};

} // namespace flowgpu::pinned

#endif
