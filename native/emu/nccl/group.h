// Groups: what a thread asks for between ncclGroupStart and ncclGroupEnd is done at the end.
#ifndef FLOWGPU_EMU_NCCL_GROUP_H
#define FLOWGPU_EMU_NCCL_GROUP_H

#include "comm.h"

namespace flowgpu::nccl {

// A step that waits for other ranks, with the communicator in whose order it is done.
struct Job {
    Comm* order;
    Comm* reports; // where a result in the background goes; may be null
    std::function<Result()> run;
};

void group_start();
Result group_end();
void group_drop(); // what was asked for is forgotten
// In a group for later; else at once.
Result add(Job job);
Result add(Comm* comm, const Task& task);

// Joins what a communicator that does not block has in the background.
void wait_for_background(Comm* comm);

} // namespace flowgpu::nccl

#endif
