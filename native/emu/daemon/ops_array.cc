// Arrays and mipmapped arrays: what the driver makes of a descriptor, and the memory behind it.
#include "state.h"

namespace flowgpu::emu {

namespace {

constexpr unsigned int kFlags = CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_SURFACE_LDST |
                                CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_TEXTURE_GATHER;
constexpr unsigned int kLateFlags = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;

struct Extent {
    uint64_t width, height, depth;
};

bool within(const CUDA_ARRAY3D_DESCRIPTOR& about, const Extent& most) {
    return about.Width <= most.width && about.Height <= most.height && about.Depth <= most.depth;
}

// The shapes that cuArray3DCreate lists, with the largest ones of compute capability 8.0.
bool good_shape(const CUDA_ARRAY3D_DESCRIPTOR& about, bool mipmapped) {
    const bool layered = (about.Flags & CUDA_ARRAY3D_LAYERED) != 0;
    const bool surface = (about.Flags & CUDA_ARRAY3D_SURFACE_LDST) != 0;
    if (about.Width == 0) {
        return false;
    }
    if ((about.Flags & CUDA_ARRAY3D_TEXTURE_GATHER) != 0 &&
        (layered || (about.Flags & CUDA_ARRAY3D_CUBEMAP) != 0 || about.Height == 0 ||
         about.Depth != 0 || !within(about, {32768, 32768, 0}))) {
        return false;
    }
    if ((about.Flags & CUDA_ARRAY3D_CUBEMAP) != 0) {
        return about.Width == about.Height && about.Depth != 0 && about.Depth % 6 == 0 &&
               within(about, {32768, 32768, layered ? 2046u : 6u});
    }
    if (layered) {
        return about.Depth != 0 && within(about, {32768, 32768, 2048});
    }
    if (about.Depth != 0) {
        return about.Height != 0 && (within(about, {16384, 16384, 16384}) ||
                                     (!surface && within(about, {8192, 8192, 32768})));
    }
    if (about.Height != 0) {
        return within(about, mipmapped ? Extent{32768, 32768, 0} : Extent{131072, 65536, 0});
    }
    return about.Width <= (mipmapped || surface ? 32768 : 131072);
}

CUresult check_descriptor(Session& s, const CUDA_ARRAY3D_DESCRIPTOR& about, bool mipmapped) {
    if ((about.Flags & ~(kFlags | kLateFlags)) != 0 || !good_shape(about, mipmapped)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const CUresult r = check_element(s.client, about.Format, about.NumChannels);
        r != CUDA_SUCCESS) {
        return r;
    }
    if ((about.Flags & kLateFlags) != 0) {
        s.machine().count_unsupported("arrays that are sparse or mapped later");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

bool is_3d(const CUDA_ARRAY3D_DESCRIPTOR& about) {
    return about.Depth != 0 && (about.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) == 0;
}

CUDA_ARRAY3D_DESCRIPTOR level_of(CUDA_ARRAY3D_DESCRIPTOR about, uint32_t level) {
    const auto halve = [level](size_t& extent) {
        extent = extent == 0 ? 0 : std::max<size_t>(extent >> level, 1);
    };
    halve(about.Width);
    halve(about.Height);
    if (is_3d(about)) {
        halve(about.Depth);
    }
    return about;
}

uint32_t most_levels(const CUDA_ARRAY3D_DESCRIPTOR& about) {
    const size_t longest =
        std::max({about.Width, about.Height, is_3d(about) ? about.Depth : size_t{0}});
    uint32_t levels = 1;
    while (longest >> levels != 0) {
        ++levels;
    }
    return levels;
}

std::shared_ptr<Phys> memory_for(Session& s, const Context& context, uint64_t bytes) {
    const uint64_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    return s.machine().create(context.device, whole, s.client.owner);
}

// What still uses the array ends first.
CUresult wait_for(Session& s, uint64_t context) {
    const auto owner = s.client.find<Context>(context);
    return owner != nullptr ? s.wait_idle(*owner) : CUDA_SUCCESS;
}

} // namespace

CUresult check_element(Client& client, CUarray_format format, unsigned int channels) {
    constexpr int kFirstSpecial = 0x50; // packed, compressed, planar and normalised ones
    constexpr int kLastSpecial = 0xcf;
    if (channels > 4 || channels == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (format >= kFirstSpecial && format <= kLastSpecial) {
        client.machine->count_unsupported("array formats but plain integers and floats");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return element_bytes(format, channels) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

uint64_t Array::row() const {
    return about.Width * element_bytes(about.Format, about.NumChannels);
}

int32_t op_ArrayCreate(Session& s) {
    const auto about = s.in.take<CUDA_ARRAY3D_DESCRIPTOR>();
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    if (const CUresult r = check_descriptor(s, about, false); r != CUDA_SUCCESS) {
        return r;
    }
    Array made(0);
    made.about = about;
    made.phys = memory_for(s, *context, made.bytes());
    if (made.phys == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const auto array = s.client.make<Array>();
    array->about = about;
    array->phys = std::move(made.phys);
    array->context = context->handle;
    s.out.put(array->handle);
    return CUDA_SUCCESS;
}

int32_t op_ArrayDestroy(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    CUresult error = CUDA_SUCCESS;
    if (s.context_for_unsafe(&error) == nullptr) {
        return error;
    }
    auto array = s.client.find<Array>(handle);
    if (array == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (array->mipmap != 0) {
        return CUDA_SUCCESS; // measured: it goes on as a level of its mipmapped array
    }
    if (const CUresult r = wait_for(s, array->context); r != CUDA_SUCCESS) {
        return r;
    }
    if (s.client.objects.erase(handle) == 0) {
        return CUDA_ERROR_INVALID_HANDLE; // another thread destroyed it meanwhile
    }
    s.client.space.changed(); // kernels look up again what their numbers mean
    return CUDA_SUCCESS;
}

int32_t op_ArrayDescriptor(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const bool mipmapped = s.in.take<uint8_t>() != 0;
    CUresult error = CUDA_SUCCESS;
    if (s.context(&error) == nullptr) {
        return error;
    }
    const auto array = s.client.find<Array>(handle);
    const auto mipmap = s.client.find<Mipmap>(handle);
    if (mipmapped ? mipmap == nullptr : array == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    s.out.put(mipmapped ? mipmap->about : array->about);
    return CUDA_SUCCESS;
}

int32_t op_MipmapCreate(Session& s) {
    const auto about = s.in.take<CUDA_ARRAY3D_DESCRIPTOR>();
    const auto wanted = s.in.take<uint32_t>();
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context_for_unsafe(&error);
    if (context == nullptr) {
        return error;
    }
    if (const CUresult r = check_descriptor(s, about, true); r != CUDA_SUCCESS) {
        return r;
    }
    const uint32_t count = std::clamp(wanted, 1u, most_levels(about));
    std::vector<uint64_t> offsets;
    uint64_t bytes = 0;
    for (uint32_t level = 0; level < count; ++level) {
        Array one(0);
        one.about = level_of(about, level);
        offsets.push_back(bytes);
        bytes += (one.bytes() + kSmallAlignment - 1) / kSmallAlignment * kSmallAlignment;
    }
    auto phys = memory_for(s, *context, bytes);
    if (phys == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const auto mipmap = s.client.make<Mipmap>();
    mipmap->about = about;
    mipmap->context = context->handle;
    mipmap->number = bind(*context, {});
    for (uint32_t level = 0; level < count; ++level) {
        const auto array = s.client.make<Array>();
        array->about = level_of(about, level);
        array->phys = phys;
        array->offset = offsets[level];
        array->context = context->handle;
        array->mipmap = mipmap->handle;
        mipmap->levels.push_back(array->handle);
    }
    mipmap->phys = std::move(phys);
    s.out.put(mipmap->handle);
    return CUDA_SUCCESS;
}

int32_t op_MipmapLevel(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    const auto level = s.in.take<uint32_t>();
    CUresult error = CUDA_SUCCESS;
    if (s.context(&error) == nullptr) {
        return error;
    }
    const auto mipmap = s.client.find<Mipmap>(handle);
    if (mipmap == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (level >= mipmap->levels.size()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(mipmap->levels[level]);
    return CUDA_SUCCESS;
}

int32_t op_MipmapDestroy(Session& s) {
    const auto handle = s.in.take<uint64_t>();
    if (handle == 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult error = CUDA_SUCCESS;
    if (s.context_for_unsafe(&error) == nullptr) {
        return error;
    }
    const auto mipmap = s.client.find<Mipmap>(handle);
    if (mipmap == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (const CUresult r = wait_for(s, mipmap->context); r != CUDA_SUCCESS) {
        return r;
    }
    if (s.client.objects.erase(handle) == 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (const uint64_t level : mipmap->levels) {
        s.client.objects.erase(level);
    }
    if (const auto owner = s.client.find<Context>(mipmap->context)) {
        owner->bindings.erase(mipmap->number);
    }
    s.client.space.changed();
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
