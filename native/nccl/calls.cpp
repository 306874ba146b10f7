#include "calls.h"

#include "next_definition.h"

namespace flowgpu::nccl {

namespace {

std::atomic<const void*> library{nullptr}; // a function in it

} // namespace

void seen(const void* function) {
    const void* before = nullptr;
    if (function)
        library.compare_exchange_strong(before, function);
}

bool is_of_nccl(const void* address) {
    Dl_info one, other;
    const void* known = library;
    return known && dladdr(known, &one) && dladdr(address, &other) &&
           one.dli_fbase == other.dli_fbase;
}

void* in_library(const char* name) {
    Dl_info about;
    const void* known = library;
    if (!known || !dladdr(known, &about) || !about.dli_fname)
        return nullptr;
    void* handle = dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return nullptr;
    void* found = next_dlsym()(handle, name);
    dlclose(handle);
    return found;
}

void* current_context() {
    void* context = nullptr;
    return drive("cuCtxGetCurrent", &context) ? context : nullptr;
}

In::In(const How& how) : device_(how.device), before_(current_context()) {
    void* context = how.context;
    retained_ = !context && drive("cuDevicePrimaryCtxRetain", &context, device_);
    good_ = drive("cuCtxSetCurrent", context);
}

In::~In() {
    drive("cuCtxSetCurrent", before_);
    if (retained_)
        drive("cuDevicePrimaryCtxRelease_v2", device_);
}

} // namespace flowgpu::nccl
