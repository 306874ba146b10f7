// What a program of the job is started with so that it works through FlowGPU, and how a program
// that this one starts gets it too.
//
// Rules: those of native/intercept/driver.h for code in someone else's process, and one more. All
// but `keep` may run between vfork and exec: it allocates nothing, takes no lock, changes no
// variable that the parent shares, and keeps errno. An exec that works without us works with us.
#ifndef FLOWGPU_EXEC_KEPT_H
#define FLOWGPU_EXEC_KEPT_H

#include <cstddef>

namespace flowgpu::exec {

// Copies what flowgpu/launch.py has put into the environment, before the program can change that.
void keep();

// The environment of a program that is about to start: the given one, with what is missing added,
// or with our libraries taken out where the program cannot take them. One that names another job,
// or an empty FLOWGPU_SOCKET, is left as it is.
class Environment {
  public:
    // `unfit`: why the program cannot take them, or null.
    Environment(char* const* theirs, const char* unfit);

    // How much memory `write` needs; 0 if nothing changes.
    size_t bytes() const { return bytes_; }
    char** write(void* memory) const;

    // Commands that give what is new in it to a shell and to what that starts. `environment` is
    // what `write` has made. Returns their end.
    size_t most_command_bytes() const;
    char* write_commands(char* to, char* const* environment) const;

  private:
    bool lacks_variables() const;
    char* write_preloads(char* to) const;

    char* const* theirs_;
    const char* preloads_ = ""; // the given value of LD_PRELOAD
    size_t count_ = 0;          // of the given variables
    size_t bytes_ = 0;
    bool with_ours_ = false;
};

// `text` as one word of a shell, of at most `most_quoted(text)` bytes; returns its end.
char* write_quoted(char* to, const char* text);
size_t most_quoted(const char* text);

} // namespace flowgpu::exec

#endif
