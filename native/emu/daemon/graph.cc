// What graphs are made of, and how an executable runs.
#include "graph.h"

#include <algorithm>

namespace flowgpu::emu {

namespace {

int32_t alive_context(const Client& client, uint64_t handle) {
    const auto found = client.contexts.find(handle);
    if (found == client.contexts.end()) {
        return client.made(handle) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    }
    return found->second->sticky.load();
}

// The context, or of mapped memory the device, of what is at an address; 0 for host memory.
uint64_t memory_at(const Client& client, uint64_t address) {
    const Mapping* map = client.space.at(address);
    if (map == nullptr) {
        return 0;
    }
    return map->kind != MapKind::kVmm
               ? map->context
               : static_cast<uint64_t>(client.ordinal(*map->phys->device())) + 1;
}

uint64_t context_of(const Client& client, CUarray handle) {
    const auto array = client.find<Array>(reinterpret_cast<uint64_t>(handle));
    return array != nullptr ? array->context : 0;
}

// Noted now: when the parameters are changed, the memory may be gone.
std::array<uint64_t, 2> memory_of(const Client& client, const NodeParams& params) {
    if (params.type == CU_GRAPH_NODE_TYPE_MEMSET) {
        return {memory_at(client, params.fill.dst), 0};
    }
    const CUDA_MEMCPY3D_v2& copy = params.copy;
    return {copy.dstMemoryType == CU_MEMORYTYPE_ARRAY ? context_of(client, copy.dstArray)
                                                      : memory_at(client, copy.dstDevice),
            copy.srcMemoryType == CU_MEMORYTYPE_ARRAY ? context_of(client, copy.srcArray)
                                                      : memory_at(client, copy.srcDevice)};
}

int32_t set_kernel(Session& s, Node& node) {
    NodeParams& params = node.spec.fixed;
    std::shared_ptr<Function> function;
    if (const int32_t r = resolve_function(s, params.object, params.context, &function);
        r != CUDA_SUCCESS) {
        return r;
    }
    if (const CUresult r = check_launch(*function, params.shape); r != CUDA_SUCCESS) {
        return r;
    }
    node.function = function->handle;
    params.context = function->module->context->handle;
    return node.spec.arguments.size() == function->code->param_bytes ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_INVALID_VALUE;
}

// One piece of an executable's work. `after`: places of others in the list.
struct Step {
    std::shared_ptr<Node> node;
    std::vector<size_t> after;
    std::shared_ptr<Context> context;
    std::function<void()> run; // none: only order, or an event
};

// Lists the work of a graph behind `before`; returns the steps at its end.
std::vector<size_t> list_steps(const Graph& graph, const std::vector<size_t>& before,
                               std::vector<Step>* out) {
    std::map<uint64_t, std::vector<size_t>> ends;
    std::vector<std::shared_ptr<Node>> order;
    std::vector<size_t> last;
    graph.sorted(&order);
    for (const auto& node : order) {
        std::vector<size_t> after = node->after.empty() ? before : std::vector<size_t>();
        for (const uint64_t one : node->after) {
            after.insert(after.end(), ends[one].begin(), ends[one].end());
        }
        if (node->child != nullptr) {
            ends[node->handle] = list_steps(*node->child, after, out);
        } else {
            ends[node->handle] = {out->size()};
            out->push_back({node, std::move(after), nullptr, nullptr});
        }
        if (graph.dependents(node->handle).empty()) {
            const auto& end = ends[node->handle];
            last.insert(last.end(), end.begin(), end.end());
        }
    }
    return order.empty() ? before : last;
}

// Finds what the step needs, as it is now.
int32_t bind(Session& s, const std::shared_ptr<Stream>& stream, Step* step) {
    const Node& node = *step->node;
    const NodeParams& params = node.spec.fixed;
    step->context = stream->context;
    if (params.context != 0) {
        if (const int32_t r = alive_context(s.client, params.context); r != CUDA_SUCCESS) {
            return r;
        }
        step->context = s.client.contexts[params.context];
    }
    if (!node.enabled) {
        return CUDA_SUCCESS;
    }
    switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
        const auto function = s.client.find<Function>(node.function);
        if (function == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        const std::string_view arguments(reinterpret_cast<const char*>(node.spec.arguments.data()),
                                         node.spec.arguments.size());
        step->run = kernel_work(s.client, *function, params.shape, arguments, stream->handle);
        break;
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        step->run = copy_work(s.client, params.copy, step->context);
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        step->run = fill_work(s.client, params.fill, step->context);
        break;
    case CU_GRAPH_NODE_TYPE_HOST:
        if (s.client.callback_socket < 0) {
            return CUDA_ERROR_NOT_PERMITTED;
        }
        step->run = host_work(s.client, HostKind::kHostFunc, params.object, params.data, 0);
        break;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        if (s.client.find<Event>(params.object) == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        break;
    default:
        break;
    }
    return CUDA_SUCCESS;
}

// True if a graph would become its own child, or would be moved out of the node that has it.
// Driver 580 ends the process when a graph is copied into itself.
bool goes_around(const Client& client, const Graph& into, const NodeParams& params) {
    const auto moved = client.find<Graph>(params.object);
    if (params.type != CU_GRAPH_NODE_TYPE_GRAPH || moved == nullptr) {
        return false;
    }
    if (params.data == 0) {
        return moved.get() == &into;
    }
    const Graph* around = &into;
    while (around != nullptr && around != moved.get()) {
        const auto node = client.find<Node>(around->owner_node);
        around = node == nullptr ? nullptr : client.find<Graph>(node->graph).get();
    }
    return around != nullptr || moved->owner_node != 0;
}

// A queue whose newest work is before the step anyway, or one that this launch has not used.
size_t lane_for(Executable& executable, std::vector<TicketRef>* newest,
                const std::vector<TicketRef>& after) {
    for (size_t lane = 0; lane < newest->size(); ++lane) {
        if (std::find(after.begin(), after.end(), (*newest)[lane]) != after.end()) {
            return lane;
        }
    }
    newest->emplace_back();
    if (executable.lanes.size() < newest->size()) {
        executable.lanes.push_back(std::make_shared<Worker>());
    }
    return newest->size() - 1;
}

} // namespace

std::shared_ptr<Node> Graph::find(uint64_t node) const {
    for (const auto& one : nodes) {
        if (one->handle == node) {
            return one;
        }
        if (one->child != nullptr) {
            if (auto inside = one->child->find(node)) {
                return inside;
            }
        }
    }
    return nullptr;
}

std::vector<uint64_t> Graph::dependents(uint64_t node) const {
    std::vector<uint64_t> found;
    for (const auto& one : nodes) {
        if (std::find(one->after.begin(), one->after.end(), node) != one->after.end()) {
            found.push_back(one->handle);
        }
    }
    return found;
}

bool Graph::sorted(std::vector<std::shared_ptr<Node>>* out) const {
    std::set<uint64_t> done;
    std::vector<std::shared_ptr<Node>> left = nodes;
    for (bool found = true; found && !left.empty();) {
        std::vector<std::shared_ptr<Node>> later;
        for (const auto& node : left) {
            const bool ready =
                std::all_of(node->after.begin(), node->after.end(),
                            [&](uint64_t before) { return done.count(before) != 0; });
            (ready ? *out : later).push_back(node);
            if (ready) {
                done.insert(node->handle);
            }
        }
        found = later.size() < left.size();
        left.swap(later);
    }
    return left.empty() && std::all_of(nodes.begin(), nodes.end(), [](const auto& node) {
               std::vector<std::shared_ptr<Node>> inside;
               return node->child == nullptr || node->child->sorted(&inside);
           });
}

Executable::~Executable() {
    for (const auto& lane : lanes) {
        lane->close();
    }
}

std::shared_ptr<Graph> new_graph(Client& client) {
    return client.make<Graph>();
}

bool is_moved(const Client& client, const Graph& graph) {
    const auto node = client.find<Node>(graph.owner_node);
    return node != nullptr && node->spec.fixed.data != 0;
}

std::shared_ptr<Graph> copy_graph(Client& client, const Graph& graph, bool listed) {
    auto copy = listed ? new_graph(client) : client.make_own<Graph>(graph.handle);
    std::map<uint64_t, uint64_t> handles;
    copy->origin = graph.handle;
    for (const auto& node : graph.nodes) {
        auto made = listed ? client.make<Node>() : client.make_own<Node>(node->handle);
        handles[node->handle] = made->handle;
        made->spec = node->spec;
        made->function = node->function;
        made->memory = node->memory;
        made->graph = copy->handle;
        made->origin = node->handle;
        made->after = node->after;
        made->enabled = node->enabled;
        if (node->child != nullptr) {
            made->child = copy_graph(client, *node->child, listed);
            made->child->owner_node = made->handle;
            made->spec.fixed.object = made->child->handle;
            made->spec.fixed.data = 0; // it was not moved there
        }
        copy->nodes.push_back(std::move(made));
    }
    for (const auto& node : copy->nodes) {
        for (uint64_t& before : node->after) {
            before = handles[before];
        }
    }
    return copy;
}

void remove_node(Client& client, Graph& graph, uint64_t node) {
    const auto at = std::find_if(graph.nodes.begin(), graph.nodes.end(),
                                 [&](const auto& one) { return one->handle == node; });
    if ((*at)->child != nullptr) {
        remove_graph(client, (*at)->child);
    }
    graph.nodes.erase(at);
    for (const auto& other : graph.nodes) {
        auto& after = other->after;
        after.erase(std::remove(after.begin(), after.end(), node), after.end());
    }
    client.objects.erase(node);
}

void remove_graph(Client& client, const std::shared_ptr<Graph>& graph) {
    while (!graph->nodes.empty()) {
        remove_node(client, *graph, graph->nodes.back()->handle);
    }
    client.objects.erase(graph->handle);
}

int32_t set_spec(Session& s, Node& node, NodeSpec spec) {
    node.spec = std::move(spec);
    const NodeParams& params = node.spec.fixed;
    int32_t error = CUDA_SUCCESS;
    switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return set_kernel(s, node);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
        error = params.context == 0 ? CUDA_ERROR_INVALID_VALUE
                                    : alive_context(s.client, params.context);
        if (error != CUDA_SUCCESS) {
            return error;
        }
        node.memory = memory_of(s.client, params);
        return params.type == CU_GRAPH_NODE_TYPE_MEMCPY ? check_copy(s.client, params.copy)
                                                        : check_fill(s.client, params.fill);
    case CU_GRAPH_NODE_TYPE_HOST:
        return params.object == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return s.client.find<Event>(params.object) == nullptr ? CUDA_ERROR_INVALID_VALUE
                                                              : CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
        const auto graph = s.client.find<Graph>(params.object);
        if (graph == nullptr || graph->capturing || is_moved(s.client, *graph)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        node.child = params.data != 0 ? graph : copy_graph(s.client, *graph, true);
        node.child->owner_node = node.handle;
        node.spec.fixed.object = node.child->handle;
        return CUDA_SUCCESS;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

std::shared_ptr<Node> add_node(Session& s, Graph& graph, const std::vector<uint64_t>& after,
                               NodeSpec spec, int32_t* error) {
    const std::set<uint64_t> distinct(after.begin(), after.end());
    const bool known = std::all_of(after.begin(), after.end(), [&](uint64_t handle) {
        const auto node = s.client.find<Node>(handle);
        return node != nullptr && node->graph == graph.handle;
    });
    if (!known || distinct.size() != after.size() || goes_around(s.client, graph, spec.fixed)) {
        *error = CUDA_ERROR_INVALID_VALUE;
        return nullptr;
    }
    auto node = s.client.make<Node>();
    *error = set_spec(s, *node, std::move(spec));
    if (*error != CUDA_SUCCESS) {
        s.client.objects.erase(node->handle);
        return nullptr;
    }
    node->graph = graph.handle;
    node->after = after;
    graph.nodes.push_back(node);
    return node;
}

int32_t launch_graph(Session& s, Executable& executable, const std::shared_ptr<Stream>& stream) {
    constexpr size_t kStart = 0; // nothing but the place behind the stream's earlier work
    std::vector<Step> steps(1);
    const std::vector<size_t> ends = list_steps(*executable.graph, {kStart}, &steps);
    for (size_t i = kStart + 1; i < steps.size(); ++i) {
        if (const int32_t r = bind(s, stream, &steps[i]); r != CUDA_SUCCESS) {
            return r;
        }
    }
    const auto nothing = [] {};
    std::vector<TicketRef> before;
    if (executable.last != nullptr) {
        before.push_back(executable.last);
    }
    std::vector<TicketRef> tickets{submit(s.client, stream, nothing, std::move(before))};
    std::vector<TicketRef> newest;
    for (size_t i = kStart + 1; i < steps.size(); ++i) {
        Step& step = steps[i];
        const int32_t type = step.node->spec.fixed.type;
        const auto event = s.client.find<Event>(step.node->spec.fixed.object);
        std::vector<TicketRef> after;
        for (const size_t one : step.after) {
            after.push_back(tickets[one]);
        }
        const size_t lane = lane_for(executable, &newest, after);
        if (type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && event->ticket != nullptr) {
            after.push_back(event->ticket);
        }
        if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
            step.run = record_work(*event);
        }
        tickets.push_back(submit_to(*executable.lanes[lane], step.context,
                                    step.run != nullptr ? std::move(step.run) : nothing,
                                    std::move(after)));
        newest[lane] = tickets.back();
        if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
            event->ticket = tickets.back();
        }
    }
    std::vector<TicketRef> all;
    for (const size_t one : ends) {
        all.push_back(tickets[one]);
    }
    executable.last = submit(s.client, stream, nothing, std::move(all));
    return CUDA_SUCCESS;
}

namespace {

bool same_copy_kind(const CUDA_MEMCPY3D_v2& from, const CUDA_MEMCPY3D_v2& to) {
    return from.srcMemoryType == to.srcMemoryType && from.dstMemoryType == to.dstMemoryType;
}

bool same_fill_kind(const CUDA_MEMSET_NODE_PARAMS_v1& from, const CUDA_MEMSET_NODE_PARAMS_v1& to) {
    return from.height == to.height &&
           (from.height == 1 || (from.width == to.width && from.pitch == to.pitch &&
                                 from.elementSize == to.elementSize));
}

} // namespace

CUgraphExecUpdateResult update_allowed(const Node& from, const Node& to) {
    const NodeParams& a = from.spec.fixed;
    const NodeParams& b = to.spec.fixed;
    if (a.type != b.type) {
        return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    }
    if (a.type == CU_GRAPH_NODE_TYPE_KERNEL) {
        return a.context != b.context ? CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE
               : a.shape.cooperative != b.shape.cooperative
                   ? CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED
                   : CU_GRAPH_EXEC_UPDATE_SUCCESS;
    }
    const bool same = a.context == b.context && from.memory == to.memory &&
                      (a.type != CU_GRAPH_NODE_TYPE_MEMCPY || same_copy_kind(a.copy, b.copy)) &&
                      (a.type != CU_GRAPH_NODE_TYPE_MEMSET || same_fill_kind(a.fill, b.fill));
    return same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
}

} // namespace flowgpu::emu
