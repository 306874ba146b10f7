// How a thread of ours calls the NCCL that the program uses, and the driver.
#ifndef FLOWGPU_NCCL_CALLS_H
#define FLOWGPU_NCCL_CALLS_H

#include <dlfcn.h>

#include "communicators.h"

namespace flowgpu::nccl {

enum Result : int { kSuccess = 0, kSystemError = 2, kRemoteError = 6, kInProgress = 7 };

inline bool good(Result result) {
    return result == kSuccess || result == kInProgress;
}

// A function of the NCCL that the program uses.
void seen(const void* function);
// Lies in that library.
bool is_of_nccl(const void* address);
// The library's own, not the interposer's; null: it has none of that name.
void* in_library(const char* name);

// Looks the function up when it is first wanted.
template <class F> F nccl(F& slot, const char* name) {
    if (!slot)
        slot = reinterpret_cast<F>(in_library(name));
    return slot;
}

// The driver's as the program finds it, so that what is made by it is known as the program's is.
template <class F> F driver(const char* name, F) {
    return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

// Calls a function of the driver. Says whether it was there and succeeded.
template <class... As> bool drive(const char* name, As... arguments) {
    using Call = int (*)(As...);
    const auto call = driver(name, Call());
    return call && call(arguments...) == 0;
}

// The calling thread's context, as the driver has it.
void* current_context();

// The context that a communicator is of, current while this lives.
class In {
  public:
    explicit In(const How& how);
    ~In();
    In(const In&) = delete;
    In& operator=(const In&) = delete;
    bool good() const { return good_; }

  private:
    int device_;
    void* before_;
    bool retained_ = false, good_ = false;
};

// While it lives, what the thread calls is called as NCCL's own code would: it is not counted, and
// a capture of another thread goes on.
class AsNccl {
  public:
    AsNccl();
    ~AsNccl();
    AsNccl(const AsNccl&) = delete;
    AsNccl& operator=(const AsNccl&) = delete;

  private:
    int mode_;
};

} // namespace flowgpu::nccl

#endif
