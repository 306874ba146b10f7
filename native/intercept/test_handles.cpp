// Gives a handle of the program's to every function of the driver in each place for one: an
// argument, an array, a field of a structure that it reads.
//   test_handles LIBRARY [made]      prints of each call: function, argument, field, result
// `made`: the library has made the handles, and they are the replay engine's; else they are
// numbers that look so.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include <dlfcn.h>

#include "replay/structures.h"
#include "test_handles.h"

namespace flowgpu {
extern "C" Page flowgpu_page;
Page flowgpu_page; // of which the engine's headers speak
} // namespace flowgpu

namespace {

using flowgpu::replay::HasHandles;
using flowgpu::replay::IsHandle;

void* library;

template <class F> F* find(const char* name) {
    auto* found = reinterpret_cast<F*>(dlsym(library, name));
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return found;
}

template <class H>
H handle = reinterpret_cast<H>(flowgpu::replay::kHandleBase +
                               sizeof(flowgpu::replay::Slot) *
                                   static_cast<size_t>(flowgpu::replay::KindOf<H>::kind));

template <class H, class... P, class... A>
void make(const char* name, CUresult (*)(H*, P...), A... arguments) {
    H& made = handle<H> = nullptr;
    const CUresult result = find<CUresult(H*, P...)>(name)(&made, arguments...);
    if (result != CUDA_SUCCESS || !flowgpu::replay::slot_of(made)) {
        fprintf(stderr, "%s: %d, %p\n", name, result, static_cast<void*>(made));
        exit(3);
    }
}
#define MAKE(name, ...) make(#name, static_cast<decltype(&::name)>(nullptr), __VA_ARGS__)

void make_handles() {
    const char code[] = ".version 8.0";
    CUDA_ARRAY3D_DESCRIPTOR description = {};
    CUmemPoolProps properties = {};
    MAKE(cuDevicePrimaryCtxRetain, 0);
    find<decltype(::cuCtxSetCurrent)>("cuCtxSetCurrent")(handle<CUcontext>);
    MAKE(cuStreamCreate, 0);
    MAKE(cuEventCreate, 0);
    MAKE(cuModuleLoadData, code);
    MAKE(cuModuleGetFunction, handle<CUmodule>, "kernel");
    MAKE(cuLibraryLoadData, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
    MAKE(cuLibraryGetKernel, handle<CUlibrary>, "kernel");
    MAKE(cuMemPoolCreate, &properties);
    MAKE(cuArray3DCreate_v2, &description);
    MAKE(cuMipmappedArrayCreate, &description, 1);
    MAKE(cuGraphCreate, 0);
    MAKE(cuGraphAddEmptyNode, handle<CUgraph>, nullptr, 0);
    MAKE(cuGraphInstantiateWithFlags, handle<CUgraph>, 0);
}

template <class H> void give(H& field) {
    field = handle<H>;
}

// Each of the fields of a structure that hold a handle, with what says that it does.
template <class S> using Field = void (*)(S&);
template <class S> std::vector<Field<S>> fields() {
    static_assert(!HasHandles<S>::value, "a structure without its fields here");
    return {};
}
#define FG_FIELDS(S, ...)                                                                          \
    template <> std::vector<Field<S>> fields<S>() {                                                \
        return {__VA_ARGS__};                                                                      \
    }
#define FG_GIVE(field, ...)                                                                        \
    [](auto& s) {                                                                                  \
        __VA_ARGS__;                                                                               \
        give(s.field);                                                                             \
    }
#define FG_ARRAYS                                                                                  \
    FG_GIVE(srcArray, s.srcMemoryType = CU_MEMORYTYPE_ARRAY),                                      \
        FG_GIVE(dstArray, s.dstMemoryType = CU_MEMORYTYPE_ARRAY)
FG_FIELDS(CUDA_KERNEL_NODE_PARAMS_v1, FG_GIVE(func))
FG_FIELDS(CUDA_KERNEL_NODE_PARAMS_v2, FG_GIVE(func), FG_GIVE(kern), FG_GIVE(ctx))
FG_FIELDS(CUDA_MEMCPY2D_v1, FG_ARRAYS)
FG_FIELDS(CUDA_MEMCPY2D, FG_ARRAYS)
FG_FIELDS(CUDA_MEMCPY3D_v1, FG_ARRAYS)
FG_FIELDS(CUDA_MEMCPY3D, FG_ARRAYS)
FG_FIELDS(CUDA_MEMCPY3D_PEER, FG_ARRAYS, FG_GIVE(srcContext), FG_GIVE(dstContext))
FG_FIELDS(CUDA_MEMCPY3D_BATCH_OP,
          FG_GIVE(src.op.array.array, s.src.type = CU_MEMCPY_OPERAND_TYPE_ARRAY),
          FG_GIVE(dst.op.array.array, s.dst.type = CU_MEMCPY_OPERAND_TYPE_ARRAY))
FG_FIELDS(CUDA_BATCH_MEM_OP_NODE_PARAMS_v1, FG_GIVE(ctx))
FG_FIELDS(CUDA_MEMSET_NODE_PARAMS_v1) // an address alone
FG_FIELDS(CUDA_RESOURCE_DESC, FG_GIVE(res.array.hArray, s.resType = CU_RESOURCE_TYPE_ARRAY),
          FG_GIVE(res.mipmap.hMipmappedArray, s.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY))
FG_FIELDS(CUarrayMapInfo, FG_GIVE(resource.array, s.resourceType = CU_RESOURCE_TYPE_ARRAY),
          FG_GIVE(resource.mipmap, s.resourceType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY))
FG_FIELDS(CUDA_GRAPH_INSTANTIATE_PARAMS, FG_GIVE(hUploadStream))
FG_FIELDS(CUDA_LAUNCH_PARAMS, FG_GIVE(function), FG_GIVE(hStream))
FG_FIELDS(CUgraphNodeParams, FG_GIVE(kernel.func, s.type = CU_GRAPH_NODE_TYPE_KERNEL),
          FG_GIVE(kernel.kern, s.type = CU_GRAPH_NODE_TYPE_KERNEL),
          FG_GIVE(kernel.ctx, s.type = CU_GRAPH_NODE_TYPE_KERNEL),
          FG_GIVE(memcpy.copyCtx, s.type = CU_GRAPH_NODE_TYPE_MEMCPY),
          FG_GIVE(memcpy.copyParams.srcArray, s.type = CU_GRAPH_NODE_TYPE_MEMCPY,
                  s.memcpy.copyParams.srcMemoryType = CU_MEMORYTYPE_ARRAY),
          FG_GIVE(memcpy.copyParams.dstArray, s.type = CU_GRAPH_NODE_TYPE_MEMCPY,
                  s.memcpy.copyParams.dstMemoryType = CU_MEMORYTYPE_ARRAY),
          FG_GIVE(memset.ctx, s.type = CU_GRAPH_NODE_TYPE_MEMSET),
          FG_GIVE(graph.graph, s.type = CU_GRAPH_NODE_TYPE_GRAPH),
          FG_GIVE(eventWait.event, s.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT),
          FG_GIVE(eventRecord.event, s.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD),
          FG_GIVE(memOp.ctx, s.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP),
          FG_GIVE(conditional.ctx, s.type = CU_GRAPH_NODE_TYPE_CONDITIONAL))

// Behind one that holds none.
CUlaunchAttribute attributes[2];

template <class Value>
void give_attribute(CUlaunchConfig& config, CUlaunchAttributeID id, Value value) {
    attributes[1] = {};
    attributes[1].id = id;
    give((attributes[1].value.*value).event);
    config.attrs = attributes;
    config.numAttrs = 2;
}
FG_FIELDS(
    CUlaunchConfig, FG_GIVE(hStream),
    [](auto& s) {
        give_attribute(s, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT,
                       &CUlaunchAttributeValue::programmaticEvent);
    },
    [](auto& s) {
        give_attribute(s, CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
                       &CUlaunchAttributeValue::launchCompletionEvent);
    })

// Structures that functions read are const but for these.
template <class S>
constexpr bool kIsRead =
    std::is_const_v<S> || std::is_same_v<S, CUDA_MEMCPY3D_BATCH_OP> ||
    std::is_same_v<S, CUarrayMapInfo> || std::is_same_v<S, CUgraphNodeParams> ||
    std::is_same_v<S, CUDA_GRAPH_INSTANTIATE_PARAMS> || std::is_same_v<S, CUDA_LAUNCH_PARAMS>;

// How many places for a handle an argument has, and to put one there.
template <class T, class = void> struct Places {
    static unsigned count() { return 0; }
    static void put(T, unsigned) {}
};
template <class H> struct Places<H, std::enable_if_t<IsHandle<H>::value>> {
    static unsigned count() { return 1; }
    static void put(H& argument, unsigned) { give(argument); }
};
template <> struct Places<const CUgraphNode*> {
    static unsigned count() { return 1; }
    static void put(const CUgraphNode* list, unsigned) {
        give(const_cast<CUgraphNode&>(list[kListed<const CUgraphNode> - 1]));
    }
};
template <class S>
struct Places<S*, std::enable_if_t<kIsRead<S> && std::is_class_v<S> && !IsHandle<S*>::value>> {
    using Written = std::remove_const_t<S>;
    static unsigned count() { return fields<Written>().size(); }
    static void put(S* list, unsigned field) {
        fields<Written>()[field](const_cast<Written&>(list[kListed<S> - 1]));
    }
};

char pages[16][4096]; // for each argument
size_t used_pages;

// Zero, but for the number of what lists have, and for addresses of zeroed memory.
template <class T> T plain() {
    if constexpr (std::is_same_v<T, size_t>)
        return 2;
    else if constexpr (std::is_same_v<T, unsigned>)
        return 1;
    else if constexpr (std::is_pointer_v<T> && !IsHandle<T>::value &&
                       !std::is_function_v<std::remove_pointer_t<T>>)
        return reinterpret_cast<T>(pages[used_pages++]);
    else
        return T{};
}

template <class... P>
CUresult call(CUresult (*function)(P...), size_t at, [[maybe_unused]] unsigned field,
              P... arguments) {
    size_t argument = 0;
    ((argument++ == at ? Places<P>::put(arguments, field) : void()), ...);
    return function(arguments...);
}

template <class... P> void give_to(const char* name, CUresult (*)(P...), bool made) {
    auto* function = find<CUresult(P...)>(name);
    const unsigned fields[] = {Places<P>::count()..., 0};
    for (size_t at = 0; at < sizeof...(P); at++)
        for (unsigned field = 0; field < fields[at]; field++) {
            if (made)
                make_handles();
            memset(pages, 0, sizeof pages);
            used_pages = 0;
            printf("%s %zu %u %d\n", name, at, field, call(function, at, field, plain<P>()...));
        }
}

// What the driver writes into a launch's attributes is the program's, who keeps the events there.
bool node_is_given() {
    CUlaunchAttribute attributes[2] = {};
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
    attributes[0].value.launchCompletionEvent.event = handle<CUevent>;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;
    CUlaunchConfig config = {};
    config.attrs = attributes;
    config.numAttrs = 2;
    auto* launch = find<decltype(::cuLaunchKernelEx)>("cuLaunchKernelEx");
    return launch(&config, handle<CUfunction>, nullptr, nullptr) == CUDA_SUCCESS &&
           attributes[1].value.deviceUpdatableKernelNode.devNode == kDeviceNode &&
           attributes[0].value.launchCompletionEvent.event == handle<CUevent>;
}

} // namespace

int main(int count, char** arguments) {
    library = count > 1 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library || find<decltype(::cuInit)>("cuInit")(0) != CUDA_SUCCESS)
        return 1;
#define FG_FORWARD(name, parameters, arguments)                                                    \
    give_to(#name, static_cast<decltype(&::name)>(nullptr), count > 2);
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#include "generated/api.inc"
    if (count > 2)
        make_handles();
    return count > 2 && !node_is_given() ? 4 : 0;
}
