#include "aliases.h"

#include <algorithm>
#include <cstring>

#include "registry.h"

namespace flowgpu::replay {

namespace {

// Where no address of the program's leads: behind the handles.
constexpr CUdeviceptr kNowhere = kHandleBase + kHandleBytes;
CUdeviceptr next_nowhere = kNowhere;

constexpr bool overlap(CUdeviceptr a, size_t a_bytes, CUdeviceptr b, size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

template <class Work> void for_each(Work work) {
    for (const auto& [serial, object] : registry().objects)
        for (const Variable& variable : object->variables)
            for (const Alias& alias : variable.aliases)
                work(alias);
}

} // namespace

CUdeviceptr Aliases::driver(CUdeviceptr program) const {
    for (const Alias& alias : all)
        if (program - alias.program < alias.bytes)
            return program - alias.program + alias.driver;
    return program;
}

CUdeviceptr Aliases::program(CUdeviceptr driver) const {
    for (const Alias& alias : all)
        if (driver - alias.driver < alias.bytes)
            return driver - alias.driver + alias.program;
    return driver;
}

void renew_aliases() {
    auto made = std::make_unique<Aliases>();
    bool any = false;
    for_each([&](const Alias& alias) {
        made->all.push_back(alias);
        any = any || alias.program != alias.driver;
    });
    // The last one is never freed: a thread may be reading it.
    aliases.store(any ? made.release() : nullptr, std::memory_order_release);
}

CUdeviceptr alias_of(Variable& variable, Object* context, CUdeviceptr address, size_t bytes) {
    for (const Alias& alias : variable.aliases)
        if (alias.context == context)
            return alias.program;
    const bool taken = is_taken(address, bytes);
    CUdeviceptr program = address;
    if (taken) {
        constexpr size_t kAlignment = 256;
        program = next_nowhere;
        next_nowhere += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    variable.aliases.push_back({context, program, address, bytes});
    if (taken || aliases.load())
        renew_aliases();
    return program;
}

bool is_taken(CUdeviceptr address, size_t bytes) {
    bool taken = false;
    for_each([&](const Alias& alias) {
        taken = taken || overlap(alias.program, alias.bytes, address, bytes);
    });
    return taken;
}

bool is_aliased(CUdeviceptr driver) {
    bool found = false;
    for_each([&](const Alias& alias) { found = found || driver - alias.driver < alias.bytes; });
    return found;
}

CUresult parameter_of(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
    const Object* object = object_of(function);
    return object && object->kind == Kind::kernel
               ? FG_DRIVER(cuKernelGetParamInfo)(object->driver<CUkernel>(), index, offset, bytes)
               : FG_DRIVER(cuFuncGetParamInfo)(to_driver(function), index, offset, bytes);
}

LaunchArguments::LaunchArguments(CUfunction function, void** parameters, void** extra)
    : given_(parameters), given_extra_(extra) {
    const auto translate = [](char* bytes, size_t size) {
        bool changed = false;
        for (size_t at = 0; at + sizeof(CUdeviceptr) <= size; at += sizeof(CUdeviceptr)) {
            CUdeviceptr value = 0;
            memcpy(&value, bytes + at, sizeof value);
            const CUdeviceptr driver = to_driver(value);
            changed = changed || driver != value;
            memcpy(bytes + at, &driver, sizeof driver);
        }
        return changed;
    };
    const char* packed = nullptr;
    for (void** one = extra; one && *one != CU_LAUNCH_PARAM_END; one += 2) {
        if (*one == CU_LAUNCH_PARAM_BUFFER_POINTER)
            packed = static_cast<const char*>(one[1]);
        if (*one == CU_LAUNCH_PARAM_BUFFER_SIZE)
            packed_bytes_ = *static_cast<const size_t*>(one[1]);
    }
    if (packed) {
        packed_.assign(packed, packed + packed_bytes_);
        if (!translate(packed_.data(), packed_.size()))
            packed_.clear();
        extra_[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
        extra_[1] = packed_.data();
        extra_[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
        extra_[3] = &packed_bytes_;
        extra_[4] = CU_LAUNCH_PARAM_END;
    }
    size_t offset = 0;
    size_t bytes = 0;
    bool changed = false;
    for (size_t i = 0; parameters && parameter_of(function, i, &offset, &bytes) == CUDA_SUCCESS;
         i++) {
        const auto* from = static_cast<const char*>(parameters[i]);
        values_.emplace_back(from, from + bytes);
        changed = translate(values_.back().data(), bytes) || changed;
    }
    for (size_t i = 0; changed && i < values_.size(); i++)
        pointers_.push_back(values_[i].data());
}

} // namespace flowgpu::replay
