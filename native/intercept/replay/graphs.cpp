#include "graphs.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "aliases.h"
#include "recorded.h"
#include "registry.h"
#include "task.h"

namespace flowgpu::replay {

namespace {

// Attributes of kernel nodes that are values of their own; others name objects or edges.
constexpr CUlaunchAttributeID kAttributes[] = {
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
    CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
};

// Null: it has ended, or is a primary one that nobody has.
const Object* living(CUcontext context) {
    const Object* object = object_of(context);
    return object && object->active ? object : nullptr;
}

// A driver crashes on a context that has ended.
bool is_there(CUcontext context) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    return living(context) != nullptr;
}

class InContext {
  public:
    explicit InContext(CUcontext context)
        : pushed_(is_there(context) &&
                  FG_DRIVER(cuCtxPushCurrent_v2)(to_driver(context)) == CUDA_SUCCESS) {}
    ~InContext() {
        CUcontext popped = nullptr;
        if (pushed_)
            FG_DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    bool pushed_;
};

void need(NodePlan& node, const Object* object) {
    node.objects.emplace_back(object->slot, object->serial);
}

// The program's handle, if it has one; the graph will need what it names.
template <class H> H known(H driver, NodePlan& node) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto& index = registry().index_of(KindOf<H>::kind);
    auto found = index.find(static_cast<void*>(driver));
    if (found == index.end())
        return nullptr;
    need(node, found->second);
    return reinterpret_cast<H>(found->second->slot);
}

// What is kept of the program's graph or node that is this one of the driver's.
template <class H, class F> void with_state(H driver, F work) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto& index = registry().index_of(KindOf<H>::kind);
    auto found = index.find(static_cast<void*>(driver));
    if (found != index.end() && found->second->graph)
        work(*found->second->graph);
}

bool is_memory(CUdeviceptr address) {
    int type = 0;
    return FG_DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) ==
           CUDA_SUCCESS;
}

bool is_reserved(CUdeviceptr address) {
    Region found;
    return address_map().find(address, kReserved, &found);
}

// Pageable memory of the host is none of the driver's; `device`: it cannot be that.
void need_memory(NodePlan& node, CUdeviceptr first, size_t bytes, bool device, std::string* why) {
    for (CUdeviceptr address : {first, first + bytes - 1}) {
        if (is_memory(address))
            node.memory.push_back(address);
        else if (device || is_reserved(address))
            *why = "with memory that has ended";
    }
}

// What is done in a context of its own needs that.
bool need_context(NodePlan& node, std::string* why) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const Object* object = living(node.context);
    if (object)
        need(node, object);
    else
        *why = "with a node in a context that is not known or has ended";
    return object;
}

// The library's kernel that the driver has loaded as this function, in the context that is current.
// A program that launches a kernel by its own handle never has the function's.
CUkernel kernel_of(CUfunction function, NodePlan& node) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    Registry& r = registry();
    if (r.ended_functions.count(function)) // the driver must not be asked about it
        return nullptr;
    const auto kernel = [&](const Object& object) {
        need(node, &object);
        return reinterpret_cast<CUkernel>(object.slot);
    };
    auto found = r.kernel_functions.find(function);
    if (found != r.kernel_functions.end()) {
        auto object = r.objects.find(found->second);
        return object == r.objects.end() ? nullptr : kernel(*object->second);
    }
    const char* wanted = nullptr;
    if (FG_DRIVER(cuFuncGetName)(&wanted, function) != CUDA_SUCCESS)
        return nullptr;
    for (const auto& [serial, object] : r.objects) {
        const char* name = nullptr;
        CUfunction loaded = nullptr;
        // By name first: to ask for the function loads it.
        if (object->kind == Kind::kernel &&
            FG_DRIVER(cuKernelGetName)(&name, object->driver<CUkernel>()) == CUDA_SUCCESS &&
            strcmp(name, wanted) == 0 &&
            FG_DRIVER(cuKernelGetFunction)(&loaded, object->driver<CUkernel>()) == CUDA_SUCCESS &&
            loaded == function) {
            r.kernel_functions[function] = serial;
            return kernel(*object);
        }
    }
    return nullptr;
}

// Which kernel a node launches: a function of a module, or a library's kernel under any name.
bool know_kernel(NodePlan& node) {
    CUDA_KERNEL_NODE_PARAMS_v2& params = node.kernel;
    const CUfunction function = params.func ? known(params.func, node) : nullptr;
    CUkernel kernel = params.func ? reinterpret_cast<CUkernel>(params.func) : params.kern;
    kernel = function ? nullptr : known(kernel, node);
    if (!function && !kernel && params.func)
        kernel = kernel_of(params.func, node);
    params.func = function;
    params.kern = kernel;
    return function || kernel;
}

// Copies the arguments; the driver's own do not outlive it. False: it does not give them.
bool keep_arguments(NodePlan& node) {
    CUDA_KERNEL_NODE_PARAMS_v2& params = node.kernel;
    const CUfunction launched =
        params.func ? params.func : reinterpret_cast<CUfunction>(params.kern);
    const char* packed = nullptr;
    for (void** extra = params.extra; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            packed = static_cast<const char*>(extra[1]);
    size_t offset = 0;
    size_t bytes = 0;
    CUresult result = CUDA_SUCCESS;
    node.offsets.clear();
    node.arguments.clear();
    for (size_t i = 0; result == CUDA_SUCCESS; i++) {
        result = parameter_of(launched, i, &offset, &bytes);
        if (result != CUDA_SUCCESS)
            break;
        if (!packed && !params.kernelParams)
            return false;
        node.offsets.push_back(offset);
        node.arguments.resize(std::max(node.arguments.size(), offset + bytes));
        const void* from = packed ? packed + offset : params.kernelParams[i];
        memcpy(node.arguments.data() + offset, from, bytes);
    }
    params.kernelParams = nullptr;
    params.extra = nullptr;
    return result == CUDA_ERROR_INVALID_VALUE; // there is no parameter of that number
}

// True if the memory belongs to the current context's device. Host memory belongs to every device.
bool of_current_device(CUdeviceptr address) {
    CUdevice device = -1;
    FG_DRIVER(cuCtxGetDevice)(&device);
    int owner = 0;
    CUresult result =
        FG_DRIVER(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    return result != CUDA_SUCCESS || owner < 0 || owner == device;
}

CUresult read_kernel(CUgraphNode driver, NodePlan& node, std::string* why) {
    CUDA_KERNEL_NODE_PARAMS_v2 params = {};
    CUresult result = FG_DRIVER(cuGraphKernelNodeGetParams_v2)(driver, &params);
    if (result != CUDA_SUCCESS)
        return result;
    keep_kernel(node, params, why);
    for (CUlaunchAttributeID id : kAttributes) {
        CUlaunchAttributeValue value = {};
        if (FG_DRIVER(cuGraphKernelNodeGetAttribute)(driver, id, &value) == CUDA_SUCCESS)
            node.attributes.emplace_back(id, value);
    }
    return result;
}

CUresult read_memset(CUgraphNode driver, NodePlan& node, std::string* why) {
    CUDA_MEMSET_NODE_PARAMS params = {};
    CUresult result = FG_DRIVER(cuGraphMemsetNodeGetParams)(driver, &params);
    if (result == CUDA_SUCCESS)
        keep_memset(node, params, why);
    return result;
}

CUresult read_copy(CUgraphNode driver, NodePlan& node, std::string* why) {
    CUDA_MEMCPY3D params = {};
    CUresult result = FG_DRIVER(cuGraphMemcpyNodeGetParams)(driver, &params);
    if (result == CUDA_SUCCESS)
        keep_copy(node, params, why);
    return result;
}

CUresult read_event(CUgraphNode driver, NodePlan& node, std::string* why) {
    CUevent event = nullptr;
    CUresult result = node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD
                          ? FG_DRIVER(cuGraphEventRecordNodeGetEvent)(driver, &event)
                          : FG_DRIVER(cuGraphEventWaitNodeGetEvent)(driver, &event);
    if (result == CUDA_SUCCESS)
        keep_event(node, event, why);
    return result;
}

CUresult read_into(GraphPlan& plan, CUgraph driver, CUcontext context, std::string* why);

CUresult read_child(CUgraphNode driver, NodePlan& node, std::string* why) {
    CUgraph graph = nullptr;
    CUresult result = FG_DRIVER(cuGraphChildGraphNodeGetGraph)(driver, &graph);
    node.child = std::make_shared<GraphPlan>();
    with_state(graph, [&](const GraphState& state) { node.moved = state.moved; });
    return result == CUDA_SUCCESS ? read_into(*node.child, graph, node.context, why) : result;
}

CUresult read_node(CUgraphNode driver, CUcontext context, NodePlan& node, std::string* why) {
    node.origin = driver;
    node.context = context;
    with_state(driver, [&](const GraphState& state) {
        if (state.context)
            node.context = state.context;
    });
    CUresult result = FG_DRIVER(cuGraphNodeGetType)(driver, &node.type);
    if (result != CUDA_SUCCESS)
        return result;
    switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return read_kernel(driver, node, why);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return read_copy(driver, node, why);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return read_memset(driver, node, why);
    case CU_GRAPH_NODE_TYPE_HOST:
        return FG_DRIVER(cuGraphHostNodeGetParams)(driver, &node.host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return read_event(driver, node, why);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return read_child(driver, node, why);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return result;
    default:
        *why = "with a node of memory, a semaphore, a memory operation or a condition";
        return result;
    }
}

CUresult read_edges(CUgraph driver, GraphPlan& plan) {
    size_t count = 0;
    CUresult result = FG_DRIVER(cuGraphGetEdges_v2)(driver, nullptr, nullptr, nullptr, &count);
    std::vector<CUgraphNode> from(count);
    std::vector<CUgraphNode> to(count);
    plan.data.resize(count);
    if (result == CUDA_SUCCESS && count)
        result =
            FG_DRIVER(cuGraphGetEdges_v2)(driver, from.data(), to.data(), plan.data.data(), &count);
    std::unordered_map<CUgraphNode, size_t> places;
    for (size_t i = 0; i < plan.nodes.size(); i++)
        places[plan.nodes[i].origin] = i;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        plan.from.push_back(places[from[i]]);
        plan.to.push_back(places[to[i]]);
    }
    return result;
}

// `context`: of nodes of which nothing else is known.
CUresult read_into(GraphPlan& plan, CUgraph driver, CUcontext context, std::string* why) {
    plan.origin = driver;
    with_state(driver, [&](const GraphState& state) {
        if (state.context)
            context = state.context;
        if (state.lost)
            *why = state.lost;
    });
    size_t count = 0;
    CUresult result = FG_DRIVER(cuGraphGetNodes)(driver, nullptr, &count);
    std::vector<CUgraphNode> nodes(count);
    if (result == CUDA_SUCCESS && count)
        result = FG_DRIVER(cuGraphGetNodes)(driver, nodes.data(), &count);
    plan.nodes.resize(count);
    for (size_t i = 0; result == CUDA_SUCCESS && why->empty() && i < count; i++)
        result = read_node(nodes[i], context, plan.nodes[i], why);
    if (result == CUDA_SUCCESS && why->empty())
        result = read_edges(driver, plan);
    return result;
}

// The driver's functions that reading needs; the newest came with driver 12.4.
bool can_read() {
    return FG_DRIVER(cuFuncGetParamInfo) && FG_DRIVER(cuKernelGetParamInfo) &&
           FG_DRIVER(cuGraphGetEdges_v2) && FG_DRIVER(cuGraphAddDependencies_v2);
}

// Which nodes of a copy are those of its original, as long as the driver knows it.
void ask_twins(CUgraph clone) {
    CUgraph source = nullptr;
    with_state(to_driver(clone), [&](const GraphState& state) {
        const Object* object = object_of(state.source.first);
        if (object && object->serial == state.source.second)
            source = object->driver<CUgraph>();
    });
    size_t count = 0;
    if (!source || FG_DRIVER(cuGraphGetNodes)(source, nullptr, &count) != CUDA_SUCCESS)
        return;
    std::vector<CUgraphNode> nodes(count);
    FG_DRIVER(cuGraphGetNodes)(source, nodes.data(), &count);
    std::unordered_map<CUgraphNode, CUgraphNode> twins;
    for (CUgraphNode node : nodes)
        if (FG_DRIVER(cuGraphNodeFindInClone)(&twins[node], node, to_driver(clone)) != CUDA_SUCCESS)
            twins.erase(node);
    with_state(to_driver(clone), [&](GraphState& state) { state.twins.merge(twins); });
}

} // namespace

void keep_kernel(NodePlan& node, const CUDA_KERNEL_NODE_PARAMS_v2& params, std::string* why) {
    node.objects.clear();
    node.kernel = params;
    if (params.ctx)
        if (CUcontext context = known(params.ctx, node))
            node.context = context;
    InContext current(node.context);
    if (!know_kernel(node)) {
        *why = "with a kernel that has ended or was not asked for by name";
        return;
    }
    node.kernel.ctx = nullptr;
    if (!node.kernel.func && !need_context(node, why))
        return;
    if (!keep_arguments(node))
        *why = "with a kernel whose arguments the driver does not tell";
}

void name_kernel(CUgraphNode driver, CUDA_KERNEL_NODE_PARAMS_v2& params) {
    NodePlan node;
    node.kernel = params;
    with_state(driver, [&](const GraphState& state) { node.context = state.context; });
    InContext current(node.context);
    if (!know_kernel(node))
        return;
    const CUfunction alias = reinterpret_cast<CUfunction>(to_driver(node.kernel.kern));
    if (params.func && node.kernel.kern && params.func != alias)
        recorded::cuKernelGetFunction(&node.kernel.func, node.kernel.kern);
    else if (params.func && node.kernel.kern)
        node.kernel.func = reinterpret_cast<CUfunction>(node.kernel.kern);
    params.func = params.func ? node.kernel.func : nullptr;
    params.kern = params.kern ? to_program(params.kern) : nullptr;
    params.ctx = params.ctx ? to_program(params.ctx) : nullptr;
}

void keep_memset(NodePlan& node, const CUDA_MEMSET_NODE_PARAMS& params, std::string* why) {
    InContext current(node.context);
    node.objects.clear();
    node.memory.clear();
    node.fill = params;
    if (!need_context(node, why))
        return;
    if (!of_current_device(params.dst))
        *why = "with a memset on another device than its context's";
    const size_t rows = params.height > 1 ? (params.height - 1) * params.pitch : 0;
    need_memory(node, params.dst, rows + params.width * params.elementSize, true, why);
}

void keep_copy(NodePlan& node, const CUDA_MEMCPY3D& params, std::string* why) {
    InContext current(node.context);
    node.objects.clear();
    node.memory.clear();
    node.copy = params;
    if (!need_context(node, why))
        return;
    const size_t rows = std::max<size_t>(params.Height, 1);
    const size_t layers = std::max<size_t>(params.Depth, 1);
    const auto keep_side = [&](CUmemorytype type, CUarray& array, CUdeviceptr base, size_t pitch,
                               size_t height, size_t z, size_t y, size_t x) {
        if (type == CU_MEMORYTYPE_ARRAY)
            array = known(array, node);
        if (type == CU_MEMORYTYPE_ARRAY && !array)
            *why = "with a copy of an array that has ended";
        else if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_ARRAY &&
                 !of_current_device(base))
            *why = "with a copy on another device than its context's";
        else if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_ARRAY)
            need_memory(node, base + (z * height + y) * pitch + x,
                        ((layers - 1) * height + rows - 1) * pitch + params.WidthInBytes,
                        type == CU_MEMORYTYPE_DEVICE, why);
    };
    keep_side(params.srcMemoryType, node.copy.srcArray, params.srcDevice, params.srcPitch,
              params.srcHeight, params.srcZ, params.srcY, params.srcXInBytes);
    keep_side(params.dstMemoryType, node.copy.dstArray, params.dstDevice, params.dstPitch,
              params.dstHeight, params.dstZ, params.dstY, params.dstXInBytes);
}

void keep_event(NodePlan& node, CUevent event, std::string* why) {
    node.objects.clear();
    node.event = known(event, node);
    if (!node.event)
        *why = "with an event that has ended";
}

std::shared_ptr<GraphPlan> read_graph(CUgraph driver, std::string* why) {
    auto plan = std::make_shared<GraphPlan>();
    CUresult result =
        can_read() ? read_into(*plan, driver, nullptr, why) : CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS && why->empty())
        return plan;
    if (why->empty())
        *why = "that the driver does not tell";
    return nullptr;
}

void read_graphs() {
    std::vector<CUgraph> graphs;
    std::vector<CUgraph> parts;
    std::vector<CUgraph> ended;
    {
        std::lock_guard<std::mutex> lock(registry().mutex);
        registry().frontiers.clear();
        for (const auto& [serial, object] : registry().objects)
            if (object->kind == Kind::graph && object->graph)
                (object->graph->capturing ? ended
                 : object->parent         ? parts
                                          : graphs)
                    .push_back(reinterpret_cast<CUgraph>(object->slot));
    }
    for (CUgraph graph : ended)
        end(graph);
    for (CUgraph graph : parts)
        ask_twins(graph);
    for (CUgraph graph : graphs) {
        std::string why;
        const auto plan = read_graph(to_driver(graph), &why);
        ask_twins(graph);
        with_object(graph, [&](Object& object) {
            object.graph->plan = plan;
            object.why = why;
            object.make = nullptr;
            if (plan)
                object.make = Make(I_cuGraphCreate, [plan](void** made) {
                    return make_graph(*plan, reinterpret_cast<CUgraph*>(made));
                });
        });
    }
}

bool keeps_attribute(CUlaunchAttributeID id) {
    return std::find(std::begin(kAttributes), std::end(kAttributes), id) != std::end(kAttributes);
}

bool complete(const GraphPlan& plan) {
    return std::all_of(plan.nodes.begin(), plan.nodes.end(), [](const NodePlan& node) {
        return std::all_of(node.objects.begin(), node.objects.end(),
                           [](const auto& one) {
                               const Object* object = object_of(one.first);
                               return object && object->serial == one.second;
                           }) &&
               std::all_of(node.memory.begin(), node.memory.end(), is_memory) &&
               (!node.child || complete(*node.child));
    });
}

bool take_place(GraphPlan& plan, const GraphPlan& before) {
    if (plan.nodes.size() != before.nodes.size())
        return false;
    plan.origin = before.origin;
    for (size_t i = 0; i < plan.nodes.size(); i++) {
        NodePlan& node = plan.nodes[i];
        const NodePlan& old = before.nodes[i];
        node.origin = old.origin;
        node.own = old.own;
        node.enabled = old.enabled;
        if (node.type != old.type || (node.child && !take_place(*node.child, *old.child)))
            return false;
    }
    return true;
}

CUgraphNode node_to_program(CUgraphNode driver, CUgraph graph, bool fresh, CUcontext context) {
    Object* const within = object_of(graph);
    if (!driver || !within || !within->graph)
        return driver;
    return note(driver, fresh, [&](Object& object) {
        object.context = nullptr;
        object.parent = within;
        object.graph = std::make_shared<GraphState>();
        object.graph->context = context;
        GraphState& state = *within->graph;
        state.parts.insert(&object);
        if (!state.context)
            state.context = context;
        state.mixed = state.mixed || (context && context != state.context);
    });
}

} // namespace flowgpu::replay
