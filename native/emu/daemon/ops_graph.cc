// Graphs, their nodes and their executables.
#include "graph.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

// A graph that may be changed or read by itself.
std::shared_ptr<Graph> graph_of(Session& s) {
    return s.client.find<Graph>(s.in.take<uint64_t>());
}

void list_edges(const Graph& graph, std::vector<uint64_t>* out) {
    for (const auto& node : graph.nodes) {
        for (const uint64_t before : node->after) {
            out->push_back(before);
            out->push_back(node->handle);
        }
    }
}

// A node that has these parameters instead of its own, if it may. Where it runs is only changed
// if it is said.
int32_t changed(Session& s, const Node& node, NodeSpec spec, Node* out) {
    if (spec.fixed.type != node.spec.fixed.type || spec.fixed.type == CU_GRAPH_NODE_TYPE_EMPTY) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (spec.fixed.type == CU_GRAPH_NODE_TYPE_GRAPH) {
        s.machine().count_unsupported("changing a child graph node");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    // An attribute, which the parameters do not hold.
    spec.fixed.shape.cooperative = node.spec.fixed.shape.cooperative;
    if (spec.fixed.context == 0) {
        spec.fixed.context = node.spec.fixed.context;
    }
    return set_spec(s, *out, std::move(spec));
}

void assume(Node& node, const Node& other) {
    node.spec = other.spec;
    node.function = other.function;
    node.memory = other.memory;
}

struct Update {
    CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    uint64_t node = 0;
    uint64_t from = 0;
};

// Nodes are paired in the order in which they were made.
Update compare(const Graph& have, const Graph& wanted) {
    if (have.nodes.size() != wanted.nodes.size()) {
        return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED};
    }
    std::map<uint64_t, uint64_t> pairs;
    for (size_t i = 0; i < have.nodes.size(); ++i) {
        pairs[wanted.nodes[i]->handle] = have.nodes[i]->handle;
    }
    for (size_t i = 0; i < have.nodes.size(); ++i) {
        const Node& from = *have.nodes[i];
        const Node& to = *wanted.nodes[i];
        if (from.after.size() != to.after.size()) {
            return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, to.handle};
        }
        for (const uint64_t before : to.after) {
            if (std::find(from.after.begin(), from.after.end(), pairs[before]) ==
                from.after.end()) {
                return {CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, to.handle, before};
            }
        }
        const CUgraphExecUpdateResult result = update_allowed(from, to);
        if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
            return {result, to.handle};
        }
        if (from.child != nullptr) {
            const Update inside = compare(*from.child, *to.child);
            if (inside.result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
                return inside;
            }
        }
    }
    return {};
}

void assume_all(Graph& graph, const Graph& other) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
        if (graph.nodes[i]->child != nullptr) {
            assume_all(*graph.nodes[i]->child, *other.nodes[i]->child);
        } else {
            assume(*graph.nodes[i], *other.nodes[i]);
        }
    }
}

// A child graph's nodes get the parameters of another's, of the same structure.
int32_t set_child(Session& s, Node& node, uint64_t handle) {
    const auto graph = s.client.find<Graph>(handle);
    if (graph == nullptr || graph->capturing ||
        compare(*node.child, *graph).result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    assume_all(*node.child, *graph);
    return CUDA_SUCCESS;
}

// The executable and its node that a request names by a node of the graph that it was made from.
int32_t executable_node(Session& s, std::shared_ptr<Node>* node) {
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    const auto handle = s.in.take<uint64_t>();
    if (executable == nullptr || s.client.find<Node>(handle) == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *node = executable->graph->find(handle);
    return *node == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

bool can_be_disabled(const Node& node) {
    return node.spec.fixed.type == CU_GRAPH_NODE_TYPE_KERNEL ||
           node.spec.fixed.type == CU_GRAPH_NODE_TYPE_MEMCPY ||
           node.spec.fixed.type == CU_GRAPH_NODE_TYPE_MEMSET;
}

bool has_edge(const Node& to, uint64_t from) {
    return std::find(to.after.begin(), to.after.end(), from) != to.after.end();
}

// All edges or none: `add` ones that are not there, or take away ones that are.
int32_t edit_edges(Session& s, bool add) {
    const auto graph = graph_of(s);
    const std::vector<uint64_t> from = take_handles(s.in);
    const std::vector<uint64_t> to = take_handles(s.in);
    if (graph == nullptr || from.size() != to.size()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::set<std::pair<uint64_t, uint64_t>> distinct;
    for (size_t i = 0; i < from.size(); ++i) {
        const auto before = s.client.find<Node>(from[i]);
        const auto node = s.client.find<Node>(to[i]);
        if (before == nullptr || node == nullptr || before == node ||
            before->graph != graph->handle || node->graph != graph->handle ||
            has_edge(*node, from[i]) == add || !distinct.insert({from[i], to[i]}).second) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    for (size_t i = 0; i < from.size(); ++i) {
        auto& after = s.client.find<Node>(to[i])->after;
        if (add) {
            after.push_back(from[i]);
        } else {
            after.erase(std::find(after.begin(), after.end(), from[i]));
        }
    }
    return CUDA_SUCCESS;
}

} // namespace

int32_t op_GraphCreate(Session& s) {
    s.out.put(new_graph(s.client)->handle);
    return CUDA_SUCCESS;
}

int32_t op_GraphDestroy(Session& s) {
    const auto graph = graph_of(s);
    if (graph == nullptr || graph->owner_node != 0 || graph->capturing) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    remove_graph(s.client, graph);
    return CUDA_SUCCESS;
}

int32_t op_GraphClone(Session& s) {
    const auto graph = graph_of(s);
    if (graph == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(copy_graph(s.client, *graph, true)->handle);
    return CUDA_SUCCESS;
}

int32_t op_GraphAddNode(Session& s) {
    const auto graph = graph_of(s);
    const std::vector<uint64_t> after = take_handles(s.in);
    NodeSpec spec = NodeSpec::take(s.in);
    int32_t error = CUDA_ERROR_INVALID_VALUE;
    if (graph != nullptr && s.in.good()) {
        if (const auto node = add_node(s, *graph, after, std::move(spec), &error)) {
            s.out.put(node->handle);
        }
    }
    return error;
}

int32_t op_GraphDestroyNode(Session& s) {
    const auto node = s.client.find<Node>(s.in.take<uint64_t>());
    const auto graph = node == nullptr ? nullptr : s.client.find<Graph>(node->graph);
    if (graph == nullptr || graph->capturing) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    remove_node(s.client, *graph, node->handle);
    return CUDA_SUCCESS;
}

int32_t op_GraphNodeParams(Session& s) {
    const auto node = s.client.find<Node>(s.in.take<uint64_t>());
    if (node == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(node->graph);
    node->spec.put(s.out);
    return CUDA_SUCCESS;
}

int32_t op_GraphNodeSetParams(Session& s) {
    const auto node = s.client.find<Node>(s.in.take<uint64_t>());
    NodeSpec spec = NodeSpec::take(s.in);
    if (node == nullptr || !s.in.good()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Node now(node->handle);
    const int32_t r = changed(s, *node, std::move(spec), &now);
    if (r == CUDA_SUCCESS) {
        assume(*node, now);
    }
    return r;
}

int32_t op_GraphSetCooperative(Session& s) {
    const auto node = s.client.find<Node>(s.in.take<uint64_t>());
    const bool cooperative = s.in.take<uint32_t>() != 0;
    if (node == nullptr || node->spec.fixed.type != CU_GRAPH_NODE_TYPE_KERNEL ||
        (cooperative && node->spec.fixed.by_extra != 0)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    node->spec.fixed.shape.cooperative = cooperative;
    return CUDA_SUCCESS;
}

int32_t op_GraphFindInClone(Session& s) {
    const auto original = s.in.take<uint64_t>();
    const auto clone = graph_of(s);
    if (clone != nullptr && s.client.find<Node>(original) != nullptr) {
        for (const auto& node : clone->nodes) {
            if (node->origin == original) {
                s.out.put(node->handle);
                return CUDA_SUCCESS;
            }
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

int32_t op_GraphContents(Session& s) {
    const auto what = s.in.take<GraphList>();
    const auto handle = s.in.take<uint64_t>();
    const auto graph = s.client.find<Graph>(handle);
    const auto node = s.client.find<Node>(handle);
    std::vector<uint64_t> out;
    if (graph != nullptr && what == GraphList::kEdges) {
        list_edges(*graph, &out);
    } else if (graph != nullptr && what <= GraphList::kRoots) {
        for (const auto& one : graph->nodes) {
            if (what == GraphList::kNodes || one->after.empty()) {
                out.push_back(one->handle);
            }
        }
    } else if (node != nullptr && what == GraphList::kDependencies) {
        out = node->after;
    } else if (node != nullptr && what == GraphList::kDependents) {
        out = s.client.find<Graph>(node->graph)->dependents(handle);
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    put_handles(s.out, out);
    return CUDA_SUCCESS;
}

int32_t op_GraphAddEdges(Session& s) {
    return edit_edges(s, true);
}

int32_t op_GraphRemoveEdges(Session& s) {
    return edit_edges(s, false);
}

bool device_could_launch(const Graph& graph) {
    return std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const auto& node) {
        const auto type = node->spec.fixed.type;
        return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
               type == CU_GRAPH_NODE_TYPE_MEMSET ||
               (type == CU_GRAPH_NODE_TYPE_GRAPH && device_could_launch(*node->child));
    });
}

int32_t op_GraphInstantiate(Session& s) {
    constexpr uint64_t kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                                CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH |
                                CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    const auto graph = graph_of(s);
    const auto flags = s.in.take<uint64_t>();
    std::vector<std::shared_ptr<Node>> order;
    if (graph == nullptr || graph->capturing || (flags & ~kKnown) != 0 ||
        is_moved(s.client, *graph)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult error = CUDA_SUCCESS;
    if (s.context(&error) == nullptr) {
        return error;
    }
    if (!graph->sorted(&order)) {
        const auto bad = std::find_if(graph->nodes.begin(), graph->nodes.end(), [&](auto& node) {
            return std::find(order.begin(), order.end(), node) == order.end();
        });
        s.out.put(bad == graph->nodes.end() ? uint64_t{0} : (*bad)->handle);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) != 0 && !device_could_launch(*graph)) {
        s.machine().count_unsupported("cuGraphInstantiate of such nodes for the device");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto executable = s.client.make<Executable>();
    executable->graph = copy_graph(s.client, *graph, false);
    executable->flags = flags;
    s.out.put(executable->handle);
    return CUDA_SUCCESS;
}

int32_t op_GraphLaunch(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (executable == nullptr || stream == nullptr) {
        return stream == nullptr ? error : CUDA_ERROR_INVALID_VALUE;
    }
    return stream->capture != nullptr ? s.breaks_capture(*stream)
                                      : launch_graph(s, *executable, stream);
}

// There is nothing to bring to the device.
int32_t op_GraphUpload(Session& s) {
    CUresult error = CUDA_SUCCESS;
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    const auto stream = s.work_stream(s.in.take<uint64_t>(), &error);
    if (executable == nullptr || stream == nullptr) {
        return executable == nullptr ? CUDA_ERROR_INVALID_VALUE : error;
    }
    return stream->capture != nullptr ? s.breaks_capture(*stream) : CUDA_SUCCESS;
}

int32_t op_ExecDestroy(Session& s) {
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    if (executable == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.client.objects.erase(executable->handle);
    return CUDA_SUCCESS;
}

int32_t op_ExecFlags(Session& s) {
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    if (executable == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // Driver 580 does not tell this flag either.
    s.out.put(executable->flags & ~uint64_t{CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY});
    return CUDA_SUCCESS;
}

int32_t op_ExecUpdate(Session& s) {
    const auto executable = s.client.find<Executable>(s.in.take<uint64_t>());
    const auto graph = graph_of(s);
    Update update{CU_GRAPH_EXEC_UPDATE_ERROR};
    if (executable != nullptr && graph != nullptr && !graph->capturing &&
        !is_moved(s.client, *graph)) {
        update = compare(*executable->graph, *graph);
    }
    if (update.result == CU_GRAPH_EXEC_UPDATE_SUCCESS) {
        assume_all(*executable->graph, *graph);
    }
    s.out.put(int32_t{update.result});
    s.out.put(update.node);
    s.out.put(update.from);
    return update.result == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS
           : update.result == CU_GRAPH_EXEC_UPDATE_ERROR ? CUDA_ERROR_INVALID_VALUE
                                                         : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

int32_t op_ExecSetParams(Session& s) {
    std::shared_ptr<Node> node;
    if (const int32_t r = executable_node(s, &node); r != CUDA_SUCCESS) {
        return r;
    }
    NodeSpec spec = NodeSpec::take(s.in);
    if (s.in.good() && node->child != nullptr && spec.fixed.type == CU_GRAPH_NODE_TYPE_GRAPH) {
        return set_child(s, *node, spec.fixed.object);
    }
    Node now(node->handle);
    const int32_t r =
        s.in.good() ? changed(s, *node, std::move(spec), &now) : CUDA_ERROR_INVALID_VALUE;
    if (r != CUDA_SUCCESS) {
        return r;
    }
    const auto rows = [](const Node& one) {
        return one.spec.fixed.copy.Height * one.spec.fixed.copy.Depth;
    };
    if (update_allowed(*node, now) != CU_GRAPH_EXEC_UPDATE_SUCCESS ||
        (now.spec.fixed.type == CU_GRAPH_NODE_TYPE_MEMCPY && (rows(*node) > 1 || rows(now) > 1))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    assume(*node, now);
    return CUDA_SUCCESS;
}

int32_t op_ExecSetEnabled(Session& s) {
    std::shared_ptr<Node> node;
    const int32_t r = executable_node(s, &node);
    if (r != CUDA_SUCCESS || !can_be_disabled(*node)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    node->enabled = s.in.take<uint32_t>() != 0;
    return CUDA_SUCCESS;
}

int32_t op_ExecGetEnabled(Session& s) {
    std::shared_ptr<Node> node;
    const int32_t r = executable_node(s, &node);
    if (r != CUDA_SUCCESS || !can_be_disabled(*node)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(uint32_t{node->enabled});
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
