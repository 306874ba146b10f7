// The parameters of a graph's node as they cross between the driver library and the device.
// Include after the side's own way to cuda.h.
#pragma once

#include "wire.h"

namespace flowgpu::emu {

// One struct serves every kind of node that the device has. `type` says which members count.
struct NodeParams {
    int32_t type = CU_GRAPH_NODE_TYPE_EMPTY;
    uint32_t by_extra = 0; // a kernel's arguments came through `extra`, and go back so
    uint64_t context = 0;  // where it runs
    uint64_t object = 0;   // function, kernel, event, child graph or host function
    uint64_t data = 0;     // of a host function; of a child graph, whether it was moved there
    LaunchShape shape{};
    CUDA_MEMCPY3D_v2 copy{};
    CUDA_MEMSET_NODE_PARAMS_v1 fill{};
};

struct NodeSpec {
    NodeParams fixed;
    std::vector<uint8_t> arguments; // of a kernel, as its parameters are laid out

    void put(Writer& out) const {
        out.put(fixed);
        out.put_blob(arguments.data(), arguments.size());
    }
    static NodeSpec take(Reader& in) {
        NodeSpec spec;
        spec.fixed = in.take<NodeParams>();
        const std::string_view bytes = in.take_blob();
        spec.arguments.assign(bytes.begin(), bytes.end());
        return spec;
    }
};

inline void put_handles(Writer& out, const std::vector<uint64_t>& handles) {
    out.put_blob(handles.data(), handles.size() * sizeof(uint64_t));
}

inline std::vector<uint64_t> take_handles(Reader& in) {
    const std::string_view bytes = in.take_blob();
    std::vector<uint64_t> handles(bytes.size() / sizeof(uint64_t));
    if (!handles.empty()) {
        std::memcpy(handles.data(), bytes.data(), handles.size() * sizeof(uint64_t));
    }
    return handles;
}

// What a list of a graph or of a node has; edges come as pairs, a node before who depends on it.
enum class GraphList : uint8_t { kNodes, kRoots, kEdges, kDependencies, kDependents };

} // namespace flowgpu::emu
