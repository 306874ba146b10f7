#include "unfit.h"

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flowgpu::exec {

namespace {

#if defined(__x86_64__)
constexpr Elf64_Half kMachine = EM_X86_64;
constexpr const char* kLoader = "ld-linux-x86-64.so.2";
#else
#error "name this machine and its dynamic linker"
#endif

// What is not a dynamic program of the C library that ours are built for.
constexpr const char* kOtherMachine = "it is a program of another machine or word size";
constexpr const char* kOtherLoader = "its dynamic linker is not glibc's";

// Libraries that end the program where another one is loaded before them. ThreadSanitizer's does
// not.
struct Library {
    const char* prefix;
    const char* why;
};
constexpr Library kLibraries[] = {
    {"libasan.so", "it is built with AddressSanitizer"},
    {"libclang_rt.asan", "it is built with AddressSanitizer"},
};

constexpr int kMostScripts = 5;         // as many as the kernel follows
constexpr size_t kMostScriptLine = 256; // as much as the kernel reads
constexpr size_t kMostHeaders = 64;
constexpr size_t kEntries = 32;

bool read_all(int fd, void* to, size_t bytes, uint64_t at) {
    return pread(fd, to, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes);
}

// Text at `at` of the file, cut at `bytes`; empty where there is none.
void read_text(int fd, char* to, size_t bytes, uint64_t at) {
    const ssize_t got = pread(fd, to, bytes - 1, static_cast<off_t>(at));
    to[got > 0 ? got : 0] = '\0';
}

const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

class Program {
  public:
    explicit Program(int fd) : fd_(fd) {}

    const char* unfit() {
        if (!read_all(fd_, &head_, sizeof head_, 0) || memcmp(head_.e_ident, ELFMAG, SELFMAG) != 0)
            return nullptr;
        const bool wide = head_.e_ident[EI_CLASS] == ELFCLASS64;
        if (!wide || head_.e_machine != kMachine)
            return is_static_32() ? nullptr : kOtherMachine;
        count_ = head_.e_phnum < kMostHeaders ? head_.e_phnum : kMostHeaders;
        if (head_.e_phentsize != sizeof *headers_ ||
            !read_all(fd_, headers_, count_ * sizeof *headers_, head_.e_phoff))
            return nullptr;
        const Elf64_Phdr* loader = header(PT_INTERP);
        if (!loader)
            return nullptr; // it is static: nothing is loaded into it
        char end[64];       // of its path: only the name counts
        const uint64_t bytes = loader->p_filesz < sizeof end ? loader->p_filesz : sizeof end - 1;
        read_text(fd_, end, bytes + 1, loader->p_offset + loader->p_filesz - bytes);
        if (strcmp(base_name(end), kLoader) != 0)
            return kOtherLoader;
        return needed();
    }

  private:
    // One of this machine's older kind. It starts others, which get our variables from it.
    bool is_static_32() const {
        Elf32_Ehdr head;
        memcpy(&head, &head_, sizeof head);
        if (head_.e_ident[EI_CLASS] != ELFCLASS32 || head.e_machine != EM_386)
            return false;
        Elf32_Phdr one;
        for (unsigned n = 0; n < head.e_phnum && n < kMostHeaders; n++)
            if (!read_all(fd_, &one, sizeof one, head.e_phoff + n * sizeof one) ||
                one.p_type == PT_INTERP)
                return false;
        return true;
    }

    const Elf64_Phdr* header(Elf64_Word type) const {
        for (size_t n = 0; n < count_; n++)
            if (headers_[n].p_type == type)
                return &headers_[n];
        return nullptr;
    }

    // Where in the file that is which is loaded at `address`; 0 if nowhere.
    uint64_t offset_of(uint64_t address) const {
        for (size_t n = 0; n < count_; n++) {
            const Elf64_Phdr& one = headers_[n];
            if (one.p_type == PT_LOAD && address - one.p_vaddr < one.p_filesz)
                return one.p_offset + (address - one.p_vaddr);
        }
        return 0;
    }

    // Calls `visit` with every entry of the dynamic section until that gives something.
    template <typename Visit> const char* each_entry(Visit visit) const {
        const Elf64_Phdr* dynamic = header(PT_DYNAMIC);
        Elf64_Dyn entries[kEntries];
        const uint64_t count = dynamic ? dynamic->p_filesz / sizeof *entries : 0;
        for (uint64_t at = 0; at < count; at += kEntries) {
            const uint64_t here = count - at < kEntries ? count - at : kEntries;
            if (!read_all(fd_, entries, here * sizeof *entries,
                          dynamic->p_offset + at * sizeof *entries))
                return nullptr;
            for (uint64_t n = 0; n < here && entries[n].d_tag != DT_NULL; n++)
                if (const char* found = visit(entries[n]))
                    return found;
        }
        return nullptr;
    }

    const char* needed() const {
        uint64_t strings = 0;
        each_entry([&](const Elf64_Dyn& entry) -> const char* {
            if (entry.d_tag == DT_STRTAB)
                strings = offset_of(entry.d_un.d_ptr);
            return nullptr;
        });
        if (!strings)
            return nullptr;
        return each_entry([&](const Elf64_Dyn& entry) -> const char* {
            if (entry.d_tag != DT_NEEDED)
                return nullptr;
            char name[256];
            read_text(fd_, name, sizeof name, strings + entry.d_un.d_val);
            for (const Library& library : kLibraries)
                if (strncmp(base_name(name), library.prefix, strlen(library.prefix)) == 0)
                    return library.why;
            return nullptr;
        });
    }

    const int fd_;
    Elf64_Ehdr head_ = {};
    Elf64_Phdr headers_[kMostHeaders];
    size_t count_ = 0;
};

// The program as which a script runs; null if the file is no script.
const char* script_program(int fd, char (&line)[kMostScriptLine]) {
    read_text(fd, line, sizeof line, 0);
    if (line[0] != '#' || line[1] != '!')
        return nullptr;
    char* begin = line + 2 + strspn(line + 2, " \t");
    begin[strcspn(begin, " \t\n")] = '\0';
    return begin;
}

// A program's file; what is no regular file is not opened, which could have an effect.
int open_program(int folder, const char* path) {
    struct stat found;
    if (fstatat(folder, path, &found, 0) != 0 || !S_ISREG(found.st_mode))
        return -1;
    return openat(folder, path, O_RDONLY | O_CLOEXEC);
}

const char* unfit_after(int fd, int scripts) {
    char line[kMostScriptLine];
    const char* path = script_program(fd, line);
    if (!path)
        return Program(fd).unfit();
    const int program = scripts < kMostScripts ? open_program(AT_FDCWD, path) : -1;
    if (program < 0)
        return nullptr;
    const char* why = unfit_after(program, scripts + 1);
    close(program);
    return why;
}

} // namespace

const char* unfit(int fd) {
    return unfit_after(fd, 0);
}

const char* unfit_at(int folder, const char* path) {
    const int fd = open_program(folder, path);
    if (fd < 0)
        return nullptr;
    const char* why = unfit(fd);
    close(fd);
    return why;
}

const char* unfit_in_path(const char* file) {
    if (strchr(file, '/'))
        return unfit_at(AT_FDCWD, file);
    const char* folders = getenv("PATH");
    if (!folders)
        folders = "/bin:/usr/bin";
    const size_t length = strlen(file);
    char path[PATH_MAX];
    for (const char* at = folders;; at++) {
        const size_t folder = strcspn(at, ":");
        if (folder + 1 + length < sizeof path) {
            memcpy(path, at, folder);
            path[folder] = '/';
            // An empty name in PATH is the working folder.
            memcpy(path + folder + (folder > 0), file, length + 1);
            if (faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) == 0)
                return unfit_at(AT_FDCWD, path);
        }
        at += folder;
        if (!*at)
            return nullptr;
    }
}

} // namespace flowgpu::exec
