// Textures and surfaces: how a number and coordinates become an element, and reads between
// elements.
#include <cmath>

#include "float_bits.h"
#include "memory.h"
#include "ops.h"

namespace flowgpu::emu::ptx {

namespace {

using Texel = Image::Texel;
using Edge = Image::Edge;

// How far a coordinate can be from an image and still be told from others.
constexpr double most_coordinate = 1 << 30;

struct Color {
    float part[4]; // fractions and floats
    uint32_t bits[4];
};

bool has_shape(const Image& im, Geometry geometry) {
    const bool flat = im.height == 0, solid = im.depth != 0, layered = im.layers != 0;
    switch (geometry) {
    case Geometry::d1:
        return flat && !layered;
    case Geometry::d2:
        return !flat && !solid && !layered;
    case Geometry::d3:
        return solid;
    case Geometry::a1d:
        return flat && layered;
    case Geometry::a2d: // surfaces have a cubemap's faces as layers
        return !flat && layered && (im.surface || !im.cube);
    }
    return false;
}

uint32_t spatial(Geometry geometry) {
    return geometry == Geometry::d1 || geometry == Geometry::a1d   ? 1
           : geometry == Geometry::d2 || geometry == Geometry::a2d ? 2
                                                                   : 3;
}

bool is_layered(Geometry geometry) {
    return geometry == Geometry::a1d || geometry == Geometry::a2d;
}

// The image that a lane's number means, or null after raising a fault.
const Image* image_for(Cta& c, uint64_t number, bool surface, Geometry geometry, uint32_t lane) {
    const Image* im = c.m.image(number);
    if (!im || im->surface != surface || (surface && !im->stored)) {
        c.raise(Result::Code::illegal_address, number, lane);
        return nullptr;
    }
    if (!has_shape(*im, geometry)) { // the ISA leaves open what comes of it
        c.raise(Result::Code::illegal_instruction, number, lane);
        return nullptr;
    }
    return im;
}

uint8_t* element_at(Cta& c, const Image& im, uint64_t x, uint64_t y, uint64_t z, uint32_t lane) {
    const uint32_t size = im.element();
    const uint64_t offset = z * im.slice + y * im.pitch + x * size;
    return im.host ? im.host + offset
                   : locate(c, Space::global, im.address + offset, size, size, lane, false);
}

template <class T> T component(const uint8_t* at, uint32_t channel) {
    T value;
    std::memcpy(&value, at + channel * sizeof value, sizeof value);
    return value;
}

template <class T> void take_integers(const Image& im, const uint8_t* at, Color& color) {
    constexpr auto largest = static_cast<float>(std::numeric_limits<T>::max());
    for (uint32_t k = 0; k < im.channels; ++k) {
        const T value = component<T>(at, k);
        color.bits[k] = static_cast<uint32_t>(value);
        color.part[k] = std::max(static_cast<float>(value) / largest, -1.0f);
    }
}

// Channels that there are not read as 0.
Color color_of(const Image& im, const uint8_t* at) {
    Color color{};
    switch (im.texel) {
    case Texel::u8:
        take_integers<uint8_t>(im, at, color);
        break;
    case Texel::u16:
        take_integers<uint16_t>(im, at, color);
        break;
    case Texel::u32:
        take_integers<uint32_t>(im, at, color);
        break;
    case Texel::s8:
        take_integers<int8_t>(im, at, color);
        break;
    case Texel::s16:
        take_integers<int16_t>(im, at, color);
        break;
    case Texel::s32:
        take_integers<int32_t>(im, at, color);
        break;
    case Texel::f16:
        for (uint32_t k = 0; k < im.channels; ++k) {
            color.part[k] = to_float(Half{component<uint16_t>(at, k)});
        }
        break;
    case Texel::f32:
        for (uint32_t k = 0; k < im.channels; ++k) {
            color.part[k] = component<float>(at, k);
        }
        break;
    }
    return color;
}

Color border_of(const Image& im) {
    Color color{};
    std::copy_n(im.border, im.channels, color.part);
    return color;
}

// The element that an index names; -1 for the border.
int64_t mapped(int64_t index, uint64_t extent, Edge edge) {
    const auto size = static_cast<int64_t>(extent);
    if (index >= 0 && index < size) {
        return index;
    }
    const auto modulo = [index](int64_t period) { return (index % period + period) % period; };
    switch (edge) {
    case Edge::wrap:
        return modulo(size);
    case Edge::mirror:
        return std::min(modulo(2 * size), 2 * size - 1 - modulo(2 * size));
    case Edge::border:
        return -1;
    case Edge::clamp:
        break;
    }
    return index < 0 ? 0 : size - 1;
}

// The elements of one dimension that a coordinate reads, and their weights.
struct Taps {
    int64_t at[2] = {};
    double weight[2] = {1, 0};
    uint32_t count = 1;
};

double clamped(double coordinate) {
    return std::isnan(coordinate) ? 0 : std::clamp(coordinate, -most_coordinate, most_coordinate);
}

Taps taps_of(const Image& im, double coordinate, uint64_t extent, Edge edge) {
    Taps taps;
    const double x = clamped(im.normalized ? coordinate * static_cast<double>(extent) : coordinate);
    if (!im.filtered) {
        taps.at[0] = mapped(static_cast<int64_t>(std::floor(x)), extent, edge);
        return taps;
    }
    // A weight has 8 bits of fraction.
    const auto fixed = static_cast<int64_t>(std::floor((x - 0.5) * 256 + 0.5));
    taps.count = 2;
    taps.at[0] = mapped(fixed >> 8, extent, edge);
    taps.at[1] = mapped((fixed >> 8) + 1, extent, edge);
    taps.weight[1] = static_cast<double>(fixed & 255) / 256;
    taps.weight[0] = 1 - taps.weight[1];
    return taps;
}

// Gives the weight of the element at a corner of a square or cube. In a square, an H100 rounds the
// last corner's weight to 8 bits of fraction, and derives the others from it (driver 580). In a
// cube, each weight is a product: nobody has measured that.
double weight_of(const Taps* taps, uint32_t corner) {
    const bool right = corner & 1, below = corner >> 1 & 1;
    if (taps[0].count != 2 || taps[1].count != 2 || taps[2].count != 1) {
        return taps[0].weight[right] * taps[1].weight[below] * taps[2].weight[corner >> 2];
    }
    const double last = std::floor(taps[0].weight[1] * taps[1].weight[1] * 256 + 0.5) / 256;
    if (right && below) {
        return last;
    }
    if (right || below) {
        return taps[right ? 0 : 1].weight[1] - last;
    }
    return 1 - taps[0].weight[1] - taps[1].weight[1] + last;
}

// False after a fault.
bool sampled(Cta& c, const Image& im, const double* x, uint32_t dimensions, uint64_t layer,
             uint32_t lane, Color* out) {
    const uint64_t extents[3] = {im.width, im.height, im.depth};
    Taps taps[3];
    for (uint32_t d = 0; d < dimensions; ++d) {
        taps[d] = taps_of(im, x[d], extents[d], im.edge[d]);
    }
    double sum[4] = {};
    for (uint32_t corner = 0; corner < 8; ++corner) {
        int64_t at[3] = {};
        const double weight = weight_of(taps, corner);
        bool outside = false, twice = false;
        for (uint32_t d = 0; d < 3; ++d) {
            const uint32_t side = corner >> d & 1;
            twice |= side >= taps[d].count;
            at[d] = taps[d].at[side];
            outside |= at[d] < 0;
        }
        if (twice || (weight == 0 && im.filtered)) {
            continue;
        }
        Color color = outside ? border_of(im) : Color{};
        if (!outside) {
            const uint64_t z = im.layers ? layer : static_cast<uint64_t>(at[2]);
            const uint8_t* host = element_at(c, im, static_cast<uint64_t>(at[0]),
                                             static_cast<uint64_t>(at[1]), z, lane);
            if (!host) {
                return false;
            }
            color = color_of(im, host);
        }
        if (!im.filtered) {
            *out = color;
            return true;
        }
        for (uint32_t k = 0; k < 4; ++k) {
            sum[k] += weight * static_cast<double>(color.part[k]);
        }
    }
    for (uint32_t k = 0; k < 4; ++k) {
        out->part[k] = static_cast<float>(sum[k]);
    }
    return true;
}

// Memory without rows: what lies outside of it reads as 0.
bool fetched(Cta& c, const Image& im, int64_t index, uint32_t lane, Color* out) {
    *out = {};
    if (index < 0 || static_cast<uint64_t>(index) >= im.width) {
        return true;
    }
    const uint8_t* host = element_at(c, im, static_cast<uint64_t>(index), 0, 0, lane);
    if (host) {
        *out = color_of(im, host);
    }
    return host != nullptr;
}

// The list of an instruction's slots: the number, the coordinates, then the data.
struct Slots {
    const std::vector<uint32_t>& list;
    Geometry geometry;
    uint32_t coordinates;

    Slots(const Cta& c, const Ins& i)
        : list(c.m.code.lists[i.aux]), geometry(static_cast<Geometry>(i.mode)),
          coordinates(spatial(geometry) + is_layered(geometry)) {}
    uint32_t coordinate(uint32_t k) const { return list[1 + k]; }
    uint32_t data(uint32_t k) const { return list[1 + coordinates + k]; }
};

template <bool floats> void texture(Cta& c, const Ins& i, const Mask& m) {
    const Slots slots(c, i);
    for_lanes(c, m, [&](uint32_t l) {
        if (c.m.fault.code != Result::Code::ok) {
            return;
        }
        const Image* im = image_for(c, c.reg<uint64_t>(slots.list[0])[l], false, slots.geometry, l);
        if (!im) {
            return;
        }
        const bool layered = is_layered(slots.geometry);
        const uint32_t dimensions = spatial(slots.geometry);
        uint64_t layer = 0;
        if (layered) {
            layer = std::min<uint64_t>(c.reg<uint32_t>(slots.coordinate(0))[l], im->layers - 1);
        }
        double x[3] = {};
        for (uint32_t d = 0; d < dimensions; ++d) {
            const uint32_t slot = slots.coordinate(d + layered);
            x[d] = floats ? static_cast<double>(c.reg<float>(slot)[l])
                          : static_cast<double>(c.reg<int32_t>(slot)[l]);
        }
        // Numbers of elements go with unnormalised coordinates alone, and nothing else with memory
        // without rows.
        if (im->linear_memory ? floats : !floats && (im->normalized || im->filtered)) {
            c.raise(Result::Code::illegal_instruction, 0, l);
            return;
        }
        // Measured: of an array of one dimension the number of an element gives nothing, whichever.
        const bool nothing = !floats && !im->linear_memory && slots.geometry == Geometry::d1;
        Color color{};
        const bool good =
            nothing || (im->linear_memory ? fetched(c, *im, static_cast<int64_t>(x[0]), l, &color)
                                          : sampled(c, *im, x, dimensions, layer, l, &color));
        for (uint32_t k = 0; good && k < 4; ++k) {
            const bool plain = im->integers && im->texel != Texel::f16 && im->texel != Texel::f32;
            c.reg<uint32_t>(slots.data(k))[l] =
                plain ? color.bits[k] : bit_cast<uint32_t>(color.part[k]);
        }
    });
}

enum class Outside : uint8_t { trap, clamp, zero };

template <class R, class M, bool store>
void move_parts(Cta& c, const Slots& slots, uint32_t count, uint8_t* host, uint32_t lane) {
    for (uint32_t k = 0; k < count; ++k) {
        R* data = c.reg<R>(slots.data(k)) + lane;
        M value = static_cast<M>(*data);
        if (store) {
            std::memcpy(host + k * sizeof(M), &value, sizeof value);
        } else {
            std::memcpy(&value, host + k * sizeof(M), sizeof value);
            *data = static_cast<R>(value);
        }
    }
}

// `M`: what is moved for each element of the vector; the first coordinate counts bytes.
template <class R, class M, bool store> void surface(Cta& c, const Ins& i, const Mask& m) {
    const Slots slots(c, i);
    const auto rule = static_cast<Outside>(i.imm);
    const uint32_t bytes = i.count * static_cast<uint32_t>(sizeof(M));
    for_lanes(c, m, [&](uint32_t l) {
        if (c.m.fault.code != Result::Code::ok) {
            return;
        }
        const Image* im = image_for(c, c.reg<uint64_t>(slots.list[0])[l], true, slots.geometry, l);
        if (!im) {
            return;
        }
        const bool layered = is_layered(slots.geometry);
        const uint32_t dimensions = spatial(slots.geometry);
        const auto row = static_cast<int64_t>(im->width * im->element());
        // The last place of each dimension; of the first, of an access.
        const int64_t last[3] = {(row - bytes) / bytes * bytes,
                                 static_cast<int64_t>(im->height) - 1,
                                 static_cast<int64_t>(im->depth) - 1};
        int64_t at[3] = {};
        bool outside = row < bytes;
        for (uint32_t d = 0; d < dimensions; ++d) {
            at[d] = c.reg<int32_t>(slots.coordinate(d + layered))[l];
            const bool beyond = at[d] < 0 || at[d] > (d == 0 ? row - bytes : last[d]);
            outside |= beyond && rule != Outside::clamp;
            at[d] = beyond ? std::clamp<int64_t>(at[d], 0, std::max<int64_t>(last[d], 0)) : at[d];
        }
        auto layer = layered ? static_cast<int64_t>(c.reg<uint32_t>(slots.coordinate(0))[l]) : 0;
        if (layered && layer >= static_cast<int64_t>(im->layers)) {
            outside |= rule != Outside::clamp;
            layer = static_cast<int64_t>(im->layers) - 1;
        }
        if (at[0] % bytes != 0) {
            c.raise(Result::Code::misaligned_address, static_cast<uint64_t>(at[0]), l);
        } else if (outside && (rule != Outside::zero || row < bytes)) {
            c.raise(Result::Code::illegal_address, static_cast<uint64_t>(at[0]), l);
        } else if (outside) {
            for (uint32_t k = 0; !store && k < i.count; ++k) {
                c.reg<R>(slots.data(k))[l] = 0;
            }
        } else {
            const auto z = static_cast<uint64_t>(layered ? layer : at[2]);
            move_parts<R, M, store>(
                c, slots, i.count,
                im->host + z * im->slice + static_cast<uint64_t>(at[1]) * im->pitch + at[0], l);
        }
    });
}

// What an object is asked for: an extent, in elements, or the number of layers.
template <bool surfaces> void query(Cta& c, const Ins& i, const Mask& m) {
    for_lanes(c, m, [&](uint32_t l) {
        const Image* im = c.m.image(c.reg<uint64_t>(i.op[1])[l]);
        if (!im || im->surface != surfaces) {
            c.raise(Result::Code::illegal_address, c.reg<uint64_t>(i.op[1])[l], l);
            return;
        }
        const uint64_t extents[] = {im->width, im->height, im->depth, im->layers};
        if (extents[i.mode] == 0) {
            c.raise(Result::Code::illegal_instruction, 0, l);
            return;
        }
        c.reg<uint32_t>(i.op[0])[l] = static_cast<uint32_t>(extents[i.mode]);
    });
}

} // namespace

const Image* Machine::image_miss(uint64_t number) {
    const Image* found = memory.image(number);
    if (found) {
        images[next_image] = {number, found};
        next_image = (next_image + 1) % cached;
    }
    return found;
}

Handler find_texture(bool floats) {
    return floats ? texture<true> : texture<false>;
}

Handler find_surface(uint32_t bytes, bool store) {
    switch (bytes) {
    case 1:
        return store ? surface<uint16_t, uint8_t, true> : surface<uint16_t, uint8_t, false>;
    case 2:
        return store ? surface<uint16_t, uint16_t, true> : surface<uint16_t, uint16_t, false>;
    case 4:
        return store ? surface<uint32_t, uint32_t, true> : surface<uint32_t, uint32_t, false>;
    case 8:
        return store ? surface<uint64_t, uint64_t, true> : surface<uint64_t, uint64_t, false>;
    default:
        return nullptr;
    }
}

Handler find_image_query(bool surfaces) {
    return surfaces ? query<true> : query<false>;
}

} // namespace flowgpu::emu::ptx
