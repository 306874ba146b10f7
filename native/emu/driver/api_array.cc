// Arrays, mipmapped arrays, texture and surface objects.
#include <algorithm>
#include <iterator>

#include "client.h"

namespace flowgpu::emu {

namespace {

constexpr uint8_t kTexture = 0;
constexpr uint8_t kSurface = 1;

struct Description {
    CUDA_RESOURCE_DESC resource{};
    CUDA_TEXTURE_DESC texture{};
    CUDA_RESOURCE_VIEW_DESC view{};
};

CUresult describe(uint64_t number, uint8_t kind, Description* out) {
    return rpc(Op::BindingDescription, outs(&out->resource, &out->texture, &out->view), number,
               kind);
}

CUresult tell_resource(uint64_t number, uint8_t kind, CUDA_RESOURCE_DESC* resource) {
    Description found;
    const CUresult r =
        resource == nullptr ? CUDA_ERROR_INVALID_VALUE : describe(number, kind, &found);
    if (r == CUDA_SUCCESS) {
        *resource = found.resource;
    }
    return r;
}

} // namespace

} // namespace flowgpu::emu

using namespace flowgpu::emu;

extern "C" {

CUresult CUDAAPI cuArray3DCreate_v2(CUarray* array, const CUDA_ARRAY3D_DESCRIPTOR* about) {
    return array == nullptr || about == nullptr ? CUDA_ERROR_INVALID_VALUE
                                                : rpc(Op::ArrayCreate, outs(array), *about);
}

CUresult CUDAAPI cuArrayCreate_v2(CUarray* array, const CUDA_ARRAY_DESCRIPTOR* about) {
    if (about == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_ARRAY3D_DESCRIPTOR whole{};
    whole.Width = about->Width;
    whole.Height = about->Height;
    whole.Format = about->Format;
    whole.NumChannels = about->NumChannels;
    return cuArray3DCreate_v2(array, &whole);
}

CUresult CUDAAPI cuArrayDestroy(CUarray array) {
    return array == nullptr ? CUDA_ERROR_INVALID_HANDLE
                            : rpc(Op::ArrayDestroy, outs(), handle_of(array));
}

CUresult CUDAAPI cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR* about, CUarray array) {
    uint8_t mipmapped = 0;
    return about == nullptr ? CUDA_ERROR_INVALID_VALUE
                            : rpc(Op::ArrayDescriptor, outs(about), handle_of(array), mipmapped);
}

CUresult CUDAAPI cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR* about, CUarray array) {
    CUDA_ARRAY3D_DESCRIPTOR whole{};
    if (about == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const CUresult r = cuArray3DGetDescriptor_v2(&whole, array);
    if (r == CUDA_SUCCESS) {
        *about = {whole.Width, whole.Height, whole.Format, whole.NumChannels};
    }
    return r;
}

// Measured: of arrays that are not made for deferred mapping there are no requirements to tell.
CUresult CUDAAPI cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS*, CUarray array,
                                              CUdevice) {
    CUDA_ARRAY3D_DESCRIPTOR about;
    const CUresult r = cuArray3DGetDescriptor_v2(&about, array);
    return r == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE : r;
}

CUresult CUDAAPI cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS*,
                                                       CUmipmappedArray array, CUdevice) {
    CUDA_ARRAY3D_DESCRIPTOR about;
    const CUresult r = rpc(Op::ArrayDescriptor, outs(&about), handle_of(array), uint8_t{1});
    return r == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE : r;
}

CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray* array,
                                        const CUDA_ARRAY3D_DESCRIPTOR* about, unsigned int levels) {
    return array == nullptr || about == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::MipmapCreate, outs(array), *about, uint32_t{levels});
}

CUresult CUDAAPI cuMipmappedArrayGetLevel(CUarray* level, CUmipmappedArray array,
                                          unsigned int index) {
    if (level == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return array == nullptr ? CUDA_ERROR_INVALID_HANDLE
                            : rpc(Op::MipmapLevel, outs(level), handle_of(array), uint32_t{index});
}

CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray array) {
    return rpc(Op::MipmapDestroy, outs(), handle_of(array));
}

CUresult CUDAAPI cuTexObjectCreate(CUtexObject* object, const CUDA_RESOURCE_DESC* resource,
                                   const CUDA_TEXTURE_DESC* texture,
                                   const CUDA_RESOURCE_VIEW_DESC* view) {
    if (object == nullptr || resource == nullptr || texture == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const uint8_t viewed = view != nullptr ? 1 : 0;
    return rpc(Op::BindingCreate, outs(object), kTexture, *resource, *texture, viewed,
               viewed != 0 ? *view : CUDA_RESOURCE_VIEW_DESC{});
}

CUresult CUDAAPI cuTexObjectDestroy(CUtexObject object) {
    return rpc(Op::BindingDestroy, outs(), uint64_t{object}, kTexture);
}

CUresult CUDAAPI cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC* resource, CUtexObject object) {
    return tell_resource(object, kTexture, resource);
}

CUresult CUDAAPI cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC* texture, CUtexObject object) {
    Description found;
    const CUresult r =
        texture == nullptr ? CUDA_ERROR_INVALID_VALUE : describe(object, kTexture, &found);
    if (r == CUDA_SUCCESS) {
        *texture = found.texture;
        std::fill(std::begin(texture->borderColor), std::end(texture->borderColor), 0.0f);
    }
    return r;
}

CUresult CUDAAPI cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC* view, CUtexObject object) {
    Description found;
    const CUresult r =
        view == nullptr ? CUDA_ERROR_INVALID_VALUE : describe(object, kTexture, &found);
    if (r == CUDA_SUCCESS) {
        *view = found.view;
    }
    return r;
}

CUresult CUDAAPI cuSurfObjectCreate(CUsurfObject* object, const CUDA_RESOURCE_DESC* resource) {
    return object == nullptr || resource == nullptr
               ? CUDA_ERROR_INVALID_VALUE
               : rpc(Op::BindingCreate, outs(object), kSurface, *resource, CUDA_TEXTURE_DESC{},
                     uint8_t{0}, CUDA_RESOURCE_VIEW_DESC{});
}

CUresult CUDAAPI cuSurfObjectDestroy(CUsurfObject object) {
    return rpc(Op::BindingDestroy, outs(), uint64_t{object}, kSurface);
}

CUresult CUDAAPI cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC* resource, CUsurfObject object) {
    return tell_resource(object, kSurface, resource);
}

} // extern "C"
