// Contexts of the program's made current past the record.
#ifndef FLOWGPU_INTERCEPT_REPLAY_CURRENT_H
#define FLOWGPU_INTERCEPT_REPLAY_CURRENT_H

#include "record.h"

namespace flowgpu::replay {

// For the calling thread; null: none. Behind the closed gate alone, where no thread of the program
// is affected.
inline CUresult use(const Object* context) {
    return FG_DRIVER(cuCtxSetCurrent)(context ? context->driver<CUcontext>() : nullptr);
}

class Current {
  public:
    explicit Current(CUcontext context)
        : result_(FG_DRIVER(cuCtxPushCurrent_v2)(to_driver(context))) {}
    ~Current() {
        CUcontext popped = nullptr;
        if (result_ == CUDA_SUCCESS)
            FG_DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    CUresult result() const { return result_; }

  private:
    CUresult result_;
};

} // namespace flowgpu::replay

#endif
