// Arrays, mipmapped arrays, texture and surface objects.
#include "arguments.h"
#include "arrays.h"
#include "recorded.h"
#include "textures.h"

namespace flowgpu::replay::recorded {

namespace {

// Notes an array that the driver has made, or one of levels by its first; the program's handle.
template <class H, class F> H noted(H made, CUarray first, F make) {
    CUDA_ARRAY3D_DESCRIPTOR about = {};
    const CUresult result = FG_DRIVER(cuArray3DGetDescriptor_v2)(&about, first);
    const char* why = result == CUDA_SUCCESS ? arrays::why_not(about) : "that cannot be asked";
    return note(made, true, [&](Object& object) {
        if (why)
            object.why = why;
        else
            object.make = maker<H>(make);
    });
}

template <class D, class F> CUresult create(CUarray* out, const D* about, F function) {
    CUarray made = nullptr;
    const CUresult result = function(out ? &made : nullptr, about);
    if (result == CUDA_SUCCESS)
        *out = noted(made, made,
                     [function, copy = *about](CUarray* again) { return function(again, &copy); });
    return result;
}

// A handle that the driver has with another object, and gives again.
CUresult part_of(const void* parent, CUarray* out, CUresult result, const Make& make) {
    if (result == CUDA_SUCCESS)
        *out = note(*out, false, [&](Object& object) {
            object.parent = object_of(parent);
            object.context = object.parent ? object.parent->context : nullptr;
            object.make = make;
        });
    return result;
}

CUresult map_arrays(CUarrayMapInfo* list, unsigned count, CUstream stream,
                    decltype(&::cuMemMapArrayAsync) function) {
    std::vector<CUarrayMapInfo> translated;
    if (list)
        translated.assign(list, list + count);
    for (CUarrayMapInfo& info : translated)
        translate(info, ToDriver());
    return function(list ? translated.data() : nullptr, count, to_driver(stream));
}

} // namespace

CUresult cuArrayCreate(CUarray* pHandle, const CUDA_ARRAY_DESCRIPTOR_v1* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_DRIVER(cuArrayCreate));
}

CUresult cuArrayCreate_v2(CUarray* pHandle, const CUDA_ARRAY_DESCRIPTOR* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_DRIVER(cuArrayCreate_v2));
}

CUresult cuArray3DCreate(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_DRIVER(cuArray3DCreate));
}

CUresult cuArray3DCreate_v2(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_DRIVER(cuArray3DCreate_v2));
}

CUresult cuArrayDestroy(CUarray hArray) {
    return destroy(hArray, FG_DRIVER(cuArrayDestroy));
}

CUresult cuArrayGetPlane(CUarray* pPlaneArray, CUarray hArray, unsigned planeIdx) {
    const auto ask = [=](CUarray* out) {
        return FG_DRIVER(cuArrayGetPlane)(out, to_driver(hArray), planeIdx);
    };
    return part_of(hArray, pPlaneArray, ask(pPlaneArray), maker<CUarray>(ask));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray* pHandle,
                                const CUDA_ARRAY3D_DESCRIPTOR* pMipmappedArrayDesc,
                                unsigned numMipmapLevels) {
    CUmipmappedArray made = nullptr;
    const CUresult result = FG_DRIVER(cuMipmappedArrayCreate)(pHandle ? &made : nullptr,
                                                              pMipmappedArrayDesc, numMipmapLevels);
    if (result != CUDA_SUCCESS)
        return result;
    CUarray first = nullptr;
    FG_DRIVER(cuMipmappedArrayGetLevel)(&first, made, 0);
    *pHandle =
        noted(made, first, [copy = *pMipmappedArrayDesc, numMipmapLevels](CUmipmappedArray* again) {
            return FG_DRIVER(cuMipmappedArrayCreate)(again, &copy, numMipmapLevels);
        });
    return result;
}

CUresult cuMipmappedArrayGetLevel(CUarray* pLevelArray, CUmipmappedArray hMipmappedArray,
                                  unsigned level) {
    const auto ask = [=](CUarray* out) {
        return FG_DRIVER(cuMipmappedArrayGetLevel)(out, to_driver(hMipmappedArray), level);
    };
    return part_of(hMipmappedArray, pLevelArray, ask(pLevelArray), maker<CUarray>(ask));
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) {
    return destroy(hMipmappedArray, FG_DRIVER(cuMipmappedArrayDestroy));
}

CUresult cuMemMapArrayAsync(CUarrayMapInfo* mapInfoList, unsigned count, CUstream hStream) {
    return map_arrays(mapInfoList, count, hStream, FG_DRIVER(cuMemMapArrayAsync));
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo* mapInfoList, unsigned count, CUstream hStream) {
    return map_arrays(mapInfoList, count, hStream, FG_DRIVER(cuMemMapArrayAsync_ptsz));
}

CUresult cuTexObjectCreate(CUtexObject* pTexObject, const CUDA_RESOURCE_DESC* pResDesc,
                           const CUDA_TEXTURE_DESC* pTexDesc,
                           const CUDA_RESOURCE_VIEW_DESC* pResViewDesc) {
    const CUresult result =
        DriverCall(FG_DRIVER(cuTexObjectCreate))(pTexObject, pResDesc, pTexDesc, pResViewDesc);
    if (result != CUDA_SUCCESS)
        return result;
    Texture texture;
    texture.resource = *pResDesc;
    texture.texture = *pTexDesc;
    if (pResViewDesc)
        texture.view = *pResViewDesc;
    textures::made(*pTexObject, texture);
    return result;
}

CUresult cuTexObjectDestroy(CUtexObject texObject) {
    textures::Ending ending(false, texObject);
    return ending.done(FG_DRIVER(cuTexObjectDestroy)(texObject));
}

CUresult cuSurfObjectCreate(CUsurfObject* pSurfObject, const CUDA_RESOURCE_DESC* pResDesc) {
    const CUresult result = DriverCall(FG_DRIVER(cuSurfObjectCreate))(pSurfObject, pResDesc);
    if (result != CUDA_SUCCESS)
        return result;
    Texture texture;
    texture.surface = true;
    texture.resource = *pResDesc;
    textures::made(*pSurfObject, texture);
    return result;
}

CUresult cuSurfObjectDestroy(CUsurfObject surfObject) {
    textures::Ending ending(true, surfObject);
    return ending.done(FG_DRIVER(cuSurfObjectDestroy)(surfObject));
}

} // namespace flowgpu::replay::recorded
