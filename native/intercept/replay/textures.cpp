#include "textures.h"

#include <chrono>
#include <thread>
#include <vector>

#include "registry.h"
#include "structures.h"
#include "threads.h"

namespace flowgpu::replay::textures {

namespace {

// Numbers that the driver may have for itself above the program's highest.
constexpr size_t kMostOfTheDriver = 4096;
constexpr size_t kMostTries = 1000; // of a millisecond

Textures& all() {
    return registry().textures;
}

// Those of one context: its first, and where the next one's begin.
std::pair<Textures::iterator, Textures::iterator> of(const Object* context) {
    return {all().lower_bound({context, 0}), all().upper_bound({context, ~0ull})};
}

// A texture of any memory: nobody looks at it.
CUresult take_one(unsigned long long* number) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = CUdeviceptr{1} << 45;
    resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = 4;
    CUDA_TEXTURE_DESC texture = {};
    texture.flags = CU_TRSF_READ_AS_INTEGER;
    return FG_DRIVER(cuTexObjectCreate)(number, &resource, &texture, nullptr);
}

CUresult make(const Texture& texture, unsigned long long* number) {
    CUDA_RESOURCE_DESC resource = texture.resource;
    translate(resource, ToDriver());
    if (texture.surface)
        return FG_DRIVER(cuSurfObjectCreate)(number, &resource);
    return FG_DRIVER(cuTexObjectCreate)(number, &resource, &texture.texture,
                                        texture.view ? &*texture.view : nullptr);
}

CUresult end(bool surface, unsigned long long number) {
    return surface ? FG_DRIVER(cuSurfObjectDestroy)(number) : FG_DRIVER(cuTexObjectDestroy)(number);
}

// Makes it as the number that is to be free: a driver that is at work frees it later, and gives
// others until then.
CUresult make_as(const Texture& texture, unsigned long long wanted) {
    std::vector<unsigned long long> others;
    unsigned long long number = 0;
    CUresult result = FG_DRIVER(cuCtxSynchronize)();
    if (result == CUDA_SUCCESS)
        result = make(texture, &number);
    while (result == CUDA_SUCCESS && number != wanted && others.size() < kMostTries) {
        others.push_back(number);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        FG_DRIVER(cuCtxSynchronize)();
        result = make(texture, &number);
    }
    registry().trouble = "number " + std::to_string(wanted);
    if (result == CUDA_SUCCESS && number != wanted) {
        registry().trouble += " became " + std::to_string(number);
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    for (unsigned long long other : others)
        end(texture.surface, other);
    return result;
}

const void* array_of(const CUDA_RESOURCE_DESC& resource) {
    if (resource.resType == CU_RESOURCE_TYPE_ARRAY)
        return resource.res.array.hArray;
    if (resource.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY)
        return resource.res.mipmap.hMipmappedArray;
    return nullptr;
}

} // namespace

void made(unsigned long long number, Texture texture) {
    const CUcontext context = current_context();
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (const Object* array = object_of(array_of(texture.resource)))
        texture.array = array->serial;
    all()[{object_of(context), number}] = texture;
}

Ending::Ending(bool surface, unsigned long long number) {
    const CUcontext context = current_context();
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = all().find({object_of(context), number});
    if (found != all().end() && found->second.surface == surface)
        ended_ = all().extract(found);
}

CUresult Ending::done(CUresult result) {
    if (result != CUDA_SUCCESS && ended_) {
        std::lock_guard<std::mutex> lock(registry().mutex);
        all().insert(std::move(ended_));
    }
    return result;
}

void end_in(const Object* context) {
    const auto [first, last] = of(context);
    all().erase(first, last);
}

void add_names(std::set<std::string>* names) {
    for (const auto& [key, texture] : all()) {
        const char* kind = texture.surface ? "a surface object" : "a texture object";
        const void* handle = array_of(texture.resource);
        const Object* array = object_of(handle);
        if (!key.first)
            names->insert(std::string(kind) + " in a context that is not known");
        else if (handle && (!array || array->serial != texture.array))
            names->insert(std::string(kind) + " of an array that has ended");
    }
}

CUresult take_numbers(const Object* context) {
    std::set<unsigned long long>& taken = registry().taken_numbers[context];
    taken.clear();
    std::set<unsigned long long> wanted;
    const auto [first, last] = of(context);
    for (auto it = first; it != last; ++it)
        wanted.insert(it->first.second);
    if (wanted.empty())
        return CUDA_SUCCESS;
    const size_t most = *wanted.rbegin() + kMostOfTheDriver;
    while (!wanted.empty()) {
        unsigned long long number = 0;
        CUresult result = taken.size() < most ? take_one(&number) : CUDA_ERROR_NOT_SUPPORTED;
        if (result != CUDA_SUCCESS) {
            registry().trouble = "the driver gave " + std::to_string(taken.size()) +
                                 " numbers without " + std::to_string(*wanted.begin());
            return result;
        }
        taken.insert(number);
        wanted.erase(number);
    }
    return CUDA_SUCCESS;
}

CUresult make_all(const Object* context) {
    std::set<unsigned long long>& taken = registry().taken_numbers[context];
    CUresult result = CUDA_SUCCESS;
    const auto [first, last] = of(context);
    for (auto it = first; result == CUDA_SUCCESS && it != last; ++it) {
        const unsigned long long wanted = it->first.second;
        taken.erase(wanted);
        result = end(false, wanted);
        if (result == CUDA_SUCCESS)
            result = make_as(it->second, wanted);
    }
    for (unsigned long long number : std::exchange(taken, {}))
        if (result == CUDA_SUCCESS)
            result = end(false, number);
    return result;
}

} // namespace flowgpu::replay::textures
