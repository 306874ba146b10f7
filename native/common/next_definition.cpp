#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <link.h>

#include "next_definition.h"

namespace flowgpu {

namespace {

// Names of the loaded objects, one behind another, each with its end.
struct Names {
    char* text = nullptr;
    size_t used = 0;
};

int collect(dl_phdr_info* info, size_t, void* to) {
    auto* names = static_cast<Names*>(to);
    size_t bytes = strlen(info->dlpi_name) + 1;
    auto* text = static_cast<char*>(realloc(names->text, names->used + bytes));
    if (!text)
        return 1;
    memcpy(text + names->used, info->dlpi_name, bytes);
    names->text = text;
    names->used += bytes;
    return 0;
}

} // namespace

// RTLD_NEXT looks in the global scope only. Python opens extension modules without RTLD_GLOBAL, so
// a framework's libraries are usually not in it: then each loaded object is asked. Not from inside
// dl_iterate_phdr, which holds a lock that dlopen takes after another one.
void* next_definition(const char* symbol, const void* ours) {
    int error = errno;
    void* found = next_dlsym()(RTLD_NEXT, symbol);
    Names names;
    if (!found)
        dl_iterate_phdr(collect, &names);
    for (size_t at = 0; !found && at < names.used; at += strlen(names.text + at) + 1) {
        const char* name = names.text + at;
        void* library = *name ? dlopen(name, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
        if (!library)
            continue;
        found = next_dlsym()(library, symbol);
        if (found == ours)
            found = nullptr;
        dlclose(library);
    }
    free(names.text);
    errno = error;
    return found;
}

} // namespace flowgpu
