// User objects: counted references to something of the program's, which graphs and executables have
// as well (NCCL keeps a captured plan alive so). The program's handle is the address of ours.
//
// Each is made anew with CUDA, and graphs get their references again. The end of the driver calls
// no destructor, which is right: what the program gave lives on.
//
// The registry is locked for all of these.
#ifndef FLOWGPU_INTERCEPT_REPLAY_USER_OBJECTS_H
#define FLOWGPU_INTERCEPT_REPLAY_USER_OBJECTS_H

#include <map>
#include <memory>
#include <vector>

#include "driver.h"

namespace flowgpu::replay {

struct UserObject {
    void* data;
    CUhostFn destroy;
    unsigned flags;
    unsigned own; // references of the program's; no graph's
    CUuserObject driver;
};

// References that a graph or an executable has.
using Retained = std::map<std::shared_ptr<UserObject>, unsigned>;

namespace user_objects {

// Those that the program or a graph has references to; the registry is locked.
std::vector<std::shared_ptr<UserObject>> living();
// Makes all of them, each with a reference more until release_spare().
CUresult make_all();
// Gives the driver's graph what one is noted to have.
CUresult retain(const Retained& retained, CUgraph driver);
CUresult release_spare();

} // namespace user_objects

} // namespace flowgpu::replay

#endif
