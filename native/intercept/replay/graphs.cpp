#include "graphs.h"

#include <algorithm>
#include <cstring>

#include "registry.h"

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

// The program's handle, if it has one; the graph will need what it names.
template <class H> H known(H driver, GraphPlan& plan) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto& index = registry().index_of(KindOf<H>::kind);
    auto found = index.find(static_cast<void*>(driver));
    if (found == index.end())
        return nullptr;
    const Object* object = found->second;
    plan.objects.emplace_back(object->slot, object->serial);
    return reinterpret_cast<H>(object->slot);
}

bool is_memory(CUdeviceptr address) {
    int type = 0;
    return FG_DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) ==
           CUDA_SUCCESS;
}

// Pageable memory of the host is none of the driver's.
void need_memory(CUdeviceptr first, size_t bytes, GraphPlan& plan) {
    for (CUdeviceptr address : {first, first + bytes - 1})
        if (is_memory(address))
            plan.memory.push_back(address);
}

// The library's kernel that the driver has loaded as this function, in the context that is current.
// A program that launches a kernel by its own handle never has the function's.
CUkernel kernel_of(CUfunction function) {
    const char* wanted = nullptr;
    if (FG_DRIVER(cuFuncGetName)(&wanted, function) != CUDA_SUCCESS)
        return nullptr;
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& [serial, object] : registry().objects) {
        const char* name = nullptr;
        CUfunction loaded = nullptr;
        // By name first: to ask for the function loads it.
        if (object->kind == Kind::kernel &&
            FG_DRIVER(cuKernelGetName)(&name, object->driver<CUkernel>()) == CUDA_SUCCESS &&
            strcmp(name, wanted) == 0 &&
            FG_DRIVER(cuKernelGetFunction)(&loaded, object->driver<CUkernel>()) == CUDA_SUCCESS &&
            loaded == function)
            return object->driver<CUkernel>();
    }
    return nullptr;
}

// Which kernel a node launches: a function of a module, or a library's kernel under any name.
bool know_kernel(CUDA_KERNEL_NODE_PARAMS_v2& params, GraphPlan& plan) {
    const CUfunction function = params.func ? known(params.func, plan) : nullptr;
    CUkernel kernel = params.func ? reinterpret_cast<CUkernel>(params.func) : params.kern;
    kernel = function ? nullptr : known(kernel, plan);
    if (!function && !kernel && params.func)
        kernel = known(kernel_of(params.func), plan);
    params.func = function;
    params.kern = kernel;
    return function || kernel;
}

CUresult parameter(const CUDA_KERNEL_NODE_PARAMS_v2& params, size_t index, size_t* offset,
                   size_t* bytes) {
    if (params.func)
        return FG_DRIVER(cuFuncGetParamInfo)(to_driver(params.func), index, offset, bytes);
    return FG_DRIVER(cuKernelGetParamInfo)(to_driver(params.kern), index, offset, bytes);
}

// Copies the arguments; the driver's own do not outlive it. False: it does not give them.
bool keep_arguments(NodePlan& node) {
    CUDA_KERNEL_NODE_PARAMS_v2& params = node.kernel;
    const char* packed = nullptr;
    for (void** extra = params.extra; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            packed = static_cast<const char*>(extra[1]);
    size_t offset = 0;
    size_t bytes = 0;
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; result == CUDA_SUCCESS; i++) {
        result = parameter(params, i, &offset, &bytes);
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

CUresult read_kernel(CUgraphNode driver, NodePlan& node, GraphPlan& plan, std::string* why) {
    CUresult result = FG_DRIVER(cuGraphKernelNodeGetParams_v2)(driver, &node.kernel);
    if (result != CUDA_SUCCESS)
        return result;
    if (!know_kernel(node.kernel, plan)) {
        *why = "with a kernel that was not asked for by name";
        return result;
    }
    node.kernel.ctx = nullptr;
    if (!keep_arguments(node))
        *why = "with a kernel whose arguments the driver does not tell";
    for (CUlaunchAttributeID id : kAttributes) {
        CUlaunchAttributeValue value = {};
        if (FG_DRIVER(cuGraphKernelNodeGetAttribute)(driver, id, &value) == CUDA_SUCCESS)
            node.attributes.emplace_back(id, value);
    }
    return result;
}

// Whether memory is of the device in whose context the node is done; host memory is of any.
bool of_device(CUdeviceptr address, CUdevice device) {
    int owner = 0;
    CUresult result =
        FG_DRIVER(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    return result != CUDA_SUCCESS || owner < 0 || owner == device;
}

CUdevice device_of(CUcontext context) {
    CUdevice device = -1;
    CUcontext popped = nullptr;
    if (FG_DRIVER(cuCtxPushCurrent_v2)(to_driver(context)) == CUDA_SUCCESS) {
        FG_DRIVER(cuCtxGetDevice)(&device);
        FG_DRIVER(cuCtxPopCurrent_v2)(&popped);
    }
    return device;
}

CUresult read_memset(CUgraphNode driver, NodePlan& node, GraphPlan& plan, std::string* why) {
    CUDA_MEMSET_NODE_PARAMS& fill = node.fill;
    CUresult result = FG_DRIVER(cuGraphMemsetNodeGetParams)(driver, &fill);
    if (result != CUDA_SUCCESS)
        return result;
    if (!of_device(fill.dst, device_of(node.context)))
        *why = "with a memset on another device than its stream's";
    const size_t rows = fill.height > 1 ? (fill.height - 1) * fill.pitch : 0;
    need_memory(fill.dst, rows + fill.width * fill.elementSize, plan);
    return result;
}

CUresult read_copy(CUgraphNode driver, NodePlan& node, GraphPlan& plan, std::string* why) {
    CUDA_MEMCPY3D& copy = node.copy;
    CUresult result = FG_DRIVER(cuGraphMemcpyNodeGetParams)(driver, &copy);
    if (result != CUDA_SUCCESS)
        return result;
    const CUdevice device = device_of(node.context);
    if (copy.srcMemoryType == CU_MEMORYTYPE_ARRAY || copy.dstMemoryType == CU_MEMORYTYPE_ARRAY)
        *why = "with a copy of an array";
    else if (copy.Depth > 1)
        *why = "with a copy of three dimensions";
    else if (!of_device(copy.srcDevice, device) || !of_device(copy.dstDevice, device))
        *why = "with a copy on another device than its stream's";
    const auto span = [&](size_t pitch) { return (copy.Height - 1) * pitch + copy.WidthInBytes; };
    if (copy.srcMemoryType != CU_MEMORYTYPE_HOST)
        need_memory(copy.srcDevice + copy.srcY * copy.srcPitch + copy.srcXInBytes,
                    span(copy.srcPitch), plan);
    if (copy.dstMemoryType != CU_MEMORYTYPE_HOST)
        need_memory(copy.dstDevice + copy.dstY * copy.dstPitch + copy.dstXInBytes,
                    span(copy.dstPitch), plan);
    return result;
}

CUresult read_event(CUgraphNode driver, NodePlan& node, GraphPlan& plan, std::string* why) {
    CUevent event = nullptr;
    CUresult result = node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD
                          ? FG_DRIVER(cuGraphEventRecordNodeGetEvent)(driver, &event)
                          : FG_DRIVER(cuGraphEventWaitNodeGetEvent)(driver, &event);
    node.event = known(event, plan);
    if (result == CUDA_SUCCESS && !node.event)
        *why = "with an event that has ended";
    return result;
}

CUresult read_node(CUgraphNode driver, CUcontext context, NodePlan& node, GraphPlan& plan,
                   std::string* why) {
    CUresult result = FG_DRIVER(cuGraphNodeGetType)(driver, &node.type);
    if (result != CUDA_SUCCESS)
        return result;
    node.context = context;
    switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return read_kernel(driver, node, plan, why);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return read_copy(driver, node, plan, why);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return read_memset(driver, node, plan, why);
    case CU_GRAPH_NODE_TYPE_HOST:
        return FG_DRIVER(cuGraphHostNodeGetParams)(driver, &node.host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return read_event(driver, node, plan, why);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return result;
    default:
        *why = "with a node of a graph, memory, a semaphore, a memory operation or a condition";
        return result;
    }
}

CUresult read_edges(CUgraph driver, const std::vector<CUgraphNode>& nodes, GraphPlan& plan) {
    size_t count = 0;
    CUresult result = FG_DRIVER(cuGraphGetEdges_v2)(driver, nullptr, nullptr, nullptr, &count);
    std::vector<CUgraphNode> from(count);
    std::vector<CUgraphNode> to(count);
    plan.data.resize(count);
    if (result == CUDA_SUCCESS && count)
        result =
            FG_DRIVER(cuGraphGetEdges_v2)(driver, from.data(), to.data(), plan.data.data(), &count);
    std::unordered_map<CUgraphNode, size_t> places;
    for (size_t i = 0; i < nodes.size(); i++)
        places[nodes[i]] = i;
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        plan.from.push_back(places[from[i]]);
        plan.to.push_back(places[to[i]]);
    }
    return result;
}

// The driver's functions that reading needs; the newest came with driver 12.4.
bool can_read() {
    return FG_DRIVER(cuFuncGetParamInfo) && FG_DRIVER(cuKernelGetParamInfo) &&
           FG_DRIVER(cuGraphGetEdges_v2) && FG_DRIVER(cuGraphAddDependencies_v2);
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
    CUresult result = FG_DRIVER(cuGraphAddKernelNode_v2)(made, graph, nullptr, 0, &params);
    for (const auto& [id, wanted] : node.attributes) {
        CUlaunchAttributeValue value = {};
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuGraphKernelNodeGetAttribute)(*made, id, &value);
        if (result == CUDA_SUCCESS && memcmp(&value, &wanted, sizeof value) != 0)
            result = FG_DRIVER(cuGraphKernelNodeSetAttribute)(*made, id, &wanted);
    }
    return result;
}

CUresult add_node(const NodePlan& node, CUgraph graph, CUgraphNode* made) {
    switch (node.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return add_kernel(node, graph, made);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return FG_DRIVER(cuGraphAddMemcpyNode)(made, graph, nullptr, 0, &node.copy,
                                               to_driver(node.context));
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return FG_DRIVER(cuGraphAddMemsetNode)(made, graph, nullptr, 0, &node.fill,
                                               to_driver(node.context));
    case CU_GRAPH_NODE_TYPE_HOST:
        return FG_DRIVER(cuGraphAddHostNode)(made, graph, nullptr, 0, &node.host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return FG_DRIVER(cuGraphAddEventRecordNode)(made, graph, nullptr, 0, to_driver(node.event));
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return FG_DRIVER(cuGraphAddEventWaitNode)(made, graph, nullptr, 0, to_driver(node.event));
    default:
        return FG_DRIVER(cuGraphAddEmptyNode)(made, graph, nullptr, 0);
    }
}

CUresult fill_graph(const GraphPlan& plan, CUgraph graph) {
    CUresult result = CUDA_SUCCESS;
    std::vector<CUgraphNode> nodes;
    for (const NodePlan& node : plan.nodes) {
        CUgraphNode made = nullptr;
        if (result == CUDA_SUCCESS)
            result = add_node(node, graph, &made);
        nodes.push_back(made);
    }
    std::vector<CUgraphNode> from;
    std::vector<CUgraphNode> to;
    for (size_t i = 0; i < plan.from.size(); i++) {
        from.push_back(nodes[plan.from[i]]);
        to.push_back(nodes[plan.to[i]]);
    }
    if (result == CUDA_SUCCESS && !from.empty())
        result = FG_DRIVER(cuGraphAddDependencies_v2)(graph, from.data(), to.data(),
                                                      plan.data.data(), from.size());
    return result;
}

} // namespace

std::shared_ptr<const GraphPlan> read_graph(CUgraph driver, CUcontext context, std::string* why) {
    if (!can_read()) {
        *why = "that this driver cannot describe";
        return nullptr;
    }
    auto plan = std::make_shared<GraphPlan>();
    known(to_driver(context), *plan); // is needed, as all that its nodes name
    size_t count = 0;
    CUresult result = FG_DRIVER(cuGraphGetNodes)(driver, nullptr, &count);
    std::vector<CUgraphNode> nodes(count);
    if (result == CUDA_SUCCESS && count)
        result = FG_DRIVER(cuGraphGetNodes)(driver, nodes.data(), &count);
    for (size_t i = 0; result == CUDA_SUCCESS && why->empty() && i < count; i++)
        result = read_node(nodes[i], context, plan->nodes.emplace_back(), *plan, why);
    if (result == CUDA_SUCCESS && why->empty())
        result = read_edges(driver, nodes, *plan);
    if (result != CUDA_SUCCESS)
        *why = "that could not be read";
    return why->empty() ? plan : nullptr;
}

bool complete(const GraphPlan& plan) {
    return std::all_of(plan.objects.begin(), plan.objects.end(),
                       [](const auto& one) {
                           const Object* object = object_of(one.first);
                           return object && object->serial == one.second;
                       }) &&
           std::all_of(plan.memory.begin(), plan.memory.end(), is_memory);
}

CUresult build_graph(const GraphPlan& plan, CUgraph* driver) {
    CUresult result = FG_DRIVER(cuGraphCreate)(driver, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = fill_graph(plan, *driver);
    if (result != CUDA_SUCCESS)
        FG_DRIVER(cuGraphDestroy)(*driver);
    return result;
}

} // namespace flowgpu::replay
