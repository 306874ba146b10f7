// Arrays, mipmapped arrays, texture and surface objects.
#include "arguments.h"
#include "arrays.h"
#include "recorded.h"
#include "textures.h"

namespace flowgpu::replay::recorded {

namespace {

// Notes an array that the driver has made, or one of levels by its first; the program's handle.
template <class H> H noted(H made, CUarray first, const Make& make) {
    CUDA_ARRAY3D_DESCRIPTOR about = {};
    const CUresult result = FG_DRIVER(cuArray3DGetDescriptor_v2)(&about, first);
    const char* why = result == CUDA_SUCCESS ? arrays::why_not(about) : "that cannot be asked";
    return note(made, true, [&](Object& object) {
        if (why)
            object.why = why;
        else
            object.make = make;
    });
}

template <class D, class F> CUresult create(CUarray* out, const D* about, Function<F> function) {
    CUarray made = nullptr;
    const CUresult result = function.call(out ? &made : nullptr, about);
    if (result == CUDA_SUCCESS)
        *out = noted(made, made, maker<CUarray>(function, *about));
    return result;
}

// A handle that the driver has with another object, and gives again.
template <class P, class F>
CUresult part_of(P parent, CUarray* out, Function<F> function, unsigned number) {
    const CUresult result = function.call(out, to_driver(parent), number);
    if (result == CUDA_SUCCESS)
        *out = note(*out, false, [&](Object& object) {
            object.parent = object_of(parent);
            object.context = object.parent ? object.parent->context : nullptr;
            object.make = maker<CUarray>(function, parent, number);
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
    return create(pHandle, pAllocateArray, FG_FUNCTION(cuArrayCreate));
}

CUresult cuArrayCreate_v2(CUarray* pHandle, const CUDA_ARRAY_DESCRIPTOR* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_FUNCTION(cuArrayCreate_v2));
}

CUresult cuArray3DCreate(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_FUNCTION(cuArray3DCreate));
}

CUresult cuArray3DCreate_v2(CUarray* pHandle, const CUDA_ARRAY3D_DESCRIPTOR* pAllocateArray) {
    return create(pHandle, pAllocateArray, FG_FUNCTION(cuArray3DCreate_v2));
}

CUresult cuArrayDestroy(CUarray hArray) {
    return destroy(hArray, FG_DRIVER(cuArrayDestroy));
}

CUresult cuArrayGetPlane(CUarray* pPlaneArray, CUarray hArray, unsigned planeIdx) {
    return part_of(hArray, pPlaneArray, FG_FUNCTION(cuArrayGetPlane), planeIdx);
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
    *pHandle = noted(made, first,
                     maker<CUmipmappedArray>(FG_FUNCTION(cuMipmappedArrayCreate),
                                             *pMipmappedArrayDesc, numMipmapLevels));
    return result;
}

CUresult cuMipmappedArrayGetLevel(CUarray* pLevelArray, CUmipmappedArray hMipmappedArray,
                                  unsigned level) {
    return part_of(hMipmappedArray, pLevelArray, FG_FUNCTION(cuMipmappedArrayGetLevel), level);
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
