// How one argument of a driver function goes to the driver and comes back: by its type alone.
//
// `get` gives what the driver is called with; `done` runs after the call with its result.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ARGUMENTS_H
#define FLOWGPU_INTERCEPT_REPLAY_ARGUMENTS_H

#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "aliases.h"
#include "graphs.h"
#include "record.h"
#include "structures.h"
#include "threads.h"

namespace flowgpu::replay {

// What an argument has to know of the others.
struct Others {
    bool launches = false; // what is called launches a function that it is given
    size_t count = 0;      // of nodes or copies in an array
    CUgraph graph = nullptr;
    CUcontext context = nullptr;

    template <class T> void look(const T&) {}
    void look(size_t value) { count = value; }
    void look(CUgraph value) { graph = graph ? graph : value; }
    void look(CUcontext value) { context = value; }
    void look(const CUDA_KERNEL_NODE_PARAMS_v2* params) {
        context = params ? params->ctx : nullptr;
    }
    void look(CUgraphNodeParams* params) {
        if (params && params->type == CU_GRAPH_NODE_TYPE_KERNEL)
            context = params->kernel.ctx;
        if (params && params->type == CU_GRAPH_NODE_TYPE_MEMCPY)
            context = params->memcpy.copyCtx;
        if (params && params->type == CU_GRAPH_NODE_TYPE_MEMSET)
            context = params->memset.ctx;
    }
};

template <class T, class = void> struct Argument {
    T value;
    explicit Argument(T v) : value(v) {}
    T get() { return value; }
    void done(CUresult) {}
};

template <class H> struct Argument<H, std::enable_if_t<IsHandle<H>::value>> {
    H value;
    explicit Argument(H v) : value(v) {}
    H get() { return to_driver(value); }
    void done(CUresult) {}
};

template <> struct Argument<CUfunction> {
    CUfunction value;
    bool launches;
    Argument(CUfunction v, const Others& others) : value(v), launches(others.launches) {}
    CUfunction get() {
        if (launches)
            return launched(value);
        if (Object* object = object_of(value))
            object->marked.store(true, std::memory_order_relaxed); // asking loads its module
        return to_driver(value);
    }
    void done(CUresult) {}
};

// Addresses of memory; also of numbers of that type, which are none.
template <> struct Argument<CUdeviceptr> {
    CUdeviceptr value;
    explicit Argument(CUdeviceptr v) : value(v) {}
    CUdeviceptr get() { return to_driver(value); }
    void done(CUresult) {}
};

// Where the driver puts one handle.
template <class H> struct Argument<H*, std::enable_if_t<IsHandle<H>::value>> {
    H* out;
    H made = nullptr;
    explicit Argument(H* o) : out(o) {}
    H* get() { return out ? &made : nullptr; }
    void done(CUresult result) {
        if (out && result == CUDA_SUCCESS)
            *out = to_program(made);
    }
};

// Where the driver puts the node that it has added to the graph.
template <> struct Argument<CUgraphNode*> {
    CUgraphNode* out;
    Others others;
    CUgraphNode made = nullptr;
    Argument(CUgraphNode* o, const Others& all) : out(o), others(all) {}
    CUgraphNode* get() { return out ? &made : nullptr; }
    void done(CUresult result) {
        if (out && result == CUDA_SUCCESS)
            *out = node_to_program(made, others.graph, true,
                                   others.context ? others.context : current_context());
    }
};

template <> struct Argument<const CUgraphNode*> {
    std::vector<CUgraphNode> nodes;
    bool given;
    Argument(const CUgraphNode* in, const Others& others) : given(in) {
        for (size_t i = 0; in && i < others.count; i++)
            nodes.push_back(to_driver(in[i]));
    }
    const CUgraphNode* get() { return given ? nodes.data() : nullptr; }
    void done(CUresult) {}
};

// Only functions of their own give executables (record_graphs.cpp).
template <> struct Argument<CUgraphExec*> {
    CUgraphExec* out;
    explicit Argument(CUgraphExec* o) : out(o) {}
    CUgraphExec* get() { return out; }
    void done(CUresult) {}
};

// A kernel's arguments in a structure, with the driver's addresses of constants.
template <class S> class NodeArguments {
  public:
    void exchange(S& copy, const S& given) {
        if (!aliases.load(std::memory_order_relaxed))
            return;
        CUfunction function = given.func;
        if constexpr (!std::is_same_v<S, CUDA_KERNEL_NODE_PARAMS_v1>)
            function = function ? function : reinterpret_cast<CUfunction>(given.kern);
        arguments_.emplace(function, given.kernelParams, given.extra);
        copy.kernelParams = arguments_->parameters();
        copy.extra = arguments_->extra();
    }

  private:
    std::optional<LaunchArguments> arguments_;
};
template <class S, class = void> struct IsLaunch : std::false_type {};
template <class S> struct IsLaunch<S, std::void_t<decltype(S::kernelParams)>> : std::true_type {};
struct NoArguments {};

template <class S> struct Argument<const S*, std::enable_if_t<HasHandles<S>::value>> {
    const S* in;
    S copy;
    std::conditional_t<IsLaunch<S>::value, NodeArguments<S>, NoArguments> arguments;
    explicit Argument(const S* i) : in(i) {
        if (in) {
            copy = *in;
            translate(copy, ToDriver());
            if constexpr (IsLaunch<S>::value)
                arguments.exchange(copy, *in);
        }
    }
    Argument(const Argument&) = delete; // the copy may point into it
    Argument& operator=(const Argument&) = delete;
    const S* get() { return in ? &copy : nullptr; }
    void done(CUresult) {}
};

// One that the driver fills in.
template <class S> struct Argument<S*, std::enable_if_t<HasHandles<S>::value>> {
    S* out;
    explicit Argument(S* o) : out(o) {}
    S* get() { return out; }
    void done(CUresult result) {
        if (out && result == CUDA_SUCCESS)
            translate(*out, ToProgram());
    }
};

// Two that the driver reads and fills in in part.
template <> struct Argument<CUgraphNodeParams*> {
    CUgraphNodeParams* given;
    CUgraphNodeParams copy;
    NodeArguments<CUDA_KERNEL_NODE_PARAMS_v3> arguments;
    explicit Argument(CUgraphNodeParams* g) : given(g) {
        if (given) {
            copy = *given;
            translate(copy, ToDriver());
            if (given->type == CU_GRAPH_NODE_TYPE_KERNEL)
                arguments.exchange(copy.kernel, given->kernel);
        }
    }
    Argument(const Argument&) = delete; // the copy may point into it
    Argument& operator=(const Argument&) = delete;
    CUgraphNodeParams* get() { return given ? &copy : nullptr; }
    void done(CUresult) {
        if (!given)
            return;
        if (given->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            given->alloc = copy.alloc;
        if (given->type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
            given->conditional.phGraph_out = copy.conditional.phGraph_out;
    }
};
template <> struct Argument<CUDA_GRAPH_INSTANTIATE_PARAMS*> {
    CUDA_GRAPH_INSTANTIATE_PARAMS* given;
    CUDA_GRAPH_INSTANTIATE_PARAMS copy;
    explicit Argument(CUDA_GRAPH_INSTANTIATE_PARAMS* g) : given(g) {
        if (given) {
            copy = *given;
            copy.hUploadStream = to_driver(copy.hUploadStream);
        }
    }
    CUDA_GRAPH_INSTANTIATE_PARAMS* get() { return given ? &copy : nullptr; }
    void done(CUresult) {
        if (given) {
            given->hErrNode_out = copy.hErrNode_out;
            given->result_out = copy.result_out;
        }
    }
};

// A list of copies.
template <> struct Argument<CUDA_MEMCPY3D_BATCH_OP*> {
    std::vector<CUDA_MEMCPY3D_BATCH_OP> copies;
    bool given;
    Argument(const CUDA_MEMCPY3D_BATCH_OP* in, const Others& others) : given(in) {
        if (in)
            copies.assign(in, in + others.count);
        for (CUDA_MEMCPY3D_BATCH_OP& one : copies)
            translate(one, ToDriver());
    }
    CUDA_MEMCPY3D_BATCH_OP* get() { return given ? copies.data() : nullptr; }
    void done(CUresult) {}
};

template <> struct Argument<const CUlaunchConfig*> {
    const CUlaunchConfig* in;
    CUlaunchConfig copy;
    std::vector<CUlaunchAttribute> attributes; // only where one of them names an event
    explicit Argument(const CUlaunchConfig* i) : in(i) {
        if (!in)
            return;
        copy = *in;
        copy.hStream = to_driver(copy.hStream);
        for (unsigned a = 0; in->attrs && a < in->numAttrs; a++)
            translate_attribute(a);
        if (!attributes.empty())
            copy.attrs = attributes.data();
    }
    const CUlaunchConfig* get() { return in ? &copy : nullptr; }
    // The driver writes there which node a device may update.
    void done(CUresult) {
        for (size_t a = 0; a < attributes.size(); a++)
            if (attributes[a].id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE)
                in->attrs[a].value = attributes[a].value;
    }

  private:
    void translate_attribute(unsigned index) {
        const CUlaunchAttribute& given = in->attrs[index];
        const bool programmatic = given.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
        if (!programmatic && given.id != CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
            return;
        if (attributes.empty())
            attributes.assign(in->attrs, in->attrs + in->numAttrs);
        CUlaunchAttributeValue& value = attributes[index].value;
        CUevent& event =
            programmatic ? value.programmaticEvent.event : value.launchCompletionEvent.event;
        event = to_driver(event);
    }
};

// Calls the driver's function with the arguments translated.
template <class... P> class DriverCall {
  public:
    explicit constexpr DriverCall(CUresult (*function)(P...), bool launches = false)
        : function_(function), launches_(launches) {}
    __attribute__((always_inline)) CUresult operator()(P... arguments) const {
        if constexpr (kLaunches)
            if (__builtin_expect(aliases.load(std::memory_order_relaxed) != nullptr, 0))
                return launch(*this, arguments...);
        return translate_all(arguments...);
    }

  private:
    template <class T>
    static constexpr size_t kFirst = [] {
        constexpr bool same[] = {std::is_same_v<T, P>..., true};
        size_t at = 0;
        while (!same[at])
            at++;
        return at;
    }();
    static constexpr bool kLaunches =
        kFirst<CUfunction> < sizeof...(P) && kFirst<void**> < sizeof...(P);

    // Launches with the driver's addresses of constants in the place of the program's.
    __attribute__((noinline, cold)) static CUresult launch(DriverCall call, P... given) try {
        auto all = std::tie(given...);
        constexpr size_t at = kFirst<void**>;
        constexpr bool packed = at + 1 < sizeof...(P);
        void** extra = nullptr;
        if constexpr (packed)
            extra = std::get<at + 1>(all);
        LaunchArguments translated(std::get<kFirst<CUfunction>>(all), std::get<at>(all), extra);
        std::get<at>(all) = translated.parameters();
        if constexpr (packed)
            std::get<at + 1>(all) = translated.extra();
        return call.translate_all(given...);
    } catch (const std::bad_alloc&) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }

    __attribute__((always_inline)) CUresult translate_all(P... arguments) const {
        Others others;
        others.launches = launches_;
        (others.look(arguments), ...);
        return pass(argument<P>(arguments, others)...);
    }

    template <class T> static Argument<T> argument(T value, const Others& others) {
        if constexpr (std::is_constructible_v<Argument<T>, T, const Others&>)
            return Argument<T>(value, others);
        else
            return Argument<T>(value);
    }
    CUresult pass(Argument<P>... arguments) const {
        CUresult result = function_(arguments.get()...);
        (arguments.done(result), ...);
        return result;
    }
    CUresult (*function_)(P...);
    bool launches_;
};

} // namespace flowgpu::replay

#endif
