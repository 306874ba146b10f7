// Texture and surface objects: numbers of a context, and what kernels see under them.
#include "state.h"

#include <iterator>

namespace flowgpu::emu {

namespace {

constexpr unsigned int kTextureFlags = CU_TRSF_READ_AS_INTEGER | CU_TRSF_NORMALIZED_COORDINATES |
                                       CU_TRSF_DISABLE_TRILINEAR_OPTIMIZATION |
                                       CU_TRSF_SEAMLESS_CUBEMAP;

Binding::Kind kind_of(uint8_t surface) {
    return surface != 0 ? Binding::Kind::kSurface : Binding::Kind::kTexture;
}

uint64_t handle_of(const void* handle) {
    return reinterpret_cast<uint64_t>(handle);
}

ptx::Image::Texel texel_of(CUarray_format format) {
    using Texel = ptx::Image::Texel;
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
        return Texel::u8;
    case CU_AD_FORMAT_UNSIGNED_INT16:
        return Texel::u16;
    case CU_AD_FORMAT_UNSIGNED_INT32:
        return Texel::u32;
    case CU_AD_FORMAT_SIGNED_INT8:
        return Texel::s8;
    case CU_AD_FORMAT_SIGNED_INT16:
        return Texel::s16;
    case CU_AD_FORMAT_SIGNED_INT32:
        return Texel::s32;
    case CU_AD_FORMAT_HALF:
        return Texel::f16;
    default:
        return Texel::f32;
    }
}

// The view's name of an array's format.
int view_format(CUarray_format format, unsigned int channels) {
    constexpr CUarray_format kOrder[] = {CU_AD_FORMAT_UNSIGNED_INT8,  CU_AD_FORMAT_SIGNED_INT8,
                                         CU_AD_FORMAT_UNSIGNED_INT16, CU_AD_FORMAT_SIGNED_INT16,
                                         CU_AD_FORMAT_UNSIGNED_INT32, CU_AD_FORMAT_SIGNED_INT32,
                                         CU_AD_FORMAT_HALF,           CU_AD_FORMAT_FLOAT};
    const auto at = std::find(std::begin(kOrder), std::end(kOrder), format) - std::begin(kOrder);
    const int wide = channels == 1 ? 0 : channels == 2 ? 1 : 2;
    return CU_RES_VIEW_FORMAT_UINT_1X8 + 3 * static_cast<int>(at) + wide;
}

// A view that shows the whole array as it is; others are not supported.
bool shows_all(const CUDA_RESOURCE_VIEW_DESC& view, const CUDA_ARRAY3D_DESCRIPTOR& about,
               size_t levels) {
    const bool layered = (about.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    return (view.format == CU_RES_VIEW_FORMAT_NONE ||
            view.format == view_format(about.Format, about.NumChannels)) &&
           view.width == about.Width && view.height == about.Height && view.depth == about.Depth &&
           view.firstMipmapLevel == 0 && view.lastMipmapLevel + size_t{1} == levels &&
           view.firstLayer == 0 && view.lastLayer == (layered ? about.Depth - 1 : 0);
}

CUresult not_supported(Session& s, const char* what) {
    s.machine().count_unsupported(what);
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult reachable(const Context& context, uint64_t owner) {
    return owner == context.handle || context.peers.count(owner) != 0
               ? CUDA_SUCCESS
               : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

bool aligned(CUdeviceptr address) {
    return address != 0 && address % kTextureAlignment == 0;
}

// What the resource's elements are, in *format and *channels.
CUresult check_resource(Session& s, const Context& context, const Binding& made,
                        CUarray_format* format, unsigned int* channels) {
    const bool texture = made.kind == Binding::Kind::kTexture;
    const auto& res = made.resource.res;
    const CUDA_ARRAY3D_DESCRIPTOR* about = nullptr;
    uint64_t owner = 0;
    size_t levels = 1;
    if (made.resource.flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto array = s.client.find<Array>(handle_of(res.array.hArray));
    const auto mipmap = s.client.find<Mipmap>(handle_of(res.mipmap.hMipmappedArray));
    if (made.resource.resType == CU_RESOURCE_TYPE_ARRAY && array != nullptr) {
        about = &array->about;
        owner = array->context;
    } else if (made.resource.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY && mipmap != nullptr &&
               texture) {
        about = &mipmap->about;
        owner = mipmap->context;
        levels = mipmap->levels.size();
    } else if (made.resource.resType == CU_RESOURCE_TYPE_LINEAR && texture) {
        *format = res.linear.format;
        *channels = res.linear.numChannels;
        const CUresult r = check_element(s.client, *format, *channels);
        return r != CUDA_SUCCESS ? r
               : !aligned(res.linear.devPtr) || made.viewed ||
                       res.linear.sizeInBytes / element_bytes(*format, *channels) > kLinearWidth
                   ? CUDA_ERROR_INVALID_VALUE
                   : CUDA_SUCCESS;
    } else if (made.resource.resType == CU_RESOURCE_TYPE_PITCH2D && texture) {
        const auto& plane = res.pitch2D;
        *format = plane.format;
        *channels = plane.numChannels;
        const CUresult r = check_element(s.client, *format, *channels);
        return r != CUDA_SUCCESS ? r
               : !aligned(plane.devPtr) || made.viewed || plane.width == 0 || plane.height == 0 ||
                       plane.pitchInBytes == 0 || plane.pitchInBytes % kPitchAlignment != 0 ||
                       plane.width > kPitchWidth || plane.height > kPitchHeight ||
                       plane.pitchInBytes > kMostPitch
                   ? CUDA_ERROR_INVALID_VALUE
                   : CUDA_SUCCESS;
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *format = about->Format;
    *channels = about->NumChannels;
    if (made.viewed && !shows_all(made.view, *about, levels)) {
        return not_supported(s, "resource views but of a whole array as it is");
    }
    return reachable(context, owner);
}

bool reads_integers(CUarray_format format, unsigned int flags) {
    const bool wide = format == CU_AD_FORMAT_UNSIGNED_INT32 || format == CU_AD_FORMAT_SIGNED_INT32;
    const bool narrow = format != CU_AD_FORMAT_HALF && format != CU_AD_FORMAT_FLOAT && !wide;
    return wide || (narrow && (flags & CU_TRSF_READ_AS_INTEGER) != 0);
}

CUresult check_sampling(Session& s, const Binding& made, CUarray_format format) {
    const CUDA_TEXTURE_DESC& how = made.texture;
    const bool integers = reads_integers(format, how.flags);
    bool plain_border = true;
    for (const float part : how.borderColor) {
        plain_border = plain_border && part == 0;
    }
    for (const CUaddress_mode mode : how.addressMode) {
        if (mode > CU_TR_ADDRESS_MODE_BORDER) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (how.filterMode > CU_TR_FILTER_MODE_LINEAR ||
        how.mipmapFilterMode > CU_TR_FILTER_MODE_LINEAR ||
        (how.filterMode == CU_TR_FILTER_MODE_LINEAR && integers)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((how.flags & ~kTextureFlags) != 0) {
        return (how.flags & ~(kTextureFlags | CU_TRSF_SRGB)) != 0
                   ? CUDA_ERROR_INVALID_VALUE
                   : not_supported(s, "textures in sRGB");
    }
    if (integers && !plain_border) {
        return not_supported(s, "textures of integers with a border that is not 0");
    }
    const bool mipmapped = made.resource.resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
    if (mipmapped && (how.mipmapLevelBias != 0 || how.minMipmapLevelClamp > 0)) {
        return not_supported(s, "textures of another level than the first");
    }
    return CUDA_SUCCESS;
}

void describe_array(const Array& array, ptx::Image* image) {
    const CUDA_ARRAY3D_DESCRIPTOR& about = array.about;
    const bool layered = (about.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    image->host = array.phys->host() + array.offset;
    image->texel = texel_of(about.Format);
    image->channels = static_cast<uint8_t>(about.NumChannels);
    image->width = about.Width;
    image->height = about.Height;
    image->depth = layered ? 0 : about.Depth;
    image->layers = layered ? about.Depth : 0;
    image->cube = (about.Flags & CUDA_ARRAY3D_CUBEMAP) != 0;
    image->stored = (about.Flags & CUDA_ARRAY3D_SURFACE_LDST) != 0;
    image->pitch = array.row();
    image->slice = array.row() * array.rows();
}

void describe_memory(const CUDA_RESOURCE_DESC& resource, ptx::Image* image) {
    const auto& linear = resource.res.linear;
    const auto& plane = resource.res.pitch2D;
    const bool flat = resource.resType == CU_RESOURCE_TYPE_LINEAR;
    image->linear_memory = flat;
    image->address = flat ? linear.devPtr : plane.devPtr;
    image->texel = texel_of(flat ? linear.format : plane.format);
    image->channels = static_cast<uint8_t>(flat ? linear.numChannels : plane.numChannels);
    image->width =
        flat ? linear.sizeInBytes / element_bytes(linear.format, linear.numChannels) : plane.width;
    image->height = flat ? 0 : plane.height;
    image->pitch = flat ? 0 : plane.pitchInBytes;
}

void describe_sampling(const CUDA_TEXTURE_DESC& how, ptx::Image* image) {
    const bool normalized = (how.flags & CU_TRSF_NORMALIZED_COORDINATES) != 0;
    for (int i = 0; i < 3; ++i) {
        // Without normalised coordinates there is nothing to wrap around or to mirror.
        const CUaddress_mode mode = how.addressMode[i];
        const bool turns = mode == CU_TR_ADDRESS_MODE_WRAP || mode == CU_TR_ADDRESS_MODE_MIRROR;
        image->edge[i] =
            static_cast<ptx::Image::Edge>(turns && !normalized ? CU_TR_ADDRESS_MODE_CLAMP : mode);
    }
    image->filtered = how.filterMode == CU_TR_FILTER_MODE_LINEAR;
    image->normalized = normalized;
    std::copy(std::begin(how.borderColor), std::end(how.borderColor), image->border);
}

} // namespace

void free_numbers(Context& context) {
    for (auto it = context.bindings.begin(); it != context.bindings.end();) {
        const bool ended = it->second.kind == Binding::Kind::kEnded;
        it = ended ? context.bindings.erase(it) : std::next(it);
    }
}

uint64_t bind(Context& context, Binding binding) {
    uint64_t number = 1;
    for (const auto& [taken, other] : context.bindings) {
        if (taken != number) {
            break;
        }
        ++number;
    }
    context.bindings.emplace(number, std::move(binding));
    return number;
}

bool image_of(const Client& client, const Context& context, uint64_t number, ptx::Image* image,
              std::shared_ptr<Phys>* keep) {
    const auto found = context.bindings.find(number);
    if (found == context.bindings.end() || !found->second.is_programs()) {
        return false;
    }
    const Binding& binding = found->second;
    const auto& res = binding.resource.res;
    uint64_t handle = 0;
    *image = {};
    image->surface = binding.kind == Binding::Kind::kSurface;
    switch (binding.resource.resType) {
    case CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: {
        // What a GPU reads where no level is chosen is not known: not the first of several.
        const auto mipmap = client.find<Mipmap>(handle_of(res.mipmap.hMipmappedArray));
        handle = mipmap != nullptr && mipmap->levels.size() == 1 ? mipmap->levels.front() : 0;
        break;
    }
    case CU_RESOURCE_TYPE_ARRAY:
        handle = handle_of(res.array.hArray);
        break;
    default:
        describe_memory(binding.resource, image);
    }
    if (image->address == 0) {
        const auto array = client.find<Array>(handle);
        if (array == nullptr) {
            return false;
        }
        describe_array(*array, image);
        *keep = array->phys;
    }
    const unsigned int flags = image->surface ? 0u : binding.texture.flags;
    const bool wide =
        image->texel == ptx::Image::Texel::u32 || image->texel == ptx::Image::Texel::s32;
    image->integers = wide || (flags & CU_TRSF_READ_AS_INTEGER) != 0;
    describe_sampling(binding.texture, image);
    return true;
}

int32_t op_BindingCreate(Session& s) {
    Binding made;
    made.kind = kind_of(s.in.take<uint8_t>());
    made.resource = s.in.take<CUDA_RESOURCE_DESC>();
    made.texture = s.in.take<CUDA_TEXTURE_DESC>();
    made.viewed = s.in.take<uint8_t>() != 0;
    made.view = s.in.take<CUDA_RESOURCE_VIEW_DESC>();
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    CUarray_format format{};
    unsigned int channels = 0;
    if (const CUresult r = check_resource(s, *context, made, &format, &channels);
        r != CUDA_SUCCESS) {
        return r;
    }
    if (made.kind == Binding::Kind::kTexture) {
        if (const CUresult r = check_sampling(s, made, format); r != CUDA_SUCCESS) {
            return r;
        }
    }
    s.out.put(bind(*context, std::move(made)));
    return CUDA_SUCCESS;
}

int32_t op_BindingDestroy(Session& s) {
    const auto number = s.in.take<uint64_t>();
    const auto kind = kind_of(s.in.take<uint8_t>());
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    const auto found = context->bindings.find(number);
    if (found == context->bindings.end() || !found->second.is_programs()) {
        return CUDA_SUCCESS; // measured: a number that is none
    }
    if (found->second.kind != kind) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    found->second.kind = Binding::Kind::kEnded;
    s.client.space.changed(); // kernels look up again what their numbers mean
    return CUDA_SUCCESS;
}

int32_t op_BindingDescription(Session& s) {
    const auto number = s.in.take<uint64_t>();
    const auto kind = kind_of(s.in.take<uint8_t>());
    CUresult error = CUDA_SUCCESS;
    const auto context = s.context(&error);
    if (context == nullptr) {
        return error;
    }
    const auto found = context->bindings.find(number);
    if (found == context->bindings.end() || found->second.kind != kind) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.out.put(found->second.resource);
    s.out.put(found->second.texture);
    s.out.put(found->second.view);
    return CUDA_SUCCESS;
}

} // namespace flowgpu::emu
