// What graphs are made of, and the way back.
//
// A program may change a graph until a checkpoint, so it is read then, while the driver is there
// and nobody calls it. An executable is what its graph was when it was made of it, with what was
// set of its nodes since; the driver does not tell that, so a graph is read for it at once.
#ifndef FLOWGPU_INTERCEPT_REPLAY_GRAPHS_H
#define FLOWGPU_INTERCEPT_REPLAY_GRAPHS_H

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "record.h"
#include "user_objects.h"

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
    std::shared_ptr<GraphPlan> child;
    bool moved = false;  // the child graph, instead of a copy of it
    bool enabled = true; // of an executable's
    // What it needs: objects by handle and serial, and memory that the driver knew.
    std::vector<std::pair<const void*, uint64_t>> objects;
    std::vector<CUdeviceptr> memory;
    // The driver's in its present life: the node that this was read of, by which the program names
    // an executable's; and the one of which the executable was made anew, where it was.
    CUgraphNode origin = nullptr;
    CUgraphNode own = nullptr;
};

struct GraphPlan {
    std::vector<NodePlan> nodes;
    std::vector<size_t> from, to; // edges, by their nodes' places
    std::vector<CUgraphEdgeData> data;
    CUgraph origin = nullptr; // the driver's
};

constexpr const char* kMixed = "with nodes in several contexts, which was copied or captured";

// What is kept of a graph, a node or an executable; the registry's lock guards it.
struct GraphState {
    // An executable's nodes as they are, or a graph's as of the last checkpoint. Null: it cannot be
    // kept, or it is a part of another graph.
    std::shared_ptr<GraphPlan> plan;
    // What ends with it and is made with it: a graph's nodes that the program has handles of, the
    // graph in a node.
    std::set<Object*> parts;
    // The program's, where a node runs; a graph's nodes of which that is not known.
    CUcontext context = nullptr;
    bool mixed = false;         // a graph whose nodes run in several
    const char* lost = nullptr; // why a graph cannot be read
    bool moved = false;         // to a node, whose part it is since
    bool capturing = false;     // known by its capture alone: without that, it has ended
    Retained retained;          // of a graph or an executable
    // A copied graph notes the original and its serial number. `twins` gives the copy's node of the
    // driver for each of the original's.
    std::pair<const void*, uint64_t> source;
    std::unordered_map<CUgraphNode, CUgraphNode> twins;
    // An executable that was made anew keeps the driver's graph of it, while the program has nodes
    // by which it changes the executable. `by_origin` finds such a node in the plan.
    CUgraph own = nullptr;
    std::unordered_map<CUgraphNode, NodePlan*> by_origin;
};

// Reads a graph of the driver's. Null: `*why` says what of it cannot be made again.
std::shared_ptr<GraphPlan> read_graph(CUgraph driver, std::string* why);
bool keeps_attribute(CUlaunchAttributeID id); // of a kernel's node
// Reads every graph of the program's; nobody may be in the driver, and no capture under way.
void read_graphs();
// True if everything that the plan's nodes need is still there; the registry is locked.
bool complete(const GraphPlan& plan);

// Parameters that an executable's node was given, with the driver's handles. `*why`: as above.
void keep_kernel(NodePlan& node, const CUDA_KERNEL_NODE_PARAMS_v2& params, std::string* why);
void keep_copy(NodePlan& node, const CUDA_MEMCPY3D& params, std::string* why);
void keep_memset(NodePlan& node, const CUDA_MEMSET_NODE_PARAMS& params, std::string* why);
void keep_event(NodePlan& node, CUevent event, std::string* why);
// Gives the program its handles of what a node launches; what is not known stays.
void name_kernel(CUgraphNode driver, CUDA_KERNEL_NODE_PARAMS_v2& params);
// A plan takes the place of another of the same nodes, as the executable's that goes by their
// handles. False: they are not the same.
bool take_place(GraphPlan& plan, const GraphPlan& before);

// The registry is locked for these, and the driver is a new one.
CUresult make_graph(GraphPlan& plan, CUgraph* driver);
// Gives the handles of a graph's nodes their new meaning once it is made.
void renew_parts(Object& graph);
// The same for the nodes of copies, once all graphs are made.
void renew_twins();
CUresult make_executable(GraphState& state, unsigned long long flags, CUgraphExec* driver);

// The program's handle of a node in a graph of the program's. `fresh`: the driver has just made it,
// to run in `context`.
CUgraphNode node_to_program(CUgraphNode driver, CUgraph graph, bool fresh = false,
                            CUcontext context = nullptr);

} // namespace flowgpu::replay

#endif
