// The exported functions, generated from the table: each passes its call on by its treatment.
#include "driver.h"
#include "exports.h"
#include "gate.h"
#include "handlers.h"

#define FG_EXPORT extern "C" __attribute__((visibility("default"))) CUresult

// Near each other: a call costs the lines and pages of code that it waits for as well (page.h).
#define FG_OFTEN(name) extern "C" __attribute__((hot, visibility("default"))) decltype(name) name;
#include "generated/often.inc"
#undef FG_OFTEN

#define FG_NEXT(name, function)                                                                    \
    (flowgpu::gate::is_watched<flowgpu::I_##name>(guard)                                           \
         ? flowgpu::gate::way_by_watcher<flowgpu::I_##name, &::name>(&::name)                      \
         : function)

#define FG_FORWARD(name, parameters, arguments)                                                    \
    FG_EXPORT name parameters {                                                                    \
        return FG_REAL(name) arguments;                                                            \
    }
#define FG_GATE(name, parameters, arguments)                                                       \
    FG_EXPORT name parameters {                                                                    \
        flowgpu::gate::Guard guard;                                                                \
        return FG_NEXT(name, FG_REAL(name)) arguments;                                             \
    }
#define FG_HANDLE(name, parameters, arguments)                                                     \
    FG_EXPORT name parameters {                                                                    \
        flowgpu::gate::Guard guard;                                                                \
        return FG_NEXT(name, &flowgpu::handle::name) arguments;                                    \
    }
#define FG_REFUSE(name, parameters, arguments)                                                     \
    FG_EXPORT name parameters {                                                                    \
        flowgpu::gate::Guard guard;                                                                \
        CUresult result = FG_REAL(name) arguments;                                                 \
        if (result == CUDA_SUCCESS)                                                                \
            flowgpu::flowgpu_refused_calls[flowgpu::I_##name].fetch_add(                           \
                1, std::memory_order_relaxed);                                                     \
        return result;                                                                             \
    }
#include "generated/api.inc"

// Functions whose prototypes are in headers we do not build with: a jump that keeps every argument
// register. Calls are counted, whatever they answer; the table says which of them a checkpoint
// refuses.
#define FG_PLAIN(symbol, refuse)                                                                   \
    extern "C" __attribute__((naked, visibility("default"))) void symbol() {                       \
        asm("lock incq flowgpu_refused_calls+%c1(%%rip)\n\t"                                       \
            "movq flowgpu_page+%c2(%%rip), %%r11\n\t"                                              \
            "testq %%r11, %%r11\n\t"                                                               \
            "jnz 1f\n\t"                                                                           \
            "pushq %%rdi\n\tpushq %%rsi\n\tpushq %%rdx\n\tpushq %%rcx\n\t"                         \
            "pushq %%r8\n\tpushq %%r9\n\tpushq %%rax\n\t"                                          \
            "movl %0, %%edi\n\t"                                                                   \
            "call flowgpu_resolve\n\t"                                                             \
            "movq %%rax, %%r11\n\t"                                                                \
            "popq %%rax\n\tpopq %%r9\n\tpopq %%r8\n\t"                                             \
            "popq %%rcx\n\tpopq %%rdx\n\tpopq %%rsi\n\tpopq %%rdi\n\t"                             \
            "1: jmp *%%r11"                                                                        \
            :                                                                                      \
            : "i"(flowgpu::I_##symbol), "i"(8 * flowgpu::I_##symbol),                              \
              "i"(offsetof(flowgpu::Page, functions) +                                             \
                  sizeof(flowgpu::Function) * flowgpu::I_##symbol));                               \
    }
#include "generated/plain.inc"
