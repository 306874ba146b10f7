// The record's own tables.
#ifndef FLOWGPU_INTERCEPT_REPLAY_REGISTRY_H
#define FLOWGPU_INTERCEPT_REPLAY_REGISTRY_H

#include <mutex>
#include <unordered_map>

#include "record.h"

namespace flowgpu::replay {

struct Registry {
    std::mutex mutex; // guards what follows
    uint64_t last_serial = 0;
    std::map<uint64_t, std::unique_ptr<Object>> objects;
    std::unordered_map<void*, Object*> by_driver[kKinds];
    std::map<void*, Place> host;
    std::map<CUdeviceptr, size_t> reservations;
    std::map<CUdevice, unsigned> primary_flags;

    std::unordered_map<void*, Object*>& index_of(Kind kind) {
        return by_driver[static_cast<size_t>(kind)];
    }
};

// Made on first use, never destroyed, as Task.
Registry& registry();

} // namespace flowgpu::replay

#endif
