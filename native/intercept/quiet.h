// Calls that change no register but rax, for the rare ways of functions that pass a call on: its
// arguments stay where the driver wants them, so that such a function is two or three lines of code
// and not four (page.h). The library is compiled without a red zone for them.
#ifndef FLOWGPU_INTERCEPT_QUIET_H
#define FLOWGPU_INTERCEPT_QUIET_H

// Gives a name that FG_QUIET has defined the pointer or number `value`, and puts its answer there.
#define FG_QUIETLY(name, value)                                                                    \
    asm volatile("call " #name                                                                     \
                 : "+a"(value)                                                                     \
                 :                                                                                 \
                 : "cc", "memory", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",    \
                   "xmm15")

// Defines `name`, which calls the C function `function`: of one word, which gives one.
#define FG_QUIET(name, function)                                                                   \
    asm(".pushsection .text.unlikely\n"                                                            \
        ".hidden " #name "\n.globl " #name "\n.type " #name ", @function\n" #name                  \
        ":\n.cfi_startproc\n"                                                                      \
        "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset %rbp, -16\n"                               \
        "mov %rsp, %rbp\n.cfi_def_cfa_register %rbp\n"                                             \
        "push %rcx\npush %rdx\npush %rsi\npush %rdi\npush %r8\npush %r9\npush %r10\npush %r11\n"   \
        "sub $128, %rsp\nand $-16, %rsp\n"                                                         \
        "movaps %xmm0, (%rsp)\nmovaps %xmm1, 16(%rsp)\nmovaps %xmm2, 32(%rsp)\n"                   \
        "movaps %xmm3, 48(%rsp)\nmovaps %xmm4, 64(%rsp)\nmovaps %xmm5, 80(%rsp)\n"                 \
        "movaps %xmm6, 96(%rsp)\nmovaps %xmm7, 112(%rsp)\n"                                        \
        "mov %rax, %rdi\ncall " #function "\n"                                                     \
        "movaps (%rsp), %xmm0\nmovaps 16(%rsp), %xmm1\nmovaps 32(%rsp), %xmm2\n"                   \
        "movaps 48(%rsp), %xmm3\nmovaps 64(%rsp), %xmm4\nmovaps 80(%rsp), %xmm5\n"                 \
        "movaps 96(%rsp), %xmm6\nmovaps 112(%rsp), %xmm7\n"                                        \
        "lea -64(%rbp), %rsp\n"                                                                    \
        "pop %r11\npop %r10\npop %r9\npop %r8\npop %rdi\npop %rsi\npop %rdx\npop %rcx\n"           \
        "pop %rbp\n.cfi_def_cfa %rsp, 8\nret\n.cfi_endproc\n"                                      \
        ".size " #name ", . - " #name "\n.popsection\n")

#endif
