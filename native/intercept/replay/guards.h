// Functions of which nobody knows what they take: their calls wait at the gate as others do. They
// are slots of the driver's private tables, and functions of NVML (nvml.h). A handle of the
// program's in one of the six registers of arguments is the driver's handle by the time a slot's
// function has it.
#ifndef FLOWGPU_INTERCEPT_REPLAY_GUARDS_H
#define FLOWGPU_INTERCEPT_REPLAY_GUARDS_H

#include <cstdint>

namespace flowgpu::replay {

// Makes the table's page writable and changes the slot. False: it cannot.
bool write_slot(uintptr_t* slot, uintptr_t value);

// Leads the slots of a table that begins with its size in bytes through guards, where they
// hold functions of the driver's. The caller holds the tables' lock, here and below. False: a slot
// is left, because it cannot be written or they are too many.
bool guard_slots(const void* table);
// The same slots, in a driver that was made anew.
bool guard_slots_again();

enum class Guarded { slot, function, waits };
// A guard for a function of no table; `waits`: it may sleep for long, so it only passes the gate.
// It is the function itself where it is a guard already, or where no guard is left.
void* guard_function(void* function, Guarded kind);
// What a guard calls; null: it is none.
const void* behind_guard(const void* function);

} // namespace flowgpu::replay

#endif
