// Nodes of graphs, and of executables.
#include <cstring>
#include <iterator>

#include "arguments.h"
#include "recorded.h"
#include "registry.h"

namespace flowgpu::replay::recorded {

namespace {

void refuse(unsigned symbol) {
    unsaved_calls[symbol].fetch_add(1, std::memory_order_relaxed);
}

// A graph was copied into a node: where its nodes run is as before, and they can be found.
void inherit(CUgraphNode node, CUgraph child) {
    CUgraph copy = nullptr;
    if (recorded::cuGraphChildGraphNodeGetGraph(node, &copy) != CUDA_SUCCESS)
        return;
    std::lock_guard<std::mutex> lock(registry().mutex);
    const Object* from = object_of(child);
    Object* to = object_of(copy);
    if (!from || !from->graph || !to || !to->graph)
        return;
    to->graph->context = from->graph->context;
    to->graph->source = {child, from->serial};
    to->graph->lost = from->graph->mixed ? kMixed : nullptr;
}

// What a graph has retained lives as long as a copy of it in another.
void retain_for(CUgraph graph, CUgraph child) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const Object* from = object_of(child);
    Object* to = object_of(graph);
    if (!from || !from->graph || !to || !to->graph)
        return;
    for (const auto& [object, count] : from->graph->retained)
        to->graph->retained[object] += count;
}

// Or it was moved there, and ends with it.
void move_into(CUgraphNode node, CUgraph child) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    Object* part = object_of(child);
    Object* within = object_of(node);
    if (!part || !part->graph || !within || !within->graph)
        return;
    part->parent = within;
    part->make = nullptr;
    part->graph->plan = nullptr;
    part->graph->moved = true;
    within->graph->parts.insert(part);
}

// What a node of any kind that was added or changed needs beside its type.
CUresult any_kind(CUresult result, CUgraphNode node, const CUgraphNodeParams* params,
                  unsigned symbol) {
    if (result != CUDA_SUCCESS)
        return result;
    switch (params->type) {
    case CU_GRAPH_NODE_TYPE_GRAPH:
        if (params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE)
            move_into(node, params->graph.graph);
        else
            inherit(node, params->graph.graph);
        break;
    case CU_GRAPH_NODE_TYPE_KERNEL:
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        break;
    default: // memory, semaphores, memory operations, conditions
        refuse(symbol);
    }
    return result;
}

// Nodes of a graph, or their number, which the driver has put there.
CUresult listed(CUresult result, CUgraph graph, const size_t* count, CUgraphNode* nodes,
                CUgraphNode* others = nullptr) {
    for (CUgraphNode* list : {nodes, others})
        for (size_t i = 0; result == CUDA_SUCCESS && list && i < *count; i++)
            list[i] = node_to_program(list[i], graph);
    return result;
}

CUgraph graph_of(CUgraphNode node) {
    CUgraph graph = nullptr;
    with_object(node, [&](Object& object) {
        if (object.parent)
            graph = reinterpret_cast<CUgraph>(object.parent->slot);
    });
    return graph;
}

void index_nodes(GraphPlan& plan, GraphState& state) {
    for (NodePlan& node : plan.nodes) {
        if (node.origin)
            state.by_origin[node.origin] = &node;
        if (node.child)
            index_nodes(*node.child, state);
    }
}

// The registry is locked. Null: none that is known.
NodePlan* find_node(Object& executable, CUgraphNode node) {
    GraphState* state = executable.graph.get();
    if (!state || !state->plan || !object_of(node))
        return nullptr;
    if (state->by_origin.empty())
        index_nodes(*state->plan, *state);
    auto found = state->by_origin.find(to_driver(node));
    return found == state->by_origin.end() ? nullptr : found->second;
}

CUgraphNode twin(const GraphState& clone, CUgraphNode original) {
    auto found = clone.twins.find(original);
    return found == clone.twins.end() ? nullptr : found->second;
}

// The driver's node for one by which the program names an executable's.
CUgraphNode driver_node(CUgraphExec executable, CUgraphNode node) {
    CUgraphNode driver = to_driver(node);
    with_object(executable, [&](Object& object) {
        const NodePlan* known = find_node(object, node);
        if (known && known->own)
            driver = known->own;
    });
    return driver;
}

// `call` changes the driver's node of an executable, `keep` what is kept of it.
template <class F, class K>
CUresult change_node(CUgraphExec executable, CUgraphNode node, F call, K keep) {
    CUresult result = call(to_driver(executable), driver_node(executable, node));
    if (result != CUDA_SUCCESS)
        return result;
    NodePlan changed;
    std::string why = "that was changed at a node that is not known";
    with_object(executable, [&](Object& object) {
        if (const NodePlan* known = find_node(object, node)) {
            changed = *known;
            why.clear();
        }
    });
    if (why.empty())
        keep(changed, &why); // takes the registry's lock itself
    with_object(executable, [&](Object& object) {
        if (!why.empty() && object.why.empty()) {
            object.make = nullptr;
            object.why = why;
        }
        if (NodePlan* known = find_node(object, node)) {
            *known = std::move(changed);
            if (known->child)
                object.graph->by_origin.clear();
        }
    });
    return result;
}

CUresult change_event(CUgraphExec executable, CUgraphNode node, CUevent event,
                      CUresult (*function)(CUgraphExec, CUgraphNode, CUevent)) {
    const CUevent driver = to_driver(event);
    return change_node(
        executable, node,
        [&](CUgraphExec in, CUgraphNode changed) { return function(in, changed, driver); },
        [&](NodePlan& plan, std::string* why) { keep_event(plan, driver, why); });
}

void keep_child(NodePlan& node, CUgraph driver, std::string* why) {
    const auto child = read_graph(driver, why);
    if (child && !take_place(*child, *node.child))
        *why = "that was given a child graph whose nodes are in another order";
    node.child = child;
}

// `params`: with the driver's handles; `context`: the program's, where it is said.
void keep_any(NodePlan& node, const CUgraphNodeParams& params, CUcontext context,
              std::string* why) {
    if (context)
        node.context = context;
    CUDA_KERNEL_NODE_PARAMS_v2 kernel = {};
    CUDA_MEMSET_NODE_PARAMS fill = {};
    switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        static_assert(sizeof kernel == sizeof params.kernel, "version 3 is laid out as 2");
        memcpy(&kernel, &params.kernel, sizeof kernel);
        return keep_kernel(node, kernel, why);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return keep_copy(node, params.memcpy.copyParams, why);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        static_assert(sizeof fill <= sizeof params.memset, "version 2 begins as 1");
        memcpy(&fill, &params.memset, sizeof fill);
        return keep_memset(node, fill, why);
    case CU_GRAPH_NODE_TYPE_HOST:
        node.host = {params.host.fn, params.host.userData};
        return;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return keep_child(node, params.graph.graph, why);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return keep_event(node, params.eventWait.event, why);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return keep_event(node, params.eventRecord.event, why);
    default:
        *why = "that was changed at a node of another kind";
    }
}

} // namespace

CUresult cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                        size_t numDependencies, CUgraphNodeParams* nodeParams) {
    CUresult result = DriverCall(FG_DRIVER(cuGraphAddNode))(phGraphNode, hGraph, dependencies,
                                                            numDependencies, nodeParams);
    return any_kind(result, phGraphNode ? *phGraphNode : nullptr, nodeParams, I_cuGraphAddNode);
}

CUresult cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph,
                           const CUgraphNode* dependencies, const CUgraphEdgeData* dependencyData,
                           size_t numDependencies, CUgraphNodeParams* nodeParams) {
    CUresult result = DriverCall(FG_DRIVER(cuGraphAddNode_v2))(
        phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
    return any_kind(result, phGraphNode ? *phGraphNode : nullptr, nodeParams, I_cuGraphAddNode_v2);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph,
                                  const CUgraphNode* dependencies, size_t numDependencies,
                                  CUgraph childGraph) {
    CUresult result = DriverCall(FG_DRIVER(cuGraphAddChildGraphNode))(
        phGraphNode, hGraph, dependencies, numDependencies, childGraph);
    if (result == CUDA_SUCCESS) {
        inherit(*phGraphNode, childGraph);
        retain_for(hGraph, childGraph);
    }
    return result;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph) {
    CUgraph driver = nullptr;
    CUresult result =
        FG_DRIVER(cuGraphChildGraphNodeGetGraph)(to_driver(hNode), phGraph ? &driver : nullptr);
    if (result != CUDA_SUCCESS)
        return result;
    Object* const within = object_of(hNode);
    *phGraph = !within ? driver : note(driver, false, [&](Object& object) {
        object.context = nullptr;
        object.parent = within;
        object.graph = std::make_shared<GraphState>();
        object.graph->context = within->graph->context;
        within->graph->parts.insert(&object);
    });
    return result;
}

CUresult cuGraphDestroyNode(CUgraphNode hNode) {
    const CUgraphNode driver = to_driver(hNode);
    const CUgraph graph = graph_of(hNode);
    CUresult result = destroy(hNode, FG_DRIVER(cuGraphDestroyNode));
    if (result == CUDA_SUCCESS)
        with_object(graph, [&](Object& object) {
            auto& twins = object.graph->twins;
            for (auto it = twins.begin(); it != twins.end();)
                it = it->second == driver ? twins.erase(it) : std::next(it);
        });
    return result;
}

CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
    Others others;
    others.look(nodeParams);
    CUresult result = DriverCall(FG_DRIVER(cuGraphNodeSetParams))(hNode, nodeParams);
    if (result == CUDA_SUCCESS && others.context)
        with_object(hNode, [&](Object& object) { object.graph->context = others.context; });
    return any_kind(result, hNode, nodeParams, I_cuGraphNodeSetParams);
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
    CUresult result = FG_DRIVER(cuGraphKernelNodeGetParams)(to_driver(hNode), nodeParams);
    if (result != CUDA_SUCCESS)
        return result;
    CUDA_KERNEL_NODE_PARAMS_v2 params = {};
    params.func = nodeParams->func;
    name_kernel(to_driver(hNode), params);
    nodeParams->func = params.func;
    return result;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS* nodeParams) {
    CUresult result = FG_DRIVER(cuGraphKernelNodeGetParams_v2)(to_driver(hNode), nodeParams);
    if (result == CUDA_SUCCESS)
        name_kernel(to_driver(hNode), *nodeParams);
    return result;
}

// Others name objects, or edges.
CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
                                       const CUkernelNodeAttrValue* value) {
    CUresult result = FG_DRIVER(cuGraphKernelNodeSetAttribute)(to_driver(hNode), attr, value);
    if (result == CUDA_SUCCESS && !keeps_attribute(attr))
        refuse(I_cuGraphKernelNodeSetAttribute);
    return result;
}

CUresult cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode,
                                CUgraph hClonedGraph) {
    CUgraphNode driver = nullptr;
    CUresult result = FG_DRIVER(cuGraphNodeFindInClone)(
        phNode ? &driver : nullptr, to_driver(hOriginalNode), to_driver(hClonedGraph));
    // A clone that was made anew is none to the driver.
    if (result != CUDA_SUCCESS && phNode && object_of(hOriginalNode))
        with_object(hClonedGraph, [&](Object& object) {
            if (object.graph)
                driver = twin(*object.graph, to_driver(hOriginalNode));
        });
    if (!driver)
        return result;
    *phNode = node_to_program(driver, hClonedGraph);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes, size_t* numNodes) {
    return listed(FG_DRIVER(cuGraphGetNodes)(to_driver(hGraph), nodes, numNodes), hGraph, numNodes,
                  nodes);
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes, size_t* numRootNodes) {
    return listed(FG_DRIVER(cuGraphGetRootNodes)(to_driver(hGraph), rootNodes, numRootNodes),
                  hGraph, numRootNodes, rootNodes);
}

CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, size_t* numEdges) {
    return listed(FG_DRIVER(cuGraphGetEdges)(to_driver(hGraph), from, to, numEdges), hGraph,
                  numEdges, from, to);
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to,
                            CUgraphEdgeData* edgeData, size_t* numEdges) {
    return listed(FG_DRIVER(cuGraphGetEdges_v2)(to_driver(hGraph), from, to, edgeData, numEdges),
                  hGraph, numEdges, from, to);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies,
                                    size_t* numDependencies) {
    return listed(
        FG_DRIVER(cuGraphNodeGetDependencies)(to_driver(hNode), dependencies, numDependencies),
        graph_of(hNode), numDependencies, dependencies);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies,
                                       CUgraphEdgeData* edgeData, size_t* numDependencies) {
    return listed(FG_DRIVER(cuGraphNodeGetDependencies_v2)(to_driver(hNode), dependencies, edgeData,
                                                           numDependencies),
                  graph_of(hNode), numDependencies, dependencies);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes,
                                      size_t* numDependentNodes) {
    return listed(FG_DRIVER(cuGraphNodeGetDependentNodes)(to_driver(hNode), dependentNodes,
                                                          numDependentNodes),
                  graph_of(hNode), numDependentNodes, dependentNodes);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode* dependentNodes,
                                         CUgraphEdgeData* edgeData, size_t* numDependentNodes) {
    return listed(FG_DRIVER(cuGraphNodeGetDependentNodes_v2)(to_driver(hNode), dependentNodes,
                                                             edgeData, numDependentNodes),
                  graph_of(hNode), numDependentNodes, dependentNodes);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
    Argument<const CUDA_KERNEL_NODE_PARAMS_v1*> given(nodeParams);
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecKernelNodeSetParams)(executable, node, given.get());
        },
        [&](NodePlan& node, std::string* why) {
            CUDA_KERNEL_NODE_PARAMS_v2 params = {};
            static_assert(sizeof given.copy <= sizeof params, "version 2 begins as 1");
            memcpy(&params, &given.copy, sizeof given.copy);
            keep_kernel(node, params, why);
        });
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                           const CUDA_KERNEL_NODE_PARAMS* nodeParams) {
    Argument<const CUDA_KERNEL_NODE_PARAMS*> given(nodeParams);
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecKernelNodeSetParams_v2)(executable, node, given.get());
        },
        [&](NodePlan& node, std::string* why) { keep_kernel(node, given.copy, why); });
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
    Argument<const CUDA_MEMCPY3D*> given(copyParams);
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecMemcpyNodeSetParams)(executable, node, given.get(),
                                                             to_driver(ctx));
        },
        [&](NodePlan& node, std::string* why) {
            node.context = ctx ? ctx : node.context;
            keep_copy(node, given.copy, why);
        });
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_MEMSET_NODE_PARAMS* memsetParams,
                                        CUcontext ctx) {
    Argument<const CUDA_MEMSET_NODE_PARAMS*> given(memsetParams);
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecMemsetNodeSetParams)(executable, node, given.get(),
                                                             to_driver(ctx));
        },
        [&](NodePlan& node, std::string* why) {
            node.context = ctx ? ctx : node.context;
            keep_memset(node, given.copy, why);
        });
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                      const CUDA_HOST_NODE_PARAMS* nodeParams) {
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecHostNodeSetParams)(executable, node, nodeParams);
        },
        [&](NodePlan& node, std::string*) { node.host = *nodeParams; });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            CUgraph childGraph) {
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecChildGraphNodeSetParams)(executable, node,
                                                                 to_driver(childGraph));
        },
        [&](NodePlan& node, std::string* why) { keep_child(node, to_driver(childGraph), why); });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            CUevent event) {
    return change_event(hGraphExec, hNode, event, FG_DRIVER(cuGraphExecEventRecordNodeSetEvent));
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode,
                                          CUevent event) {
    return change_event(hGraphExec, hNode, event, FG_DRIVER(cuGraphExecEventWaitNodeSetEvent));
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                  CUgraphNodeParams* nodeParams) {
    Argument<CUgraphNodeParams*> given(nodeParams);
    Others others;
    others.look(nodeParams);
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphExecNodeSetParams)(executable, node, given.get());
        },
        [&](NodePlan& node, std::string* why) { keep_any(node, given.copy, others.context, why); });
}

CUresult cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned isEnabled) {
    return change_node(
        hGraphExec, hNode,
        [&](CUgraphExec executable, CUgraphNode node) {
            return FG_DRIVER(cuGraphNodeSetEnabled)(executable, node, isEnabled);
        },
        [&](NodePlan& node, std::string*) { node.enabled = isEnabled; });
}

CUresult cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned* isEnabled) {
    return FG_DRIVER(cuGraphNodeGetEnabled)(to_driver(hGraphExec), driver_node(hGraphExec, hNode),
                                            isEnabled);
}

} // namespace flowgpu::replay::recorded
