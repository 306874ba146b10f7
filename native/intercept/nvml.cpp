#include "nvml.h"

#include <dlfcn.h>

namespace flowgpu::nvml {

namespace {

constexpr int kSuccess = 0;
constexpr unsigned kMost = 1 << 20; // a library that never says that it is down is left alone

unsigned times = 0; // that it was initialised before leave()

// The library, if the program has loaded it. The service thread alone calls it for us.
class Library {
  public:
    Library() : handle_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD)) {}
    ~Library() {
        if (handle_)
            dlclose(handle_);
    }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    template <class... Arguments> int call(const char* name, Arguments... arguments) const {
        using Function = int (*)(Arguments...);
        auto* function = handle_ ? reinterpret_cast<Function>(dlsym(handle_, name)) : nullptr;
        return function ? function(arguments...) : -1;
    }

  private:
    void* handle_;
};

} // namespace

void leave() {
    const Library library;
    while (times < kMost && library.call("nvmlShutdown") == kSuccess)
        times++;
}

void come_back() {
    if (!times)
        return;
    const Library library;
    for (; times; times--)
        library.call("nvmlInit_v2");
    unsigned count = 0;
    library.call("nvmlDeviceGetCount_v2", &count);
    for (unsigned i = 0; i < count; i++) {
        void* device = nullptr; // what is asked for is known again
        library.call("nvmlDeviceGetHandleByIndex_v2", i, &device);
    }
}

} // namespace flowgpu::nvml
