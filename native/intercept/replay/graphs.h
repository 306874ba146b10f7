// What a captured graph is made of, as it was when its capture ended, and the way back.
//
// The program has no handle of a node: what would give it one is refused by name, so nothing
// changes the graph afterwards, and an executable is what its graph was.
#ifndef FLOWGPU_INTERCEPT_REPLAY_GRAPHS_H
#define FLOWGPU_INTERCEPT_REPLAY_GRAPHS_H

#include <memory>
#include <string>
#include <vector>

#include "record.h"

namespace flowgpu::replay {

struct GraphPlan;

// One node, with the program's handles.
struct NodePlan {
    CUgraphNodeType type;
    CUcontext context = nullptr; // of a copy, a memset, or a kernel of a library
    CUDA_KERNEL_NODE_PARAMS_v2 kernel = {};
    std::vector<size_t> offsets; // of a kernel's arguments
    std::vector<char> arguments;
    std::vector<std::pair<CUlaunchAttributeID, CUlaunchAttributeValue>> attributes;
    CUDA_MEMCPY3D copy = {};
    CUDA_MEMSET_NODE_PARAMS fill = {};
    CUDA_HOST_NODE_PARAMS host = {};
    CUevent event = nullptr;
};

struct GraphPlan {
    std::vector<NodePlan> nodes;
    std::vector<size_t> from, to; // edges, by their nodes' places
    std::vector<CUgraphEdgeData> data;
    // What it needs: objects by handle and serial, and memory that the driver knew.
    std::vector<std::pair<const void*, uint64_t>> objects;
    std::vector<CUdeviceptr> memory;
};

// Reads a graph of the driver's. `context`: the program's, in which its copies and memsets are
// done. Null: `*why` says what of it cannot be made again.
std::shared_ptr<const GraphPlan> read_graph(CUgraph driver, CUcontext context, std::string* why);
// Whether all that it needs is still there; the registry is locked.
bool complete(const GraphPlan& plan);
CUresult build_graph(const GraphPlan& plan, CUgraph* driver);

} // namespace flowgpu::replay

#endif
