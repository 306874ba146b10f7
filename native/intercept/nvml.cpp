#include "nvml.h"

#include <atomic>
#include <climits>
#include <cstring>
#include <map>
#include <string>

#include <dlfcn.h>
#include <link.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "library.h"
#include "replay/guards.h"

namespace flowgpu::nvml {

namespace {

constexpr const char* kLibrary = "libnvidia-ml.so.1";
constexpr int kSuccess = 0;
constexpr unsigned kMost = 1 << 20; // a library that never says that it is down is left alone

unsigned times = 0;             // that it was initialised before leave()
std::atomic<uint32_t> away = 0; // since; also the futex word

// The library, if the program has loaded it. One thread of ours at a time calls it.
class Library {
  public:
    Library() : handle_(dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) {}
    ~Library() {
        if (handle_)
            dlclose(handle_);
    }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    explicit operator bool() const { return handle_ != nullptr; }
    void* function(const char* name) const { return handle_ ? dlsym(handle_, name) : nullptr; }
    // Past the guard that dlsym gives, where the program's threads wait for this one.
    template <class... Arguments> int call(const char* name, Arguments... arguments) const {
        using Function = int (*)(Arguments...);
        const void* found = function(name);
        if (const void* real = replay::behind_guard(found))
            found = real;
        return found ? reinterpret_cast<Function>(const_cast<void*>(found))(arguments...) : -1;
    }

  private:
    void* handle_;
};

// Calls visit(text) for each of a library's names of a kind: DT_SONAME, DT_NEEDED.
template <class Visit> void each_name(const link_map& library, ElfW(Sxword) kind, Visit visit) {
    const char* texts = nullptr;
    for (const ElfW(Dyn)* d = library.l_ld; d && d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_STRTAB) // the loader has added the base, where it may write
            texts = reinterpret_cast<const char*>(
                d->d_un.d_ptr < library.l_addr ? library.l_addr + d->d_un.d_ptr : d->d_un.d_ptr);
    for (const ElfW(Dyn)* d = library.l_ld; texts && d->d_tag != DT_NULL; d++)
        if (d->d_tag == kind)
            visit(texts + d->d_un.d_val);
}

bool has_name(const link_map& library, ElfW(Sxword) kind) {
    bool found = false;
    each_name(library, kind, [&](const char* text) { found |= strcmp(text, kLibrary) == 0; });
    return found;
}

// Calls visit(name, slot, type) for each slot of a library's that is linked with NVML.
template <class Visit> void each_slot(Visit visit) {
    const auto look = [](dl_phdr_info* info, size_t, void* data) {
        link_map one = {};
        one.l_addr = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; i++)
            if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
                one.l_ld = reinterpret_cast<ElfW(Dyn)*>(one.l_addr + info->dlpi_phdr[i].p_vaddr);
        if (one.l_ld && has_name(one, DT_NEEDED))
            rewind::each_import(one.l_addr, one.l_ld,
                                [&](const char* name, void** slot, auto type) {
                                    if (strncmp(name, "nvml", 4) == 0)
                                        (*static_cast<Visit*>(data))(name, slot, type);
                                });
        return 0;
    };
    dl_iterate_phdr(look, &visit);
}

} // namespace

// What dlsym is to give for a function that it has found by a name as NVML's.
extern "C" __attribute__((visibility("default"))) void* flowgpu_nvml_guard(void* found,
                                                                           const char* name) {
    Dl_info info;
    link_map* library = nullptr;
    if (!dladdr1(found, &info, reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP) || !library ||
        !has_name(*library, DT_SONAME))
        return found;
    const char* sleeps = "nvmlEventSetWait"; // for as long as its caller likes
    const bool waits = strncmp(name, sleeps, strlen(sleeps)) == 0;
    return replay::guard_function(found,
                                  waits ? replay::Guarded::waits : replay::Guarded::function);
}

void lead_to_guards() {
    const Library nvml;
    if (!nvml)
        return;
    // The loader is not asked for a function while it goes through its libraries.
    std::map<std::string, void*> guards;
    each_slot([&](const char* name, void**, auto) { guards[name] = nullptr; });
    for (auto& [name, guard] : guards)
        guard = nvml.function(name.c_str());
    each_slot([&](const char* name, void** slot, auto type) {
        const auto found = guards.find(name);
        const void* real = found == guards.end() ? nullptr : replay::behind_guard(found->second);
        // What is no slot of the loader's alone may be another function by now.
        if (real && !replay::behind_guard(*slot) && (type != R_X86_64_64 || *slot == real))
            replay::write_slot(reinterpret_cast<uintptr_t*>(slot),
                               reinterpret_cast<uintptr_t>(found->second));
    });
}

void leave() {
    const Library library;
    while (times < kMost && library.call("nvmlShutdown") == kSuccess)
        times++;
    away = times != 0;
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
    away = 0;
    syscall(SYS_futex, &away, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void wait_until_back() {
    while (away)
        syscall(SYS_futex, &away, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
}

} // namespace flowgpu::nvml
