"""Textures and surfaces: reads at and between elements, at the edges, of every kind and shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.array_lib import (
    FORMATS,
    SURFACE,
    as_bytes,
    content,
    filled,
    of_array,
    of_memory,
    of_pitch,
    sampling,
    surface,
    texture,
)
from tests.emu.driver_lib import ok
from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Bound,
    Out,
    add,
    f2,
    f4,
    f8,
    i1,
    i2,
    i4,
    kernel,
    u1,
    u2,
    u4,
)

Generator = np.random.Generator
INTEGERS, NORMALIZED = 1, 2
MODES = ("CLAMP", "WRAP", "MIRROR", "BORDER")
BORDER = 0.25
N = 256  # threads


def described(word: str, data: Array) -> str:
    return f"{word} {data.dtype.str[1:]}{list(data.shape)}"


def textured(data: Array, how: Any = None, *, flags: int = 0, layered: bool = False) -> Bound:
    """A texture of an array; the channels are the last dimension of `data`."""

    def make() -> tuple[int, Callable[[], None]]:
        array = filled(data, flags, layered)
        number = texture(of_array(array), how)

        def end() -> None:
            ok(cu.cuTexObjectDestroy(number))
            ok(cu.cuArrayDestroy(array))

        return number, end

    return Bound(described("texture", data), make)


def textured_memory(data: Array, how: Any = None, pitch: int = 0) -> Bound:
    """A texture of memory: of rows `pitch` bytes apart, or without rows."""

    def make() -> tuple[int, Callable[[], None]]:
        rows = as_bytes(data.reshape(1, -1, *data.shape[-2:]))[0]
        host = np.zeros((rows.shape[0], pitch or rows.shape[1]), u1)
        host[:, : rows.shape[1]] = rows
        address = int(ok(cu.cuMemAlloc(host.nbytes)))
        ok(cu.cuMemcpyHtoD(address, host.ctypes.data, host.nbytes))
        kind, channels = FORMATS[data.dtype.str[1:]], data.shape[-1]
        if pitch:
            resource = of_pitch(address, data.shape[-2], len(rows), pitch, kind, channels)
        else:
            resource = of_memory(address, host.nbytes, kind, channels)
        number = texture(resource, how)

        def end() -> None:
            ok(cu.cuTexObjectDestroy(number))
            ok(cu.cuMemFree(address))

        return number, end

    return Bound(described("memory", data), make)


def surfaced(before: Array, after: Array, layered: bool = False) -> Bound:
    """A surface, and what the kernel must leave in its array."""

    def make() -> tuple[int, Callable[[], None]]:
        array = filled(before, SURFACE, layered)
        number = surface(of_array(array))

        def end() -> None:
            assert content(array).tobytes() == np.ascontiguousarray(after).tobytes()
            ok(cu.cuSurfObjectDestroy(number))
            ok(cu.cuArrayDestroy(array))

        return number, end

    return Bound(described("surface", before), make)


def edges(index: Array, extent: int, mode: str) -> Array:
    """Element numbers, -1 for the border."""
    if mode == "CLAMP":
        return np.clip(index, 0, extent - 1)
    if mode == "WRAP":
        return index % extent
    if mode == "MIRROR":
        turned = index % (2 * extent)
        return np.minimum(turned, 2 * extent - 1 - turned)
    return np.where((index < 0) | (index >= extent), -1, index)


def sampled(data: Array, where: Sequence[Array], mode: str, *, linear: bool, normalized: bool
            ) -> Array:  # fmt: skip
    """Elements (..., y, x, channels) at coordinates (x, y, ...), f8.

    Weights are exact, but for that of the last corner of a square, which a GPU rounds to 8 bits.
    """
    places = []
    for axis, coordinate in enumerate(where):
        extent = data.shape[-2 - axis]
        x = coordinate.astype(f8) * (extent if normalized else 1)
        if linear:
            low = np.floor(x - 0.5)
            part = x - 0.5 - low
            both = ((low, 1 - part), (low + 1, part))
        else:
            both = ((np.floor(x), np.ones_like(x)),)
        places.append([(edges(i.astype(np.int64), extent, mode), weight) for i, weight in both])
    square = linear and len(where) == 2
    if square:
        x, y = (place[1][1] for place in places)
        last = np.floor(x * y * 256 + 0.5) / 256
        weights = {(0, 0): 1 - x - y + last, (1, 0): x - last, (0, 1): y - last, (1, 1): last}
    total = np.zeros((len(where[0]), data.shape[-1]))
    for corner in np.ndindex(*(len(one) for one in places)):
        chosen = [place[side] for place, side in zip(places, corner, strict=True)]
        weight = weights[corner] if square else np.prod([one for _, one in chosen], axis=0)
        index = tuple(i for i, _ in reversed(chosen))
        outside = np.any([i < 0 for i in index], axis=0)
        value = np.where(outside[:, None], BORDER, data[index].astype(f8))
        total += weight[:, None] * value
    return total


FETCH = """extern "C" __global__ void k(float* o, unsigned long long t, const int* x) {
    o[threadIdx.x] = tex1Dfetch<float>(t, x[threadIdx.x]);
}"""


@kernel(FETCH, 1, N)
def fetches_of_memory(rng: Generator) -> Arguments:
    data, x = rng.random((64, 1), f4), rng.integers(-8, 72, N).astype(i4)
    inside = (x >= 0) & (x < 64)
    want = np.where(inside, data[np.clip(x, 0, 63), 0], f4(0))
    return [Out(want), textured_memory(data), x]


@kernel(
    """extern "C" __global__ void k(int4* o, unsigned long long a, unsigned long long b,
                                    unsigned long long c, const int* x) {
        int i = x[threadIdx.x];
        short2 s = tex1Dfetch<short2>(b, i);
        uchar4 u = tex1Dfetch<uchar4>(c, i);
        o[threadIdx.x] = make_int4(tex1Dfetch<int>(a, i), s.x + 65536 * s.y, u.x + 256 * u.y,
                                   u.z - u.w);
    }""",
    1,
    N,
)
def fetches_of_integers(rng: Generator) -> Arguments:
    a = rng.integers(-(2**31), 2**31, (64, 1)).astype(i4)
    b, c = (
        rng.integers(-(2**15), 2**15, (64, 2)).astype(i2),
        rng.integers(0, 256, (64, 4)).astype(u1),
    )
    x, how = rng.integers(0, 64, N).astype(i4), sampling(flags=INTEGERS)
    s, u = b[x].astype(i4), c[x].astype(i4)
    want = np.stack(
        [a[x, 0], s[:, 0] + 65536 * s[:, 1], u[:, 0] + 256 * u[:, 1], u[:, 2] - u[:, 3]], 1
    )
    return [Out(want.astype(i4)), *(textured_memory(one, how) for one in (a, b, c)), x]


@kernel(
    """extern "C" __global__ void k(float4* o, unsigned long long a, unsigned long long b,
                                    unsigned long long c, const int* x) {
        int i = x[threadIdx.x];
        float2 s = tex1Dfetch<float2>(b, i);
        o[threadIdx.x] = make_float4(tex1Dfetch<float>(a, i), s.x, s.y, tex1Dfetch<float4>(c, i).z);
    }""",
    1,
    N,
)
def fetches_of_fractions(rng: Generator) -> Arguments:
    a = rng.integers(-128, 128, (64, 1)).astype(i1)
    a[:2, 0] = -128, 127
    b, c = (
        rng.integers(0, 2**16, (64, 2)).astype(u2),
        rng.standard_normal((64, 4)).astype(f2),
    )
    x = rng.integers(0, 64, N).astype(i4)
    x[:2] = 0, 1
    want = np.stack(
        [np.maximum(a[x, 0] / 127, -1), b[x, 0] / 65535, b[x, 1] / 65535, c[x, 2].astype(f8)], 1
    )
    how = sampling()
    return [Out(want, "f4", ulps=1), *(textured_memory(one, how) for one in (a, b, c)), x]


PLANE = """extern "C" __global__ void k(float* o, unsigned long long t, const float* x,
                                        const float* y) {
    int i = threadIdx.x;
    o[i] = tex2D<float>(t, x[i], y[i]);
}"""


def coordinates(
    rng: Generator, extents: Sequence[int], *, normalized: bool, linear: bool, beyond: int = 2
) -> list[Array]:
    """Inside of elements, or anywhere; also outside of the texture by some of its extents."""
    out = []
    for extent in extents:
        index = rng.integers(-beyond * extent, (beyond + 1) * extent, N)
        part = rng.random(N) if linear else rng.uniform(0.1, 0.9, N)
        x = (index + part) / (extent if normalized else 1)
        out.append(x.astype(f4))
    return out


def planes(mode: str, normalized: bool, linear: bool) -> Callable[[Generator], Arguments]:
    def arguments(rng: Generator) -> Arguments:
        data = rng.random((12, 20, 1), f4)
        where = coordinates(rng, (20, 12), normalized=normalized, linear=linear)
        want = sampled(data, where, mode, linear=linear, normalized=normalized)
        flags = NORMALIZED if normalized else 0
        how = sampling(mode, linear=linear, flags=flags, border=BORDER)
        # Half of the last bit of a weight, for each of two; a GPU may cut it off.
        out = Out(want[:, 0], "f4", absolute=2 * 2.0**-8 if linear else 0, ulps=1)
        return [out, textured(data, how), *where]

    return arguments


for one_mode in MODES:
    for is_linear in (False, True):
        word = "filtered" if is_linear else "points"
        add(f"texture_{word}_{one_mode.lower()}", PLANE, 1, N, planes(one_mode, True, is_linear))
        if one_mode in ("CLAMP", "BORDER"):
            name = f"texture_{word}_{one_mode.lower()}_by_element"
            add(name, PLANE, 1, N, planes(one_mode, False, is_linear))


@kernel(PLANE, 1, N)
def texture_weights_have_8_bits(rng: Generator) -> Arguments:
    data = rng.integers(0, 16, (12, 20, 1)).astype(f4)
    where = [rng.integers(0, extent * 256, N).astype(f4) / f4(256) for extent in (20, 12)]
    want = sampled(data, where, "CLAMP", linear=True, normalized=False)
    return [Out(want[:, 0], "f4", ulps=1), textured(data, sampling(linear=True)), *where]


@kernel(PLANE, 1, N)
def texture_of_rows_in_memory(rng: Generator) -> Arguments:
    data = rng.random((12, 20, 1), f4)
    where = coordinates(rng, (20, 12), normalized=False, linear=False)
    want = sampled(data, where, "CLAMP", linear=False, normalized=False)
    return [Out(want[:, 0].astype(f4)), textured_memory(data, sampling(), 96), *where]


@kernel(
    """extern "C" __global__ void k(float4* o, unsigned long long t, const float* x,
                                    const float* y) {
        int i = threadIdx.x;
        o[i] = tex2D<float4>(t, x[i], y[i]);
    }""",
    1,
    N,
)
def texture_of_filtered_bytes(rng: Generator) -> Arguments:
    data = rng.integers(0, 256, (12, 20, 4)).astype(u1)
    where = coordinates(rng, (20, 12), normalized=True, linear=True)
    want = sampled(data / 255, where, "WRAP", linear=True, normalized=True)
    how = sampling("WRAP", linear=True, flags=NORMALIZED)
    return [Out(want, "f4", absolute=2 * 2.0**-8), textured(data, how), *where]


@kernel(
    """extern "C" __global__ void k(unsigned* o, unsigned long long a, unsigned long long b,
                                    const float* x, const float* y) {
        int i = threadIdx.x;
        uchar4 u = tex2D<uchar4>(a, x[i], y[i]);
        o[2 * i] = u.x | u.y << 8 | u.z << 16 | u.w << 24;
        o[2 * i + 1] = tex2D<unsigned>(b, x[i], y[i]);
    }""",
    1,
    N,
)
def texture_of_integers(rng: Generator) -> Arguments:
    a = rng.integers(0, 256, (12, 20, 4)).astype(u1)
    b = rng.integers(0, 2**32, (12, 20, 1)).astype(u4)
    where = coordinates(rng, (20, 12), normalized=False, linear=False)
    x, y = (
        np.clip(np.floor(one).astype(int), 0, extent - 1)
        for one, extent in zip(where, (20, 12), strict=True)
    )
    want = np.stack([np.ascontiguousarray(a[y, x]).view(u4)[:, 0], b[y, x, 0]], 1)
    how = sampling(flags=INTEGERS)
    return [Out(want), textured(a, how), textured(b, how), *where]


SOLID = """extern "C" __global__ void k(float* o, unsigned long long t, const float* x,
                                        const float* y, const float* z) {
    int i = threadIdx.x;
    o[i] = tex3D<float>(t, x[i], y[i], z[i]);
}"""


def solids(linear: bool) -> Callable[[Generator], Arguments]:
    def arguments(rng: Generator) -> Arguments:
        data = rng.random((6, 5, 9, 1), f4)
        where = coordinates(rng, (9, 5, 6), normalized=False, linear=linear, beyond=1)
        want = sampled(data, where, "CLAMP", linear=linear, normalized=False)
        out = Out(want[:, 0], "f4", absolute=3 * 2.0**-8 if linear else 0, ulps=1)
        return [out, textured(data, sampling(linear=linear)), *where]

    return arguments


add("texture_solid_points", SOLID, 1, N, solids(False))
add("texture_solid_filtered", SOLID, 1, N, solids(True))


@kernel(
    """extern "C" __global__ void k(float2* o, unsigned long long a, unsigned long long b,
                                    const int* l, const float* x, const float* y) {
        int i = threadIdx.x;
        o[i] = make_float2(tex1DLayered<float>(a, x[i], l[i]),
                           tex2DLayered<float>(b, x[i], y[i], l[i]));
    }""",
    1,
    N,
)
def texture_layers(rng: Generator) -> Arguments:
    a, b = rng.random((4, 20, 1), f4), rng.random((4, 12, 20, 1), f4)
    layer = rng.integers(0, 4, N).astype(i4)
    where = coordinates(rng, (20, 12), normalized=False, linear=False)
    x, y = (
        np.clip(np.floor(one).astype(int), 0, extent - 1)
        for one, extent in zip(where, (20, 12), strict=True)
    )
    want = np.stack([a[layer, x, 0], b[layer, y, x, 0]], 1)
    return [Out(want), textured(a, layered=True), textured(b, layered=True), layer, *where]


@kernel(
    """extern "C" __global__ void k(int* o, unsigned long long t, unsigned long long s) {
        int a, b, c, d;
        asm("txq.width.b32 %0, [%1];" : "=r"(a) : "l"(t));
        asm("txq.height.b32 %0, [%1];" : "=r"(b) : "l"(t));
        asm("suq.width.b32 %0, [%1];" : "=r"(c) : "l"(s));
        asm("suq.depth.b32 %0, [%1];" : "=r"(d) : "l"(s));
        o[0] = a; o[1] = b; o[2] = c; o[3] = d;
    }""",
    1,
    1,
)
def texture_extents(rng: Generator) -> Arguments:
    plane, solid = rng.random((12, 20, 1), f4), rng.random((6, 5, 9, 2), f4)
    return [Out(np.array([20, 12, 9, 6], i4)), textured(plane), surfaced(solid, solid)]


@kernel(
    """extern "C" __global__ void k(float* o, unsigned long long s) {
        int x = threadIdx.x % 16, y = threadIdx.x / 16;
        float v;
        surf2Dread(&v, s, x * 4, y);
        o[threadIdx.x] = v;
        __syncthreads();
        surf2Dwrite(v + 1.0f, s, (15 - x) * 4, y);
    }""",
    1,
    N,
)
def surface_of_floats(rng: Generator) -> Arguments:
    data = rng.random((16, 16, 1), f4)
    return [Out(data.reshape(-1)), surfaced(data, data[:, ::-1] + f4(1))]


@kernel(
    """extern "C" __global__ void k(int* o, unsigned long long a, unsigned long long b,
                                    unsigned long long c) {
        int x = threadIdx.x % 16, y = threadIdx.x / 16;
        char one = surf2Dread<char>(a, x, y);
        short2 two = surf2Dread<short2>(b, x * 4, y);
        int4 four = surf2Dread<int4>(c, x * 16, y);
        o[threadIdx.x] = one + two.x + two.y + four.x + four.y + four.z + four.w;
        surf2Dwrite((char)(one + 1), a, x, y);
        surf2Dwrite(make_short2(two.y, two.x), b, x * 4, y);
        surf2Dwrite(make_int4(four.w, four.z, four.y, four.x), c, x * 16, y);
    }""",
    1,
    N,
)
def surface_of_integers(rng: Generator) -> Arguments:
    a = rng.integers(-128, 128, (16, 16, 1)).astype(i1)
    b = rng.integers(-(2**15), 2**15, (16, 16, 2)).astype(i2)
    c = rng.integers(-(2**20), 2**20, (16, 16, 4)).astype(i4)
    total = sum(one.astype(i4).sum(-1) for one in (a, b, c)).reshape(-1).astype(i4)
    made = surfaced(a, a + i1(1)), surfaced(b, b[..., ::-1]), surfaced(c, c[..., ::-1])
    return [Out(total), *made]


@kernel(
    """extern "C" __global__ void k(float* o, unsigned long long s) {
        int x = (int)(threadIdx.x % 16) - 4, y = (int)(threadIdx.x / 16) - 4;
        float a = surf2Dread<float>(s, x * 4, y, cudaBoundaryModeZero);
        float b = surf2Dread<float>(s, x * 4, y, cudaBoundaryModeClamp);
        o[2 * threadIdx.x] = a;
        o[2 * threadIdx.x + 1] = b;
        __syncthreads();
        surf2Dwrite(a + 1.0f, s, x * 4, y, cudaBoundaryModeZero);
    }""",
    1,
    N,
)
def surface_edges(rng: Generator) -> Arguments:
    data = rng.random((8, 8, 1), f4)
    x, y = np.meshgrid(np.arange(16) - 4, np.arange(16) - 4)
    inside = (x >= 0) & (x < 8) & (y >= 0) & (y < 8)
    clamped = data[np.clip(y, 0, 7), np.clip(x, 0, 7), 0]
    want = np.stack([np.where(inside, clamped, f4(0)), clamped], -1)
    return [Out(want.reshape(-1)), surfaced(data, data + f4(1))]


@kernel(
    """extern "C" __global__ void k(float* o, unsigned long long a, unsigned long long b,
                                    unsigned long long c, unsigned long long d) {
        int i = threadIdx.x, x = i % 8, y = i / 8 % 4, z = i / 32;
        float one = surf1Dread<float>(a, i * 4), three = surf3Dread<float>(b, x * 4, y, z);
        float lines = surf1DLayeredread<float>(c, x * 4, z);
        float planes = surf2DLayeredread<float>(d, x * 4, y, z);
        o[i] = one + three + lines + planes;
        __syncthreads();
        surf1Dwrite(2 * one, a, i * 4);
        surf3Dwrite(2 * three, b, x * 4, y, z);
        if (y == 0) surf1DLayeredwrite(2 * lines, c, x * 4, z);
        surf2DLayeredwrite(2 * planes, d, x * 4, y, z);
    }""",
    1,
    N,
)
def surface_shapes(rng: Generator) -> Arguments:
    line, solid = (
        rng.integers(0, 100, (N, 1)).astype(f4),
        rng.integers(0, 100, (8, 4, 8, 1)).astype(f4),
    )
    lines = rng.integers(0, 100, (8, 8, 1)).astype(f4)
    planes_ = rng.integers(0, 100, (8, 4, 8, 1)).astype(f4)
    want = line[:, 0] + (solid + lines[:, None] + planes_).reshape(-1)

    return [
        Out(want),
        surfaced(line, 2 * line),
        surfaced(solid, 2 * solid),
        surfaced(lines, 2 * lines, layered=True),
        surfaced(planes_, 2 * planes_, layered=True),
    ]
