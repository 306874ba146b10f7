// Graphs and executables in a driver that is new.
#include <cstdio>
#include <cstring>
#include <string>

#include "graphs.h"
#include "registry.h"
#include "structures.h"

namespace flowgpu::replay {

namespace {

template <class H> H renewed(const std::unordered_map<H, H>& index, H before) {
    auto found = index.find(before);
    return found == index.end() ? nullptr : found->second;
}

CUgraphNode renewed(CUgraphNode before) {
    return renewed(registry().renewed_nodes, before);
}

// Keeps which call it was that failed, for the error that names the graph.
template <class Words> CUresult told(CUresult result, const char* call, const Words& words) {
    if (result != CUDA_SUCCESS && registry().trouble.empty())
        registry().trouble = std::string(call) + " for " + words();
    return result;
}

std::string words_of(const CUDA_KERNEL_NODE_PARAMS_v2& params) {
    char text[160];
    snprintf(text, sizeof text, "a kernel of %u x %u x %u blocks of %u x %u x %u, %u bytes shared",
             params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX, params.blockDimY,
             params.blockDimZ, params.sharedMemBytes);
    return text;
}

std::string words_of(const GraphPlan& plan, size_t edge) {
    const size_t from = plan.from[edge], to = plan.to[edge];
    const CUgraphEdgeData& data = plan.data[edge];
    char text[160];
    snprintf(text, sizeof text,
             "an edge of ports %d and %d, type %d, from node %zu (type %d) to %zu (type %d) of %zu",
             data.from_port, data.to_port, data.type, from, plan.nodes[from].type, to,
             plan.nodes[to].type, plan.nodes.size());
    return text;
}

CUresult add_kernel(const NodePlan& node, CUgraph graph, CUgraphNode* made) {
    CUDA_KERNEL_NODE_PARAMS_v2 params = node.kernel;
    params.func = to_driver(params.func);
    params.kern = to_driver(params.kern);
    params.ctx = params.func ? nullptr : to_driver(node.context);
    std::vector<char> arguments = node.arguments;
    std::vector<void*> pointers;
    for (size_t offset : node.offsets)
        pointers.push_back(arguments.data() + offset);
    params.kernelParams = pointers.empty() ? nullptr : pointers.data();
    CUresult result = told(FG_DRIVER(cuGraphAddKernelNode_v2)(made, graph, nullptr, 0, &params),
                           "cuGraphAddKernelNode", [&] { return words_of(params); });
    for (const auto& [id, wanted] : node.attributes) {
        CUlaunchAttributeValue value = {};
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuGraphKernelNodeGetAttribute)(*made, id, &value);
        if (result == CUDA_SUCCESS && memcmp(&value, &wanted, sizeof value) != 0)
            result = told(FG_DRIVER(cuGraphKernelNodeSetAttribute)(*made, id, &wanted),
                          "cuGraphKernelNodeSetAttribute",
                          [id = id] { return "number " + std::to_string(id); });
    }
    return result;
}

// The driver copies a child graph into its node; what is made in the copy has handles that are
// known.
CUresult add_child(CUgraph graph, bool moved, CUgraphNode* made) {
    CUgraphNodeParams params = {};
    params.type = CU_GRAPH_NODE_TYPE_GRAPH;
    params.graph.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    CUgraph& empty = params.graph.graph;
    CUresult result = FG_DRIVER(cuGraphCreate)(&empty, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = moved ? FG_DRIVER(cuGraphAddNode)(made, graph, nullptr, 0, &params)
                   : FG_DRIVER(cuGraphAddChildGraphNode)(made, graph, nullptr, 0, empty);
    if (!moved || result != CUDA_SUCCESS)
        FG_DRIVER(cuGraphDestroy)(empty);
    return result;
}

CUresult add_copy(const NodePlan& node, CUgraph graph, CUgraphNode* made) {
    CUDA_MEMCPY3D copy = node.copy;
    translate(copy, ToDriver());
    return FG_DRIVER(cuGraphAddMemcpyNode)(made, graph, nullptr, 0, &copy, to_driver(node.context));
}

CUresult add_node(const NodePlan& node, CUgraph graph, CUgraphNode* made) {
    switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return add_kernel(node, graph, made);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return add_copy(node, graph, made);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return FG_DRIVER(cuGraphAddMemsetNode)(made, graph, nullptr, 0, &node.fill,
                                               to_driver(node.context));
    case CU_GRAPH_NODE_TYPE_HOST:
        return FG_DRIVER(cuGraphAddHostNode)(made, graph, nullptr, 0, &node.host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return FG_DRIVER(cuGraphAddEventRecordNode)(made, graph, nullptr, 0, to_driver(node.event));
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return FG_DRIVER(cuGraphAddEventWaitNode)(made, graph, nullptr, 0, to_driver(node.event));
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return add_child(graph, node.moved, made);
    default:
        return FG_DRIVER(cuGraphAddEmptyNode)(made, graph, nullptr, 0);
    }
}

// Fills an empty graph. `note_graph(plan, graph)` and `note_node(node, made)` hear what it made.
template <class G, class N>
CUresult fill_graph(GraphPlan& plan, CUgraph graph, const G& note_graph, const N& note_node) {
    CUresult result = CUDA_SUCCESS;
    std::vector<CUgraphNode> made(plan.nodes.size());
    note_graph(plan, graph);
    for (size_t i = 0; result == CUDA_SUCCESS && i < made.size(); i++) {
        NodePlan& node = plan.nodes[i];
        result = told(add_node(node, graph, &made[i]), "adding",
                      [&] { return "a node of type " + std::to_string(node.type); });
        CUgraph child = nullptr;
        if (result == CUDA_SUCCESS && node.child)
            result = FG_DRIVER(cuGraphChildGraphNodeGetGraph)(made[i], &child);
        if (result == CUDA_SUCCESS && node.child)
            result = fill_graph(*node.child, child, note_graph, note_node);
        if (result == CUDA_SUCCESS)
            note_node(node, made[i]);
    }
    for (size_t i = 0; result == CUDA_SUCCESS && i < plan.from.size(); i++) {
        const size_t from = plan.from[i], to = plan.to[i];
        result = told(
            FG_DRIVER(cuGraphAddDependencies_v2)(graph, &made[from], &made[to], &plan.data[i], 1),
            "cuGraphAddDependencies", [&] { return words_of(plan, i); });
    }
    return result;
}

template <class G, class N>
CUresult make_filled(GraphPlan& plan, CUgraph* driver, const G& note_graph, const N& note_node) {
    CUresult result = FG_DRIVER(cuGraphCreate)(driver, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = fill_graph(plan, *driver, note_graph, note_node);
    if (result != CUDA_SUCCESS)
        FG_DRIVER(cuGraphDestroy)(*driver);
    return result;
}

} // namespace

CUresult make_graph(GraphPlan& plan, CUgraph* driver) {
    return make_filled(
        plan, driver,
        [](const GraphPlan& part, CUgraph made) { registry().renewed_graphs[part.origin] = made; },
        [](const NodePlan& node, CUgraphNode made) {
            registry().renewed_nodes[node.origin] = made;
        });
}

void renew_parts(Object& graph) {
    for (Object* part : graph.graph->parts) {
        // None: the driver refuses what it is asked of it.
        void*& driver = part->slot->driver;
        if (part->kind == Kind::node)
            driver = renewed(static_cast<CUgraphNode>(driver));
        else
            driver = renewed(registry().renewed_graphs, static_cast<CUgraph>(driver));
        if (driver)
            registry().index_of(part->kind)[driver] = part;
        renew_parts(*part);
    }
}

void renew_twins() {
    for (const auto& [serial, object] : registry().objects) {
        if (object->kind != Kind::graph || !object->graph)
            continue;
        std::unordered_map<CUgraphNode, CUgraphNode> twins;
        for (const auto& [original, node] : object->graph->twins)
            if (renewed(original) && renewed(node))
                twins[renewed(original)] = renewed(node);
        object->graph->twins = std::move(twins);
    }
}

CUresult make_executable(GraphState& state, unsigned long long flags, CUgraphExec* driver) {
    CUgraph graph = nullptr;
    bool reached = false; // the program has the graph that it was made of
    state.own = nullptr;
    state.by_origin.clear();
    std::vector<std::pair<NodePlan*, CUgraphNode>> nodes;
    CUresult result = make_filled(
        *state.plan, &graph, [](const GraphPlan&, CUgraph) {},
        [&](NodePlan& node, CUgraphNode made) { nodes.emplace_back(&node, made); });
    if (result == CUDA_SUCCESS)
        result = user_objects::retain(state.retained, graph);
    if (result != CUDA_SUCCESS)
        return result;
    result = told(FG_DRIVER(cuGraphInstantiateWithFlags)(driver, graph, flags),
                  "cuGraphInstantiateWithFlags",
                  [&] { return std::to_string(nodes.size()) + " nodes"; });
    for (const auto& [node, made] : nodes)
        if (result == CUDA_SUCCESS && !node->enabled)
            result = FG_DRIVER(cuGraphNodeSetEnabled)(*driver, made, 0);
    if (result == CUDA_SUCCESS)
        for (const auto& [node, made] : nodes) {
            node->own = made;
            node->origin = renewed(node->origin);
            reached = reached || node->origin;
        }
    if (reached)
        state.own = graph;
    else
        FG_DRIVER(cuGraphDestroy)(graph);
    return result;
}

} // namespace flowgpu::replay
