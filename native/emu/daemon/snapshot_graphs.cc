// A client's graphs and executables as bytes, for snapshot.cc.
#include "graph.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

void save_graph(const Graph& graph, Writer& w) {
    w.put(graph.handle);
    w.put(graph.origin);
    w.put(graph.owner_node);
    w.put(static_cast<uint32_t>(graph.nodes.size()));
    for (const auto& node : graph.nodes) {
        w.put(node->handle);
        node->spec.put(w);
        w.put(node->function);
        w.put(node->memory);
        w.put(node->origin);
        w.put(uint8_t{node->enabled});
        put_handles(w, node->after);
        w.put(uint8_t{node->child != nullptr});
        if (node->child != nullptr) {
            save_graph(*node->child, w);
        }
    }
}

template <class T> std::shared_ptr<T> make(Client& client, uint64_t handle, bool listed) {
    return listed ? client.make<T>(handle) : client.make_own<T>(handle);
}

// What an executable has of its graph is not listed: its handles are another graph's.
std::shared_ptr<Graph> load_graph(Client& client, Reader& r, bool listed) {
    auto graph = make<Graph>(client, r.take<uint64_t>(), listed);
    graph->origin = r.take<uint64_t>();
    graph->owner_node = r.take<uint64_t>();
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        auto node = make<Node>(client, r.take<uint64_t>(), listed);
        node->spec = NodeSpec::take(r);
        node->function = r.take<uint64_t>();
        node->memory = r.take<std::array<uint64_t, 2>>();
        node->origin = r.take<uint64_t>();
        node->enabled = r.take<uint8_t>() != 0;
        node->after = take_handles(r);
        node->graph = graph->handle;
        if (r.take<uint8_t>() != 0) {
            node->child = load_graph(client, r, listed);
        }
        graph->nodes.push_back(std::move(node));
    }
    return graph;
}

} // namespace

void save_graphs(const Client& client, Writer& w) {
    auto graphs = client.every<Graph>();
    graphs.erase(std::remove_if(graphs.begin(), graphs.end(),
                                [](const auto& graph) { return graph->owner_node != 0; }),
                 graphs.end());
    w.put(static_cast<uint32_t>(graphs.size()));
    for (const auto& graph : graphs) {
        save_graph(*graph, w);
    }
    const auto executables = client.every<Executable>();
    w.put(static_cast<uint32_t>(executables.size()));
    for (const auto& executable : executables) {
        w.put(executable->handle);
        w.put(executable->flags);
        save_graph(*executable->graph, w);
    }
}

void load_graphs(Client& client, Reader& r) {
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        load_graph(client, r, true);
    }
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        auto executable = client.make<Executable>(r.take<uint64_t>());
        executable->flags = r.take<uint64_t>();
        executable->graph = load_graph(client, r, false);
    }
}

} // namespace flowgpu::emu
