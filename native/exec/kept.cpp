#include "kept.h"

#include <cerrno>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include "addresses.h"

extern char** environ;

namespace flowgpu::exec {

namespace {

// Those of flowgpu/launch.py (OURS). The first one names the job.
constexpr const char* kNames[] = {"FLOWGPU_SOCKET",  "FLOWGPU_REAL_LIBCUDA", "FLOWGPU_REPLAY",
                                  "FLOWGPU_UNTRIED", "FLOWGPU_EMU_SOCKET",   "FLOWGPU_EMUD"};
constexpr size_t kVariables = sizeof kNames / sizeof *kNames;
constexpr const char* kPreload = "LD_PRELOAD";
constexpr size_t kPreloadBytes = 11; // with its =
constexpr const char* kSeparators = ": ";
constexpr size_t kMostLibraries = 8;
constexpr const char* kExport = "export ";
constexpr const char* kEnd = "; ";
constexpr size_t kQuoted = 4; // bytes of a quote in quotes
// What may be added to an environment: those, the addresses, LD_PRELOAD, and the null at its end.
constexpr size_t kMostAdded = kVariables + 3;

struct Kept {
    char text[32 << 10]; // holds all the others
    size_t used;
    const char* folder;                // of our libraries, with its slash
    const char* variables[kVariables]; // NAME=value; null: the job has none
    const char* libraries[kMostLibraries];
    size_t library_count;
    size_t library_bytes; // with a separator each
    bool is_whole;
};
Kept kept;

// The value of `entry` if that is NAME=value.
const char* value_of(const char* entry, const char* name) {
    const size_t length = strlen(name);
    return strncmp(entry, name, length) == 0 && entry[length] == '=' ? entry + length + 1 : nullptr;
}

// The last one counts, as for the dynamic linker.
const char* find(char* const* environment, const char* name) {
    const char* found = nullptr;
    for (; environment && *environment; environment++)
        if (const char* value = value_of(*environment, name))
            found = value;
    return found;
}

const char* keep_text(const char* text, size_t length) {
    if (length >= sizeof kept.text - kept.used) {
        kept.is_whole = false;
        return "";
    }
    char* to = kept.text + kept.used;
    memcpy(to, text, length);
    to[length] = '\0';
    kept.used += length + 1;
    return to;
}

// Calls `visit` with each library that a value of LD_PRELOAD names.
template <typename Visit> void each_library(const char* value, Visit visit) {
    while (*value) {
        const size_t length = strcspn(value, kSeparators);
        if (length)
            visit(value, length);
        value += length;
        value += strspn(value, kSeparators);
    }
}

bool is_ours(const char* library) {
    return strncmp(library, kept.folder, strlen(kept.folder)) == 0;
}

bool names(const char* value, const char* library) {
    bool found = false;
    each_library(value, [&](const char* one, size_t length) {
        found = found || (strlen(library) == length && memcmp(one, library, length) == 0);
    });
    return found;
}

// Not those of a process in another root folder or with another user's rights. The dynamic linker
// would say so in the program's output.
bool can_be_loaded() {
    for (size_t n = 0; n < kept.library_count; n++)
        if (faccessat(AT_FDCWD, kept.libraries[n], R_OK, AT_EACCESS) != 0)
            return false;
    return true;
}

char* append(char* to, const char* text, size_t length) {
    memcpy(to, text, length);
    return to + length;
}

char* append(char* to, const char* text) {
    return append(to, text, strlen(text));
}

} // namespace

void keep() {
    if (const char* addresses = find(environ, kAddresses))
        take_addresses(addresses);
    Dl_info own;
    const char* socket = find(environ, kNames[0]);
    const char* preloads = find(environ, kPreload);
    if (!socket || !*socket || !preloads || !dladdr(&kept, &own))
        return;
    const char* slash = strrchr(own.dli_fname, '/');
    if (!slash)
        return;
    kept.is_whole = true;
    kept.folder = keep_text(own.dli_fname, static_cast<size_t>(slash + 1 - own.dli_fname));
    for (size_t n = 0; n < kVariables; n++)
        for (char** entry = environ; *entry; entry++)
            if (value_of(*entry, kNames[n]))
                kept.variables[n] = keep_text(*entry, strlen(*entry));
    each_library(preloads, [](const char* library, size_t length) {
        if (!is_ours(library) || kept.library_count == kMostLibraries)
            return;
        kept.libraries[kept.library_count++] = keep_text(library, length);
        kept.library_bytes += length + 1;
    });
}

Environment::Environment(char* const* theirs, const char* unfit) : theirs_(theirs) {
    if (!kept.is_whole || !kept.library_count)
        return;
    const char* socket = find(theirs, kNames[0]);
    if (socket && strcmp(socket, value_of(kept.variables[0], kNames[0])) != 0)
        return;
    const int error = errno;
    const char* preloads = find(theirs, kPreload);
    preloads_ = preloads ? preloads : "";
    with_ours_ = !unfit && can_be_loaded();
    errno = error;
    bool changes = with_ours_ && lacks_variables();
    for (size_t n = 0; n < kept.library_count; n++)
        changes = changes || names(preloads_, kept.libraries[n]) != with_ours_;
    if (!changes)
        return;
    while (theirs && theirs[count_])
        count_++;
    const size_t pointers = count_ + kMostAdded;
    bytes_ = pointers * sizeof(char*) + kPreloadBytes + strlen(preloads_) + 1 + kept.library_bytes;
}

bool Environment::lacks_variables() const {
    for (size_t n = 0; n < kVariables; n++)
        if (kept.variables[n] && !find(theirs_, kNames[n]))
            return true;
    const char* ours = addresses_variable();
    const char* theirs = ours ? find(theirs_, kAddresses) : nullptr;
    return ours && (!theirs || strcmp(value_of(ours, kAddresses), theirs) != 0);
}

char* Environment::write_preloads(char* to) const {
    const char* begin = to;
    const auto add = [&](const char* library, size_t length) {
        if (to != begin)
            *to++ = ':';
        to = append(to, library, length);
    };
    each_library(preloads_, [&](const char* library, size_t length) {
        if (!is_ours(library))
            add(library, length);
    });
    for (size_t n = 0; with_ours_ && n < kept.library_count; n++)
        add(kept.libraries[n], strlen(kept.libraries[n]));
    *to = '\0';
    return to;
}

char** Environment::write(void* memory) const {
    auto** environment = static_cast<char**>(memory);
    const char* addresses = with_ours_ ? addresses_variable() : nullptr;
    size_t count = 0;
    for (size_t n = 0; n < count_; n++)
        if (!value_of(theirs_[n], kPreload) && !(addresses && value_of(theirs_[n], kAddresses)))
            environment[count++] = theirs_[n];
    for (size_t n = 0; with_ours_ && n < kVariables; n++)
        if (kept.variables[n] && !find(theirs_, kNames[n]))
            environment[count++] = const_cast<char*>(kept.variables[n]);
    if (addresses)
        environment[count++] = const_cast<char*>(addresses);
    auto* entry = reinterpret_cast<char*>(environment + count_ + kMostAdded);
    char* value = append(append(entry, kPreload), "=");
    if (write_preloads(value) != value)
        environment[count++] = entry;
    environment[count] = nullptr;
    return environment;
}

size_t Environment::most_command_bytes() const {
    const char* addresses = addresses_variable();
    const size_t text = kept.used + (addresses ? strlen(addresses) : 0);
    return kQuoted * (bytes_ + text) + kMostAdded * (strlen(kExport) + strlen(kEnd) + 2);
}

char* Environment::write_commands(char* to, char* const* environment) const {
    for (; *environment; environment++) {
        bool is_new = value_of(*environment, kPreload) || *environment == addresses_variable();
        for (const char* variable : kept.variables)
            is_new = is_new || *environment == variable;
        if (!is_new)
            continue;
        const char* value = strchr(*environment, '=') + 1;
        to = append(append(to, kExport), *environment, static_cast<size_t>(value - *environment));
        to = append(write_quoted(to, value), kEnd);
    }
    return to;
}

char* write_quoted(char* to, const char* text) {
    *to++ = '\'';
    for (; *text; text++)
        to = *text == '\'' ? append(to, "'\\''") : append(to, text, 1);
    *to++ = '\'';
    return to;
}

size_t most_quoted(const char* text) {
    return kQuoted * strlen(text) + 2;
}

} // namespace flowgpu::exec
