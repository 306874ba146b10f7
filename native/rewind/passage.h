// What libc calls in the driver by itself (handlers of exit(), fork() and the end of a thread)
// comes through here, so that none of it runs while the driver is being ended.
#ifndef FLOWGPU_REWIND_PASSAGE_H
#define FLOWGPU_REWIND_PASSAGE_H

#include <atomic>

#include "rewind.h"

namespace flowgpu::rewind {

extern Passage passage; // set once, by remember()
extern std::atomic<unsigned> life;
// Its own threads end when it says so, or when they are ended: they wait for nobody.
extern __thread bool drivers_own __attribute__((tls_model("initial-exec")));

// Around a call of one of the driver's handlers.
class Passing {
  public:
    Passing() : life_(life), through_(!drivers_own), before_(through_ ? passage.enter() : 0) {}
    ~Passing() {
        if (through_)
            passage.leave(before_);
    }
    Passing(const Passing&) = delete;
    Passing& operator=(const Passing&) = delete;
    // False if the driver has ended while we waited to be let in.
    bool same_life() const { return life == life_; }

  private:
    unsigned life_;
    bool through_;
    uint32_t before_;
};

} // namespace flowgpu::rewind

#endif
