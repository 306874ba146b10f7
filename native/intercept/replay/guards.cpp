#include "guards.h"

#include <atomic>

#include <link.h>

#include "arguments.h"
#include "nvml.h"
#include "threads.h"

namespace flowgpu::replay {

namespace {

constexpr unsigned kGuards = 2048;
constexpr unsigned kFunctions = 1024; // of them, the most that are not slots
constexpr unsigned kGuardBytes = 16;
constexpr uintptr_t kMostBytes = 8191; // of a table; what begins with more begins with no size

std::atomic<unsigned> slots_used, functions_used; // these from the end
uintptr_t* slots[kGuards];
uintptr_t originals[kGuards]; // what they held, or the functions
Guarded kinds[kGuards];

} // namespace

// What a guard has of a call, with the layout that its code knows.
struct Call {
    uint32_t number, before; // of the guard; of gate::enter
    uint64_t vectors;        // %al of functions with a variable number of arguments
    uintptr_t arguments[6];
    KnownCurrent known;
};
static_assert(offsetof(Call, before) == 4 && offsetof(Call, arguments) == 16 && sizeof(Call) == 72);

extern "C" {
__attribute__((visibility("hidden"))) extern const uint8_t flowgpu_guards[kGuards * kGuardBytes];

// The function to call.
__attribute__((visibility("hidden"))) uintptr_t flowgpu_guard_begin(Call* call) {
    call->before = gate::enter();
    if (kinds[call->number] != Guarded::slot) {
        nvml::wait_until_back();
        if (kinds[call->number] == Guarded::waits)
            gate::leave(call->before);
        return originals[call->number];
    }
    catch_up(gate::find_record());
    call->known = doubt_current();
    for (uintptr_t& argument : call->arguments)
        argument = reinterpret_cast<uintptr_t>(to_driver(reinterpret_cast<CUcontext>(argument)));
    return originals[call->number];
}

__attribute__((visibility("hidden"))) void flowgpu_guard_end(const Call* call) {
    if (kinds[call->number] == Guarded::slot)
        confirm_current(call->known);
    if (kinds[call->number] != Guarded::waits)
        gate::leave(call->before);
}
}

// Each guard loads its number and goes on to the code that all share. It calls the function with
// the registers that arguments and what a function gives may be in, and with a copy of the 256
// bytes of the stack where further ones may be, which are in use in any thread: what a function
// takes and gives need not be known.
asm(R"(
    .pushsection .text
    .balign 16
    .hidden flowgpu_guards
flowgpu_guards:
    .set number, 0
    .rept 2048
    endbr64
    movl $number, %r11d
    jmp flowgpu_guard
    .balign 16
    .set number, number + 1
    .endr
flowgpu_guard:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $208, %rsp
    movl %r11d, -80(%rbp)
    movq %rax, -72(%rbp)
    movq %rdi, -64(%rbp)
    movq %rsi, -56(%rbp)
    movq %rdx, -48(%rbp)
    movq %rcx, -40(%rbp)
    movq %r8, -32(%rbp)
    movq %r9, -24(%rbp)
    .irp vector, 0, 1, 2, 3, 4, 5, 6, 7
    movaps %xmm\vector, \vector * 16(%rsp)
    .endr
    leaq -80(%rbp), %rdi
    call flowgpu_guard_begin
    movq %rax, %r11
    .irp vector, 0, 1, 2, 3, 4, 5, 6, 7
    movaps \vector * 16(%rsp), %xmm\vector
    .endr
    subq $256, %rsp
    leaq 16(%rbp), %rsi
    movq %rsp, %rdi
    movl $32, %ecx
    rep movsq
    movq -72(%rbp), %rax
    movq -64(%rbp), %rdi
    movq -56(%rbp), %rsi
    movq -48(%rbp), %rdx
    movq -40(%rbp), %rcx
    movq -32(%rbp), %r8
    movq -24(%rbp), %r9
    call *%r11
    movq %rax, -64(%rbp)
    movq %rdx, -56(%rbp)
    movaps %xmm0, -208(%rbp)
    movaps %xmm1, -192(%rbp)
    leaq -80(%rbp), %rdi
    call flowgpu_guard_end
    movq -64(%rbp), %rax
    movq -56(%rbp), %rdx
    movaps -208(%rbp), %xmm0
    movaps -192(%rbp), %xmm1
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .popsection
)");

namespace {

// An object of the process that has a table, and whether it has code at an address.
struct Search {
    uintptr_t table, code;
    bool found;
};

bool is_in(const dl_phdr_info* info, uintptr_t address, ElfW(Word) flags) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) & header = info->dlpi_phdr[i];
        if (header.p_type == PT_LOAD && (header.p_flags & flags) == flags &&
            address - (info->dlpi_addr + header.p_vaddr) < header.p_memsz)
            return true;
    }
    return false;
}

int look(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<Search*>(data);
    if (!is_in(info, search->table, 0))
        return 0;
    search->found = is_in(info, search->code, PF_X);
    return 1;
}

// A slot that leads to us already is not the driver's.
bool is_code_of_driver(const uintptr_t* table, uintptr_t address) {
    Search search = {reinterpret_cast<uintptr_t>(table), address, false};
    dl_iterate_phdr(look, &search);
    return search.found;
}

bool lead(unsigned number) {
    const auto guard = reinterpret_cast<uintptr_t>(flowgpu_guards + number * kGuardBytes);
    uintptr_t* slot = slots[number];
    if (*slot == guard)
        return true;
    originals[number] = *slot;
    return write_slot(slot, guard);
}

} // namespace

bool guard_slots(const void* table) {
    auto* words = static_cast<uintptr_t*>(const_cast<void*>(table));
    if (words[0] > kMostBytes || words[0] % sizeof *words != 0)
        return true;
    for (uintptr_t i = 1; i < words[0] / sizeof *words; i++) {
        if (!is_code_of_driver(words, words[i]))
            continue;
        if (slots_used == kGuards - kFunctions)
            return false;
        slots[slots_used] = words + i;
        if (!lead(slots_used++))
            return false;
    }
    return true;
}

bool guard_slots_again() {
    for (unsigned i = 0; i < slots_used; i++)
        if (!lead(i))
            return false;
    return true;
}

const void* behind_guard(const void* function) {
    const auto at = static_cast<size_t>(static_cast<const uint8_t*>(function) - flowgpu_guards);
    return at < kGuards * kGuardBytes ? reinterpret_cast<const void*>(originals[at / kGuardBytes])
                                      : nullptr;
}

// Two threads at once may make two guards for a function, which do the same.
void* guard_function(void* function, Guarded kind) {
    const auto original = reinterpret_cast<uintptr_t>(function);
    unsigned number = kGuards - functions_used;
    while (number < kGuards && originals[number] != original)
        number++;
    if (number == kGuards) {
        unsigned used = functions_used;
        while (used < kFunctions && !functions_used.compare_exchange_weak(used, used + 1)) {
        }
        if (behind_guard(function) || used >= kFunctions)
            return function;
        number = kGuards - 1 - used;
        kinds[number] = kind;
        originals[number] = original;
    }
    return const_cast<uint8_t*>(flowgpu_guards + number * kGuardBytes);
}

} // namespace flowgpu::replay
