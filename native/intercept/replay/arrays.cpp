#include "arrays.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "current.h"
#include "registry.h"
#include "task.h"

namespace flowgpu::replay::arrays {

namespace {

constexpr unsigned kNoMemory = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;
constexpr uint64_t kApart = 512; // where the next level begins

// What an element is: a block of so many bytes for texels of a square.
struct Element {
    unsigned bytes = 0; // 0: not known
    unsigned side = 1;
};

Element element_of(CUarray_format format, unsigned channels) {
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return {channels};
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return {2 * channels};
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return {4 * channels};
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return {1};
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
        return {2};
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2:
        return {4};
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return {8};
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM:
        return {8, 4};
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB:
        return {16, 4};
    default:
        return {};
    }
}

// One array, or one level of a mipmapped one; everything in it is copied at once.
struct Extent {
    size_t width_bytes, height, depth;
    uint64_t bytes() const { return uint64_t{width_bytes} * height * depth; }
};

Extent extent_of(const CUDA_ARRAY3D_DESCRIPTOR& array) {
    const Element element = element_of(array.Format, array.NumChannels);
    const auto blocks = [&](size_t texels) { return (texels + element.side - 1) / element.side; };
    return {blocks(array.Width) * element.bytes, blocks(std::max<size_t>(array.Height, 1)),
            std::max<size_t>(array.Depth, 1)};
}

// An object's bytes: one level after the other.
struct Copy {
    const Object* object;
    CUdeviceptr address;
};

struct Copies {
    std::vector<Copy> all;
    bool arrays_are_new = false;
};

// Made on first use, never destroyed, as Task. The service thread's alone.
Copies& copies() {
    static auto* made = new Copies();
    return *made;
}

// CUDA_ERROR_INVALID_VALUE where there is no such level.
CUresult level_of(const Object& object, unsigned level, CUarray* array) {
    if (object.kind == Kind::mipmap)
        return FG_DRIVER(cuMipmappedArrayGetLevel)(array, object.driver<CUmipmappedArray>(), level);
    *array = object.driver<CUarray>();
    return level ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// `work(array, extent, offset)` for each level; gives the bytes of all.
template <class F> CUresult each_level(const Object& object, uint64_t* bytes, F work) {
    *bytes = 0;
    for (unsigned level = 0;; level++) {
        CUarray array = nullptr;
        CUresult result = level_of(object, level, &array);
        if (level && result == CUDA_ERROR_INVALID_VALUE)
            return CUDA_SUCCESS;
        CUDA_ARRAY3D_DESCRIPTOR about = {};
        if (result == CUDA_SUCCESS)
            result = FG_DRIVER(cuArray3DGetDescriptor_v2)(&about, array);
        if (result == CUDA_SUCCESS)
            result = work(array, extent_of(about), *bytes);
        if (result != CUDA_SUCCESS)
            return result;
        *bytes += (extent_of(about).bytes() + kApart - 1) / kApart * kApart;
    }
}

CUresult copy(const Object& object, CUdeviceptr memory, bool back) {
    uint64_t bytes = 0;
    const auto work = [&](CUarray array, const Extent& extent, uint64_t offset) {
        CUDA_MEMCPY3D params = {};
        (back ? params.srcMemoryType : params.dstMemoryType) = CU_MEMORYTYPE_DEVICE;
        (back ? params.srcDevice : params.dstDevice) = memory + offset;
        (back ? params.srcPitch : params.dstPitch) = extent.width_bytes;
        (back ? params.srcHeight : params.dstHeight) = extent.height;
        (back ? params.dstMemoryType : params.srcMemoryType) = CU_MEMORYTYPE_ARRAY;
        (back ? params.dstArray : params.srcArray) = array;
        params.WidthInBytes = extent.width_bytes;
        params.Height = extent.height;
        params.Depth = extent.depth;
        return FG_DRIVER(cuMemcpy3D_v2)(&params);
    };
    CUresult result = each_level(object, &bytes, work);
    const CUresult done = FG_DRIVER(cuCtxSynchronize)();
    return result == CUDA_SUCCESS ? done : result;
}

// Memory is allocated for them without the registry's lock; nobody may be in the driver.
std::vector<const Object*> all_arrays() {
    std::lock_guard<std::mutex> lock(registry().mutex);
    std::vector<const Object*> found;
    for (const auto& [serial, object] : registry().objects) {
        const bool has_bytes = object->kind == Kind::array || object->kind == Kind::mipmap;
        if (has_bytes && !object->parent) // a level is copied with its array
            found.push_back(object.get());
    }
    return found;
}

CUcontext context_of(const Object& object) {
    return object.context ? reinterpret_cast<CUcontext>(object.context->slot) : nullptr;
}

CUresult keep(const Object& object, uint64_t* bytes) {
    const CUcontext context = context_of(object);
    Current current(context);
    CUresult result = current.result();
    if (result == CUDA_SUCCESS)
        result = each_level(object, bytes, [](auto...) { return CUDA_SUCCESS; });
    CUdevice device = 0;
    if (result == CUDA_SUCCESS)
        result = FG_DRIVER(cuCtxGetDevice)(&device);
    CUdeviceptr memory = 0;
    if (result == CUDA_SUCCESS)
        result = task().memory.allocate(device, context, *bytes, &memory);
    if (result != CUDA_SUCCESS)
        return result;
    copies().all.push_back({&object, memory});
    return copy(object, memory, false);
}

bool fail(char* detail, size_t bytes, const char* what, uint64_t size, CUresult result) {
    const char* name = "an unknown error";
    FG_DRIVER(cuGetErrorName)(result, &name);
    snprintf(detail, bytes, "arrays, of which %llu MiB cannot be %s: %s",
             static_cast<unsigned long long>(size >> 20), what, name);
    return false;
}

} // namespace

const char* why_not(const CUDA_ARRAY3D_DESCRIPTOR& array) {
    if (array.Flags & kNoMemory)
        return "to which memory is mapped (sparse, or deferred)";
    return element_of(array.Format, array.NumChannels).bytes ? nullptr
                                                             : "of a format that is not known";
}

bool copy_out(char* detail, size_t bytes) {
    for (const Object* object : all_arrays()) {
        uint64_t size = 0;
        const CUresult result = keep(*object, &size);
        if (result == CUDA_SUCCESS)
            continue;
        fail(detail, bytes, "copied", size, result);
        stay();
        return false;
    }
    return true;
}

void stay() {
    for (const Copy& one : copies().all)
        task().memory.release(one.address);
    copies().all.clear();
    copies().arrays_are_new = false;
}

void driver_is_new() {
    copies().arrays_are_new = true;
}

bool copy_back(char* detail, size_t bytes) {
    if (!copies().arrays_are_new)
        return true;
    for (const Copy& one : copies().all) {
        Current current(context_of(*one.object));
        CUresult result = current.result();
        if (result == CUDA_SUCCESS)
            result = copy(*one.object, one.address, true);
        if (result != CUDA_SUCCESS)
            return fail(detail, bytes, "filled", 0, result);
    }
    stay();
    return true;
}

} // namespace flowgpu::replay::arrays
