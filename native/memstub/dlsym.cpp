// dlsym: who looks a function of NCCL's, NVML's or CUPTI's up in a library is given ours for it.
// All else goes on to the next dlsym by a jump, so that it sees its caller, on which RTLD_NEXT and
// RTLD_DEFAULT depend.
#include <atomic>
#include <cerrno>

#include <dlfcn.h>

#include "memstub.h"

#if !defined(__x86_64__)
#error "the jump is written for x86-64"
#endif

namespace flowgpu::memstub {

namespace {

void* nothing(void*, const char*) {
    return nullptr;
}

void* itself(void* found, const char*) {
    return found;
}

// What another preloaded library has instead of a function: of NVML's, which waits at the gate, or
// of NCCL's, which is counted.
template <char> void* instead(void* found, const char* name, const char* asked) {
    static std::atomic<Dlsym> known{nullptr};
    Dlsym other = known.load(std::memory_order_relaxed);
    if (!other) {
        other = reinterpret_cast<Dlsym>(next_dlsym()(RTLD_DEFAULT, asked));
        known.store(other ? other : itself, std::memory_order_relaxed);
    }
    return other ? other(found, name) : found;
}

} // namespace

} // namespace flowgpu::memstub

#define FGM_HIDDEN __attribute__((visibility("hidden"), used))

extern "C" {

FGM_HIDDEN flowgpu::Dlsym flowgpu_next_dlsym = nullptr;

// Asked for when it is first needed, which may be before any of our code was to run.
FGM_HIDDEN flowgpu::Dlsym flowgpu_find_dlsym() {
    using namespace flowgpu::memstub;
    const int error = errno;
    void* found = nullptr;
    // As of glibc 2.34 it is in libc, under a new version beside the old one.
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.2.5"})
        if (!found)
            found = dlvsym(RTLD_NEXT, "dlsym", version);
    const auto next = found ? reinterpret_cast<flowgpu::Dlsym>(found) : nothing;
    __atomic_store_n(&flowgpu_next_dlsym, next, __ATOMIC_RELAXED);
    errno = error;
    return next;
}

FGM_HIDDEN void* flowgpu_dlsym_of_ours(void* library, const char* name) {
    void* found = flowgpu::next_dlsym()(library, name);
    if (!found)
        return nullptr;
    using namespace flowgpu::memstub;
    return name[0] == 'c'   ? ours_of_cupti(name, found)
           : name[1] == 'c' ? instead<'c'>(found, name, "flowgpu_nccl_instead")
                            : instead<'v'>(found, name, "flowgpu_nvml_guard");
}
}

flowgpu::Dlsym flowgpu::next_dlsym() {
    const Dlsym known = __atomic_load_n(&flowgpu_next_dlsym, __ATOMIC_RELAXED);
    return known ? known : flowgpu_find_dlsym();
}

asm(R"(
    .text
    .p2align 4
    .globl dlsym
    .type dlsym, @function
dlsym:
    .cfi_startproc
    endbr64
    # RTLD_DEFAULT is 0, RTLD_NEXT is -1; there ours are found already, or are not wanted.
    leaq 1(%rdi), %rax
    cmpq $1, %rax
    jbe 1f
    testq %rsi, %rsi
    je 1f
    cmpb $'n', (%rsi)
    jne 5f
    cmpb $'c', 1(%rsi)
    jne 3f
    cmpb $'c', 2(%rsi)
    jne 1f
    jmp 4f
3:  cmpb $'v', 1(%rsi)
    jne 1f
    cmpb $'m', 2(%rsi)
    jne 1f
4:  cmpb $'l', 3(%rsi)
    je flowgpu_dlsym_of_ours
    jmp 1f
5:  cmpb $'c', (%rsi)
    jne 1f
    cmpb $'u', 1(%rsi)
    jne 1f
    cmpb $'p', 2(%rsi)
    jne 1f
    cmpb $'t', 3(%rsi)
    je flowgpu_dlsym_of_ours
1:  movq flowgpu_next_dlsym(%rip), %rax
    testq %rax, %rax
    je 2f
    jmp *%rax
2:  pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    call flowgpu_find_dlsym
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    jmp *%rax
    .cfi_endproc
    .size dlsym, . - dlsym
)");
