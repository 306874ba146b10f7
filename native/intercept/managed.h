// Managed memory (cuMemAllocManaged), in jobs prepared for the replay engine.
//
// Kernels and the program's threads use one address, so it has to come back. The driver's own
// choice cannot be had again. So FlowGPU makes managed memory in *tracts*, each of which the driver
// puts at an address of a window of ours (rewind::Wish), and gives the program parts of them.
// Driver 580 reserves addresses of their own for 31 MiB and more: no tract is smaller. Pages that
// nobody has touched take no memory.
//
// The program's threads may write there at any time, and no gate stops them. At a checkpoint the
// bytes are *exchanged* for ordinary memory at the same address, while the coordinator holds the
// threads (coordinator/holding.py): from then on they are pages of the process as any others, which
// CRIU dumps. The driver is not told. Once CUDA is there again, tracts are made anew where the
// pages are, and take their place, held likewise. Where CUDA has stayed, its own descriptor is
// mapped there again: its books are right again.
//
// What is not at one of our addresses is refused by name (MemoryKind::unplaced): on a GPU whose
// managed memory the host may not touch at any time, and where a tract could not be had.
#ifndef FLOWGPU_INTERCEPT_MANAGED_H
#define FLOWGPU_INTERCEPT_MANAGED_H

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace flowgpu::managed {

// CUDA_ERROR_NOT_SUPPORTED: the driver is to place it. What is `lasting` has a tract of its own,
// and outlives the context.
CUresult allocate(CUdevice device, CUcontext context, size_t bytes, unsigned flags,
                  CUdeviceptr* address, bool lasting = false);
// The caller has waited for the end of all work that uses it.
CUresult release(CUdeviceptr address);
// A context is about to end, and has ended, or goes on: the memory that was given in it ends. What
// is lasting is *homeless* from then on, ordinary memory with the same bytes, until a context that
// is current takes it in. As with the driver's, of which this stands in for variables of libraries,
// the host may use it all the time. What threads write there while the context ends may be lost.
void before_end_of(CUcontext context);
void end_of(CUcontext context);
void goes_on(CUcontext context);
// False: it stays homeless.
bool take_in(CUdeviceptr address);

// Where the memory lies whose attachment the driver is to change: a tract. `whole`: no other
// memory of the program's lies there.
struct Place {
    CUdeviceptr tract;
    bool whole;
};
Place place_of(CUdeviceptr address);

// Hints that the driver has taken for pages of the program's memory. They are given again.
void note_advice(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location);
void note_prefetch(CUdeviceptr address, size_t bytes, CUmemLocation location);

// True if the bytes of any tract are ordinary memory now. Only the service thread calls this and
// what follows, behind a closed gate with all work done.
bool away();

enum class Step { done, failed, lost }; // lost: bytes are gone; else all are there, on one side

// Begins to exchange the bytes for ordinary memory; `held`: there are any, and leave() is to do it
// once the program's threads are held.
Step begin_leaving(bool* held, char* detail, size_t bytes);
Step leave(char* detail, size_t bytes);

// Likewise the way back. One tract is exchanged at a time: come() is to follow while begin_coming()
// says `held`. May be tried again after a failure.
Step begin_coming(bool* held, char* detail, size_t bytes);
Step come(char* detail, size_t bytes);

// Where CUDA stays in the process: the driver moves to the host's memory what is on devices, also
// of memory that it has placed. begin_coming() gives the hints again.
void to_host();

// For a fork, before all other locks of this library's.
void lock();
void unlock();

} // namespace flowgpu::managed

#endif
