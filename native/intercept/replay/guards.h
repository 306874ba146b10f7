// Slots of the driver's private tables that nobody knows: their calls wait at the gate as others
// do, and a handle of the program's in one of the six registers of arguments is the driver's handle
// by the time the slot's function has it.
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

} // namespace flowgpu::replay

#endif
