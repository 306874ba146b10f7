// The C library's functions that ours stand before, as the program would have them without us.
//
// Rules: those of kept.h.
#ifndef FLOWGPU_EXEC_NEXT_H
#define FLOWGPU_EXEC_NEXT_H

#include <cerrno>

#include <dlfcn.h>

#define FGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace flowgpu::exec {

template <typename Function> void look_up(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Functions that `find` looks up when the library starts, since dlsym is not for a signal handler
// or a child after fork. A constructor of the program's libraries may call one before.
template <typename Functions, void (*find)(Functions&)> class Next {
  public:
    void begin() {
        if (begun_)
            return;
        const int error = errno;
        find(found_);
        begun_ = true;
        errno = error;
    }

    const Functions& operator()() {
        if (!begun_)
            begin();
        return found_;
    }

  private:
    Functions found_ = {};
    bool begun_ = false;
};

} // namespace flowgpu::exec

#endif
