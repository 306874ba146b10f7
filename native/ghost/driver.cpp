#include "driver.h"

#include <atomic>
#include <dlfcn.h>
#include <mutex>

namespace fgg {
namespace {

std::mutex lock;
std::string loaded_path;
Driver table;
std::atomic<bool> loaded{false};

} // namespace

void load_driver(const char* path) {
    std::lock_guard<std::mutex> guard(lock);
    if (loaded) {
        if (loaded_path != path)
            throw MoverFailure(FGG_ARGUMENT, "the driver is already " + loaded_path);
        return;
    }
    // Never closed: the driver has threads of its own and the caller's contexts live in it.
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        throw MoverFailure(FGG_SYSTEM, dlerror());
    Driver found;
#define X(name)                                                                                    \
    found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name));                    \
    if (!found.name)                                                                               \
        throw MoverFailure(FGG_SYSTEM, std::string(path) + " has no function " #name);
    FGG_DRIVER_FUNCTIONS(X)
#undef X
    table = found;
    loaded_path = path;
    loaded = true;
}

const Driver& driver() {
    if (!loaded)
        throw MoverFailure(FGG_ARGUMENT, "no driver: call fgg_init first");
    return table;
}

void check(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS)
        return;
    const char* name = nullptr;
    if (table.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "unknown error";
    throw MoverFailure(FGG_DRIVER, std::string(call) + " failed: " + name + " (" +
                                       std::to_string(static_cast<int>(result)) + ")");
}

} // namespace fgg
