// The record's own tables.
#ifndef FLOWGPU_INTERCEPT_REPLAY_REGISTRY_H
#define FLOWGPU_INTERCEPT_REPLAY_REGISTRY_H

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "record.h"
#include "textures.h"

namespace flowgpu::replay {

struct Registry {
    std::mutex mutex; // guards what follows
    uint64_t last_serial = 0;
    std::map<uint64_t, std::unique_ptr<Object>> objects;
    std::unordered_map<void*, Object*> by_driver[kKinds];
    std::map<void*, HostMemory> host;
    std::map<CUdevice, unsigned> primary_flags;
    // What the driver tells of a kernel in a graph is its function: a library's kernel's by the
    // kernel's serial, and those that the driver must not be asked about.
    std::unordered_map<void*, uint64_t> kernel_functions;
    std::unordered_set<void*> ended_functions;
    // While a capture is under way, the driver lends the program an array of nodes. The program
    // gets the array here instead, which has its own handles and lasts as long.
    std::unordered_map<const CUgraphNode*, std::vector<CUgraphNode>> frontiers;
    // What the driver's nodes and graphs of the life before are now.
    std::unordered_map<CUgraphNode, CUgraphNode> renewed_nodes;
    std::unordered_map<CUgraph, CUgraph> renewed_graphs;
    Textures textures;
    // While CUDA is made anew: taken for objects that are not there yet, by context.
    std::map<const Object*, std::set<unsigned long long>> taken_numbers;
    bool heap_used = false; // of the device's: a kernel that calls malloc was launched
    std::string trouble;    // in what of it making a thing again failed

    std::unordered_map<void*, Object*>& index_of(Kind kind) {
        return by_driver[static_cast<size_t>(kind)];
    }
};

// Made on first use, never destroyed, as Task.
Registry& registry();

} // namespace flowgpu::replay

#endif
