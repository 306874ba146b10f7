// Functions of the C library that start programs. Its own ones call each other past the dynamic
// linker, so each is here, and goes on to the few that take an environment.
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <alloca.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kept.h"
#include "next.h"
#include "unfit.h"

extern char** environ;

namespace flowgpu::exec {

namespace {

using Strings = char* const*;
using Actions = const posix_spawn_file_actions_t*;
using Attributes = const posix_spawnattr_t*;
using Spawn = int (*)(int*, const char*, Actions, Attributes, Strings, Strings);

struct Functions {
    int (*execve)(const char*, Strings, Strings);
    int (*execvpe)(const char*, Strings, Strings);
    int (*fexecve)(int, Strings, Strings);
    Spawn posix_spawn, posix_spawnp;
    int (*system)(const char*);
    FILE* (*popen)(const char*, const char*);
};

void find(Functions& found) {
    look_up(found.execve, "execve");
    look_up(found.execvpe, "execvpe");
    look_up(found.fexecve, "fexecve");
    look_up(found.posix_spawn, "posix_spawn");
    look_up(found.posix_spawnp, "posix_spawnp");
    look_up(found.system, "system");
    look_up(found.popen, "popen");
    keep();
}

Next<Functions, find> next;

__attribute__((constructor)) void begin() {
    next.begin();
}

Spawn next_of(const char* name) {
    next();
    Spawn function;
    look_up(function, name);
    return function;
}

// What is larger is mapped. Between vfork and exec the parent keeps such a mapping.
constexpr size_t kMostStack = 32 << 10;

class Mapped {
  public:
    explicit Mapped(size_t bytes) : bytes_(bytes) {
        const int error = errno;
        void* got =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = got == MAP_FAILED ? nullptr : got;
        errno = error;
    }
    ~Mapped() {
        const int error = errno;
        if (memory)
            munmap(memory, bytes_);
        errno = error;
    }
    Mapped(const Mapped&) = delete;

    void* memory;

  private:
    const size_t bytes_;
};

bool is_too_big(int result) {
    return result == E2BIG || (result == -1 && errno == E2BIG);
}

// Calls `start` with the environment that the program is to have.
template <typename Start> int hand_on(Strings theirs, const char* unfit, Start start) {
    const Environment environment(theirs, unfit);
    const size_t bytes = environment.bytes();
    if (!bytes)
        return start(theirs);
    int result;
    if (bytes <= kMostStack) {
        result = start(environment.write(alloca(bytes)));
    } else {
        const Mapped mapped(bytes);
        if (!mapped.memory)
            return start(theirs);
        result = start(environment.write(mapped.memory));
    }
    // It might fit without ours.
    return is_too_big(result) ? start(theirs) : result;
}

// `why` of a program, with errno as it was.
template <typename Look> const char* looked(Look look) {
    const int error = errno;
    const char* why = look();
    errno = error;
    return why;
}

int execute(const char* path, Strings arguments, Strings environment) {
    const Functions& go = next();
    const char* why = looked([&] { return path ? unfit_at(AT_FDCWD, path) : nullptr; });
    return hand_on(environment, why,
                   [&](Strings handed) { return go.execve(path, arguments, handed); });
}

int execute_in_path(const char* file, Strings arguments, Strings environment) {
    const Functions& go = next();
    const char* why = looked([&] { return file ? unfit_in_path(file) : nullptr; });
    return hand_on(environment, why,
                   [&](Strings handed) { return go.execvpe(file, arguments, handed); });
}

int spawn(Spawn start, int* pid, const char* why, const char* path, Actions actions,
          Attributes attributes, Strings arguments, Strings environment) {
    if (!start)
        return ENOSYS;
    return hand_on(environment, why, [&](Strings handed) {
        return start(pid, path, actions, attributes, arguments, handed);
    });
}

// system and popen take no environment. Where that of the process lacks ours, the shell gives it to
// another shell, which does what the first one was to do.
template <typename Result, typename Start> Result in_shell(const char* command, Start start) {
    constexpr const char* kShell = "exec /bin/sh -c -- ";
    const char* why = looked([] { return unfit_at(AT_FDCWD, "/bin/sh"); });
    const Environment environment(environ, why);
    const size_t bytes = environment.bytes();
    if (!bytes || why || !command)
        return start(command);
    const Mapped array(bytes);
    const Mapped text(environment.most_command_bytes() + strlen(kShell) + most_quoted(command) +
                      sizeof " sh");
    if (!array.memory || !text.memory)
        return start(command);
    auto* begin = static_cast<char*>(text.memory);
    char* end = environment.write_commands(begin, environment.write(array.memory));
    end = write_quoted(stpcpy(end, kShell), command);
    end = stpcpy(end, " sh");                      // what it calls itself
    constexpr ptrdiff_t kMostArgument = 32 * 4096; // MAX_ARG_STRLEN of the kernel
    return start(end - begin < kMostArgument ? begin : command);
}

} // namespace

} // namespace flowgpu::exec

using namespace flowgpu::exec;

// For the coordinator, which starts the first program of a job.
FGE_EXPORT const char* flowgpu_exec_unfit(const char* path) {
    return unfit_at(AT_FDCWD, path);
}

FGE_EXPORT int execve(const char* path, Strings arguments, Strings environment) noexcept {
    return execute(path, arguments, environment);
}

FGE_EXPORT int execv(const char* path, Strings arguments) noexcept {
    return execute(path, arguments, environ);
}

FGE_EXPORT int execvpe(const char* file, Strings arguments, Strings environment) noexcept {
    return execute_in_path(file, arguments, environment);
}

FGE_EXPORT int execvp(const char* file, Strings arguments) noexcept {
    return execute_in_path(file, arguments, environ);
}

FGE_EXPORT int fexecve(int fd, Strings arguments, Strings environment) noexcept {
    const Functions& go = next();
    // It may have been opened for execution only.
    char path[sizeof "/proc/self/fd/" + 3 * sizeof fd];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const char* why = looked([&] { return unfit_at(AT_FDCWD, path); });
    return hand_on(environment, why,
                   [&](Strings handed) { return go.fexecve(fd, arguments, handed); });
}

FGE_EXPORT int execveat(int folder, const char* path, Strings arguments, Strings environment,
                        int flags) noexcept {
    next();
    const char* why = looked([&]() -> const char* {
        if (*path || !(flags & AT_EMPTY_PATH))
            return unfit_at(folder, path);
        return unfit(folder);
    });
    // glibc has it from 2.34 on.
    return hand_on(environment, why, [&](Strings handed) {
        return static_cast<int>(syscall(SYS_execveat, folder, path, arguments, handed, flags));
    });
}

// The arguments of a variadic one, behind its first, with the null that ends them.
#define FGE_ARGUMENTS(first, list, arguments)                                                      \
    size_t count = 1;                                                                              \
    va_start(list, first);                                                                         \
    while (va_arg(list, const char*))                                                              \
        count++;                                                                                   \
    va_end(list);                                                                                  \
    auto** arguments = static_cast<char**>(alloca((count + 1) * sizeof(char*)));                   \
    va_start(list, first);                                                                         \
    arguments[0] = const_cast<char*>(first);                                                       \
    for (size_t n = 1; n <= count; n++)                                                            \
    arguments[n] = va_arg(list, char*)

FGE_EXPORT int execl(const char* path, const char* first, ...) noexcept {
    va_list list;
    FGE_ARGUMENTS(first, list, arguments);
    va_end(list);
    return execute(path, arguments, environ);
}

FGE_EXPORT int execlp(const char* file, const char* first, ...) noexcept {
    va_list list;
    FGE_ARGUMENTS(first, list, arguments);
    va_end(list);
    return execute_in_path(file, arguments, environ);
}

FGE_EXPORT int execle(const char* path, const char* first, ...) noexcept {
    va_list list;
    FGE_ARGUMENTS(first, list, arguments);
    const Strings environment = va_arg(list, char**);
    va_end(list);
    return execute(path, arguments, environment);
}

#define FGE_SPAWN(name, start, look)                                                               \
    FGE_EXPORT int name(int* pid, const char* path, Actions actions, Attributes attributes,        \
                        Strings arguments, Strings environment) {                                  \
        const Spawn go = start;                                                                    \
        const char* why = looked([&] { return look; });                                            \
        return spawn(go, pid, why, path, actions, attributes, arguments, environment);             \
    }

FGE_SPAWN(posix_spawn, next().posix_spawn, unfit_at(AT_FDCWD, path))
FGE_SPAWN(posix_spawnp, next().posix_spawnp, unfit_in_path(path))
// glibc has these from 2.39 on. Those that are missing would leave dlerror something to tell.
FGE_SPAWN(pidfd_spawn, next_of("pidfd_spawn"), unfit_at(AT_FDCWD, path))
FGE_SPAWN(pidfd_spawnp, next_of("pidfd_spawnp"), unfit_in_path(path))

FGE_EXPORT int system(const char* command) {
    const Functions& go = next();
    return in_shell<int>(command, go.system);
}

FGE_EXPORT FILE* popen(const char* command, const char* mode) {
    const Functions& go = next();
    return in_shell<FILE*>(command, [&](const char* words) { return go.popen(words, mode); });
}
