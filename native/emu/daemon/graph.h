// Graphs, their executables, and the captures that make graphs of what streams are given.
#pragma once

#include "state.h"

#include "graph_wire.h"

#include <array>

namespace flowgpu::emu {

struct Graph;

struct Node : Object {
    using Object::Object;
    NodeSpec spec;
    uint64_t function = 0; // a kernel's in its context, resolved when the parameters were set
    std::array<uint64_t, 2> memory{}; // what kind a copy or a memset names, when it was set
    uint64_t graph = 0;
    uint64_t origin = 0;         // the node that this one was cloned from
    std::vector<uint64_t> after; // in the order in which the edges were made
    std::shared_ptr<Graph> child;
    bool enabled = true; // of an executable's
};

struct Graph : Object {
    using Object::Object;
    std::vector<std::shared_ptr<Node>> nodes; // in the order in which they were made
    uint64_t origin = 0;                      // the graph that this one was cloned from
    uint64_t owner_node = 0;                  // of a child graph
    bool capturing = false;

    std::shared_ptr<Node> find(uint64_t node) const; // in child graphs too
    std::vector<uint64_t> dependents(uint64_t node) const;
    // Each node after what it depends on; false for a cycle, whose nodes are left out.
    bool sorted(std::vector<std::shared_ptr<Node>>* out) const;
};

// It has a copy of its graph, whose nodes go by the handles of those that they were copied from.
struct Executable : Object {
    using Object::Object;
    std::shared_ptr<Graph> graph;
    uint64_t flags = 0;
    std::vector<std::shared_ptr<Worker>> lanes; // what runs at the same time has a thread each
    TicketRef last;                             // the newest launch

    ~Executable() override;
};

// One capture sequence, from cuStreamBeginCapture to cuStreamEndCapture.
struct Capture {
    uint64_t id = 0;
    std::shared_ptr<Graph> graph;
    bool into_existing = false;
    std::shared_ptr<Stream> origin;
    uint64_t thread = 0;
    int32_t mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool invalid = false;
    std::set<std::shared_ptr<Stream>> streams;
};

// graph.cc
std::shared_ptr<Graph> new_graph(Client& client);
// True if the program moved the graph into a node: it cannot be used by itself any more.
bool is_moved(const Client& client, const Graph& graph);
// A copy with nodes and child graphs of its own; `listed` ones have handles of their own.
std::shared_ptr<Graph> copy_graph(Client& client, const Graph& graph, bool listed);
void remove_node(Client& client, Graph& graph, uint64_t node);
void remove_graph(Client& client, const std::shared_ptr<Graph>& graph);
// Checks the parameters as far as the driver does when it is given them, and completes the node.
int32_t set_spec(Session& s, Node& node, NodeSpec spec);
// Checks and adds a node; null with *error set if that fails.
std::shared_ptr<Node> add_node(Session& s, Graph& graph, const std::vector<uint64_t>& after,
                               NodeSpec spec, int32_t* error);
int32_t launch_graph(Session& s, Executable& executable, const std::shared_ptr<Stream>& stream);
// Says why an executable's node cannot take the parameters of `to`, or that it can.
CUgraphExecUpdateResult update_allowed(const Node& from, const Node& to);

// snapshot_graphs.cc
void save_graphs(const Client& client, Writer& w);
void load_graphs(Client& client, Reader& r);

// capture.cc
// Makes a node of what a capturing stream is given.
int32_t capture_node(Session& s, Stream& stream, NodeSpec spec);
// An event is recorded in a capturing stream; a stream waits for an event, one of them captured.
int32_t record_captured(Session& s, Stream& stream, Event& event, uint32_t flags);
int32_t wait_captured(Session& s, const std::shared_ptr<Stream>& stream, const Event& event,
                      uint32_t flags);
// Takes the streams out of the capture.
void end_capture(Client& client, const std::shared_ptr<Capture>& capture);

// ops_copy.cc: what a memcpy or memset node does, checked as when a stream is given it
int32_t check_copy(Client& client, const CUDA_MEMCPY3D_v2& what);
std::function<void()> copy_work(Client& client, const CUDA_MEMCPY3D_v2& what,
                                std::shared_ptr<Context> context);
int32_t check_fill(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what);
std::function<void()> fill_work(Client& client, const CUDA_MEMSET_NODE_PARAMS_v1& what,
                                std::shared_ptr<Context> context);

// ops_launch.cc
CUresult check_launch(const Function& function, const LaunchShape& shape);
std::function<void()> kernel_work(Client& client, const Function& function,
                                  const LaunchShape& shape, std::string_view arguments,
                                  uint64_t stream);

// ops_stream.cc
std::function<void()> host_work(Client& client, HostKind kind, uint64_t function, uint64_t data,
                                uint64_t stream);
// Marks the event as recorded by the work that is submitted next; it is what that work does.
std::function<void()> record_work(Event& event);

} // namespace flowgpu::emu
