#include "guards.h"

#include <link.h>

#include "handles.h"

namespace flowgpu::replay {

namespace {

constexpr unsigned kGuards = 1024;
constexpr unsigned kGuardBytes = 16;
constexpr uintptr_t kMostBytes = 8191; // of a table; what begins with more begins with no size

unsigned used;
uintptr_t* slots[kGuards];

} // namespace

extern "C" {
__attribute__((visibility("hidden"))) extern const uint8_t flowgpu_guards[kGuards * kGuardBytes];
__attribute__((visibility("hidden"))) uintptr_t flowgpu_guarded[kGuards];
}

// Each guard loads its number and goes on to the code that all share: a word that lies in the range
// of our handles is replaced by what its slot holds. No other register and nothing on the stack is
// touched, so it does not matter what else a function takes and what it gives.
static_assert(kHandleBase == 0x1f0000000000 && kHandleBytes == 0x4000000);
static_assert(offsetof(Slot, driver) == 0);
asm(R"(
    .pushsection .text
    .balign 16
    .hidden flowgpu_guards
flowgpu_guards:
    .set number, 0
    .rept 1024
    endbr64
    movl $number, %r11d
    jmp flowgpu_guard_arguments
    .balign 16
    .set number, number + 1
    .endr
flowgpu_guard_arguments:
    .irp register, rdi, rsi, rdx, rcx, r8, r9
    movabsq $-0x1f0000000000, %r10
    addq %\register, %r10
    cmpq $0x4000000, %r10
    jae 1f
    movq (%\register), %\register
1:
    .endr
    leaq flowgpu_guarded(%rip), %r10
    jmp *(%r10, %r11, 8)
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
    flowgpu_guarded[number] = *slot;
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
        if (used == kGuards)
            return false;
        slots[used] = words + i;
        if (!lead(used++))
            return false;
    }
    return true;
}

bool guard_slots_again() {
    for (unsigned i = 0; i < used; i++)
        if (!lead(i))
            return false;
    return true;
}

} // namespace flowgpu::replay
