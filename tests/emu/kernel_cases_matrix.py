"""Matrix products: tiles in shared memory, and every form of tensor core instruction.

Floating-point sums of the tensor cores have no defined order or width, so those results may be
some units of the last place of the sum of the magnitudes away; sums of small integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Out,
    add,
    f2,
    f4,
    f8,
    from_bf16,
    i4,
    kernel,
    to_bf16,
    u1,
)

Generator = np.random.Generator


@kernel(
    """extern "C" __global__ void k(float* c, const float* a, const float* b, int m, int n, int k) {
        __shared__ float s[16][16], t[16][17];
        int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, col = blockIdx.x * 16 + x;
        float sum = 0;
        for (int i = 0; i < k; i += 16) {
            s[y][x] = row < m && i + x < k ? a[row * k + i + x] : 0.f;
            t[y][x] = i + y < k && col < n ? b[(i + y) * n + col] : 0.f;
            __syncthreads();
            for (int j = 0; j < 16; ++j) sum += s[y][j] * t[j][x];
            __syncthreads();
        }
        if (row < m && col < n) c[row * n + col] = sum;
    }""",
    (3, 4),
    (16, 16),
)
def matrix_product_in_tiles(rng: Generator) -> Arguments:
    a, b = rng.standard_normal((50, 37)).astype(f4), rng.standard_normal((37, 41)).astype(f4)
    size = np.abs(a).astype(f8) @ np.abs(b)
    want = Out(a.astype(f8) @ b, "f4", ulps=19, scale=size)
    return [want, a, b, i4(50), i4(41), i4(37)]


@kernel(
    """extern "C" __global__ void k(float4* c, const float4* a, const float4* b, int n4,
                                 int depth) {
        __shared__ float s[8][64];
        __shared__ float4 t[8][16];
        int i = threadIdx.x, x = i % 16, y = i / 16;
        float sum[4][4] = {};
        for (int k = 0; k < depth; k += 8) {
            if (i < 128) {
                float4 v = a[(blockIdx.y * 64 + i / 2) * (depth / 4) + k / 4 + i % 2];
                int q = i % 2 * 4, r = i / 2;
                s[q][r] = v.x; s[q + 1][r] = v.y; s[q + 2][r] = v.z; s[q + 3][r] = v.w;
            } else {
                t[(i - 128) / 16][i % 16] = b[(k + (i - 128) / 16) * n4 + blockIdx.x * 16 + i % 16];
            }
            __syncthreads();
            for (int j = 0; j < 8; ++j) {
                float4 v = t[j][x];
                for (int r = 0; r < 4; ++r) {
                    float w = s[j][y * 4 + r];
                    sum[r][0] += w * v.x; sum[r][1] += w * v.y;
                    sum[r][2] += w * v.z; sum[r][3] += w * v.w;
                }
            }
            __syncthreads();
        }
        for (int r = 0; r < 4; ++r)
            c[(blockIdx.y * 64 + y * 4 + r) * n4 + blockIdx.x * 16 + x] =
                make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
    }""",
    (2, 1),
    256,
)
def matrix_product_in_registers(rng: Generator) -> Arguments:
    a = rng.integers(-50, 50, (64, 40)).astype(f4)
    b = rng.integers(-50, 50, (40, 128)).astype(f4)
    return [Out(a @ b), a, b, i4(32), i4(40)]


# A product as Triton compiles it for 16-bit types: two stages of cp.async into swizzled shared
# memory, ldmatrix, mma.sync, and predicated stores. 64 by 64 outputs a block, 32 deep a stage.
PIPELINED = """
__device__ void copy(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [ %0 + 0 ], [ %1 + 0 ], 0x10, %2;"
        :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
extern "C" __global__ void k(unsigned* c, const TYPE* a, const TYPE* b, int m, int n, int depth) {
    extern __shared__ __align__(128) char memory[];
    unsigned base = (unsigned)__cvta_generic_to_shared(memory);
    int t = threadIdx.x, lane = t & 31, warp = t / 32;
    int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
    // A: 64 rows of 64 bytes; B: 32 rows of 128 bytes; 16-byte pieces are permuted by the row.
    auto stage = [&](int k0, int slot) {
        unsigned sa = base + slot * 8192, sb = sa + 4096;
        for (int i = t; i < 256; i += 128) {
            int r = i / 4, q = i % 4;
            bool in = row0 + r < m && k0 + q * 8 < depth;
            copy(sa + r * 64 + (q ^ r / 2 % 4) * 16,
                 a + (in ? (row0 + r) * depth + k0 + q * 8 : 0), in ? 16 : 0);
        }
        for (int i = t; i < 256; i += 128) {
            int r = i / 8, q = i % 8;
            bool in = k0 + r < depth && col0 + q * 8 < n;
            copy(sb + r * 128 + (q ^ r % 8) * 16,
                 b + (in ? (k0 + r) * n + col0 + q * 8 : 0), in ? 16 : 0);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sum[2][4][4] = {};
    int steps = (depth + 31) / 32, wr = warp / 2 * 32, wc = warp % 2 * 32;
    stage(0, 0);
    for (int s = 0; s < steps; ++s) {
        if (s + 1 < steps) stage((s + 1) * 32, (s + 1) & 1);
        else asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 0x1;" ::: "memory");
        __syncthreads();
        unsigned sa = base + (s & 1) * 8192, sb = sa + 4096;
        for (int kk = 0; kk < 2; ++kk) {
            unsigned x[2][4], y[4][2];
            for (int i = 0; i < 2; ++i) {
                int r = wr + i * 16 + lane % 16, q = kk * 2 + lane / 16;
                asm volatile(
                    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [ %4 + 0 ];"
                    : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                    : "r"(sa + r * 64 + (q ^ r / 2 % 4) * 16));
            }
            for (int j = 0; j < 4; j += 2) {
                int r = kk * 16 + lane % 16, q = wc / 8 + j + lane / 16;
                asm volatile(
                    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [ %4 + 0 ];"
                    : "=r"(y[j][0]), "=r"(y[j][1]), "=r"(y[j + 1][0]), "=r"(y[j + 1][1])
                    : "r"(sb + r * 128 + (q ^ r % 8) * 16));
            }
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 4; ++j)
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.NAME.NAME.f32 "
                        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
                        : "+f"(sum[i][j][0]), "+f"(sum[i][j][1]), "+f"(sum[i][j][2]),
                          "+f"(sum[i][j][3])
                        : "r"(x[i][0]), "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3]),
                          "r"(y[j][0]), "r"(y[j][1]));
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
            for (int h = 0; h < 2; ++h) {
                int r = row0 + wr + i * 16 + lane / 4 + h * 8, q = col0 + wc + j * 8 + lane % 4 * 2;
                unsigned packed;
                asm("cvt.rn.NAMEx2.f32 %0, %1, %2;"
                    : "=r"(packed) : "f"(sum[i][j][2 * h + 1]), "f"(sum[i][j][2 * h]));
                asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0;"
                    "@p st.global.b32 [ %0 + 0 ], { %1 }; }"
                    :: "l"(c + (r * n + q) / 2), "r"(packed), "r"((int)(r < m && q < n))
                    : "memory");
            }
}"""


def add_pipelined(name: str, kind: str) -> None:
    def arguments(rng: Generator) -> Arguments:
        m, n, depth = 100, 72, 136
        a, b = (
            rng.standard_normal((m, depth)).astype(f4),
            rng.standard_normal((depth, n)).astype(f4),
        )
        if kind == "f16":
            stored = [a.astype(f2), b.astype(f2)]
            x, y = (v.astype(f8) for v in stored)
        else:
            stored = [to_bf16(a), to_bf16(b)]
            x, y = (from_bf16(v).astype(f8) for v in stored)
        size = np.abs(x) @ np.abs(y)
        want = Out(
            x @ y, "f2" if kind == "f16" else kind, ulps=0.51, absolute=float(size.max()) * 2**-19
        )
        return [want, *stored, i4(m), i4(n), i4(depth)]

    source = PIPELINED.replace("TYPE", "unsigned short").replace("NAME", kind)
    add(name, source, (2, 2), 128, arguments, shared=16384)


add_pipelined("pipelined_product_of_f16_as_triton_compiles_it", "f16")
add_pipelined("pipelined_product_of_bf16_as_triton_compiles_it", "bf16")


# Single instructions. The fragments are put together here, as the PTX ISA draws them.
@dataclass(frozen=True)
class Element:
    """How a type lies in registers of 32 bits (f64: 64), and random values of it."""

    bits: int
    encode: Callable[[Array], Array]  # to unsigned integers
    random: Callable[[Generator, tuple[int, int]], Array]


def whole(low: int, high: int) -> Callable[[Generator, tuple[int, int]], Array]:
    return lambda rng, shape: rng.integers(low, high, shape).astype(f8)


def normal(digits: int) -> Callable[[Generator, tuple[int, int]], Array]:
    """Numbers with so many bits in all, of several sizes."""

    def values(rng: Generator, shape: tuple[int, int]) -> Array:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 4, shape)
        step = 2.0 ** (np.frexp(x)[1] - digits)
        return np.rint(x / step) * step

    return values


def masked(bits: int) -> Callable[[Array], Array]:
    return lambda x: x.astype(np.int64).astype(np.uint64) & np.uint64((1 << bits) - 1)


ELEMENTS = {
    "f16": Element(16, lambda x: x.astype(f2).view("u2").astype("u8"), normal(11)),
    "bf16": Element(16, lambda x: to_bf16(x.astype(f4)).astype("u8"), normal(8)),
    "tf32": Element(32, lambda x: x.astype(f4).view("u4").astype("u8"), normal(11)),
    "f64": Element(64, lambda x: x.view("u8"), normal(53)),
    "s8": Element(8, masked(8), whole(-128, 128)),
    "u8": Element(8, masked(8), whole(0, 256)),
    "s4": Element(4, masked(4), whole(-8, 8)),
    "u4": Element(4, masked(4), whole(0, 16)),
    "b1": Element(1, masked(1), whole(0, 2)),
}  # fmt: skip


def fragment(element: Element, x: Array, rows: bool) -> Array:
    """Registers of A (`rows`) or B by lane: shape (32, registers a lane)."""
    kind = "u8" if element.bits == 64 else "u4"
    per = max(32 // element.bits, 1)
    bits = element.encode(x if rows else x.T)  # now groups of four lanes share a row
    height, depth = bits.shape
    halves, chunks = height // 8, depth // (4 * per)
    out = np.zeros((32, chunks * halves), kind)
    for lane in range(32):
        for chunk in range(chunks):
            for half in range(halves):
                at = (lane % 4 + 4 * chunk) * per
                parts = bits[lane // 4 + 8 * half, at : at + per]
                word = sum(int(v) << element.bits * h for h, v in enumerate(parts))
                out[lane, chunk * halves + half] = word
    return out


def sums_of_lanes(c: Array) -> Array:
    """The accumulators by lane: shape (32, 2 a group of eight rows)."""
    lane = np.arange(32)
    parts = [c[lane // 4 + 8 * half, lane % 4 * 2 + e]
             for half in range(c.shape[0] // 8) for e in range(2)]  # fmt: skip
    return np.ascontiguousarray(np.stack(parts, 1))


def mma_source(instruction: str, counts: tuple[int, int, int], wide: bool) -> str:
    """A warp that multiplies its registers: d, a, b, c are arrays of them by lane."""
    letter, kind = ("d", "double") if wide else ("r", "unsigned")
    d, a, b = counts
    names = ["x", "y", "z"]
    groups = [(d, "=", "s"), *((n, "", v) for n, v in zip((a, b, d), names, strict=True))]
    holes: list[str] = []
    outs: list[str] = []
    ins: list[str] = []
    at = 0
    for count, sign, variable in groups:
        holes.append("{" + ", ".join(f"%{at + e}" for e in range(count)) + "}")
        (outs if sign else ins).extend(f'"{sign}{letter}"({variable}[{e}])' for e in range(count))
        at += count
    loads = "".join(
        f"for (int e = 0; e < {n}; ++e) {v}[e] = p{v}[threadIdx.x * {n} + e];"
        for n, v in zip((a, b, d), names, strict=True)
    )
    return f"""extern "C" __global__ void k({kind}* o, const {kind}* px, const {kind}* py,
                                               const {kind}* pz) {{
        {kind} s[{d}], x[{a}], y[{b}], z[{d}];
        {loads}
        asm volatile("{instruction} {", ".join(holes)};" : {", ".join(outs)} : {", ".join(ins)});
        for (int e = 0; e < {d}; ++e) o[threadIdx.x * {d} + e] = s[e];
    }}"""


def add_mma(
    m: int, k: int, a: str, b: str, sums: str, suffix: str = "", limit: bool = False
) -> None:
    shape = f"m{m}n8k{k}"
    saturates = ".satfinite" if limit else ""
    instruction = f"mma.sync.aligned.{shape}.row.col{saturates}.{sums}.{a}.{b}.{sums}{suffix}"
    wide = a == "f64"
    words = [m * k * ELEMENTS[a].bits // 1024, 8 * k * ELEMENTS[b].bits // 1024]
    words = [count // 2 if wide else count for count in words]
    count = m * 8 // 32 // (2 if sums == "f16" else 1)

    def arguments(rng: Generator) -> Arguments:
        x, y = ELEMENTS[a].random(rng, (m, k)), ELEMENTS[b].random(rng, (k, 8))
        z = whole(-(2**20), 2**20)(rng, (m, 8)) if sums == "s32" else normal(11)(rng, (m, 8))
        if limit:
            z[0], z[1] = 2**31 - 1, -(2**31)
        if a == "f16" and sums == "f32":
            x[0], z[0] = 0, 0
            x[0, :2] = [2.0**-24, -(2.0**-20)]  # subnormal numbers, which f32 holds as normal ones
            x[1, 2], y[2] = np.inf, [1, 0, -1, 1, 2, -2, 3, -3]  # inf times 0 is not a number
        if sums == "s32":
            if suffix:
                pairs = x[:, :, None].astype(bool), y[None].astype(bool)
                terms = pairs[0] & pairs[1] if "and" in suffix else pairs[0] ^ pairs[1]
                exact = terms.sum(1) + z
            else:
                exact = x @ y + z
            exact = np.clip(exact, -(2**31), 2**31 - 1) if limit else exact
            out = Out(sums_of_lanes(exact.astype(np.int64).astype(i4)))
            start = sums_of_lanes(z.astype(np.int64).astype(i4))
        else:
            with np.errstate(invalid="ignore"):
                exact, size = x @ y + z, np.abs(x) @ np.abs(y) + np.abs(z)
            kind = {"f32": "f4", "f16": "f2", "f64": "f8"}[sums]
            units = {"f32": 16.0, "f16": 2.0, "f64": 4.0}[sums]
            size = np.where(np.isfinite(size), size, 0)
            out = Out(sums_of_lanes(exact), kind, ulps=units, scale=sums_of_lanes(size))
            start = sums_of_lanes(z).astype(kind)
        return [out, fragment(ELEMENTS[a], x, True), fragment(ELEMENTS[b], y, False), start]

    name = f"mma_{shape}_{a}_{b}_{sums}{suffix.replace('.', '_')}{'_saturated' if limit else ''}"
    add(name, mma_source(instruction, (count, words[0], words[1]), wide), 1, 32, arguments)


for _k in (8, 16):
    add_mma(16, _k, "f16", "f16", "f32")
    add_mma(16, _k, "f16", "f16", "f16")
    add_mma(16, _k, "bf16", "bf16", "f32")
for _k in (4, 8):
    add_mma(16, _k, "tf32", "tf32", "f32")
add_mma(8, 4, "f64", "f64", "f64")
add_mma(8, 16, "s8", "s8", "s32")
add_mma(16, 16, "u8", "s8", "s32")
add_mma(16, 32, "s8", "s8", "s32")
add_mma(16, 32, "u8", "u8", "s32")
add_mma(16, 32, "s8", "u8", "s32", limit=True)
add_mma(8, 32, "s4", "s4", "s32")
add_mma(16, 32, "u4", "u4", "s32")
add_mma(16, 64, "s4", "u4", "s32")
add_mma(8, 128, "b1", "b1", "s32", ".xor.popc")
add_mma(16, 256, "b1", "b1", "s32", ".and.popc")


# wmma: whole matrices from memory and back.
@dataclass(frozen=True)
class Wmma:
    a: int  # registers a lane of A, of B and of the sums
    b: int
    c: int
    element: str
    sums: str


def registers(letter: str, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{e}" for e in range(count)) + "}"


def wmma_source(shape: str, form: Wmma, row: bool) -> str:
    """One product; A lies row by row and B column by column, or the other way round."""
    la, lb = ("row", "col") if row else ("col", "row")
    reg = {"f64": "f64", "f32": "f32"}
    kinds = (reg.get(form.element, "b32"), reg.get(form.sums, "b32"))
    types = f"{form.sums}.{form.sums}"
    if form.element != "f16":
        types = f"{form.sums}.{form.element}.{form.element}.{form.sums}"
    rounding = ".rn" if form.element == "f64" else ""
    a, b, c, d = (registers(n, k) for n, k in zip("abcd", (form.a, form.b, form.c, form.c),
                                                   strict=True))  # fmt: skip

    def load(role: str, layout: str, kind: str, names: str, pointer: int, stride: int) -> str:
        head = f"wmma.load.{role}.sync.aligned.{layout}.{shape}{kind}"
        return f"{head} {names}, [%{pointer}], %{stride};"

    body = [
        f"{{ .reg .{kinds[0]} %a<{form.a}>, %b<{form.b}>;",
        f".reg .{kinds[1]} %c<{form.c}>, %d<{form.c}>;",
        load("a", la, f".shared.{form.element}", a, 1, 4),
        load("b", lb, f".global.{form.element}", b, 2, 5),
        load("c", "row", f".{form.sums}", c, 3, 6),
        f"wmma.mma.sync.aligned.{la}.{lb}.{shape}{rounding}.{types} {d}, {a}, {b}, {c};",
        f"wmma.store.d.sync.aligned.col.{shape}.global.{form.sums} [%0], {d}, %7; }}",
    ]
    # Registers of asm blocks have two per cent signs.
    text = " ".join(body)
    for letter in "abcd":
        text = text.replace(f"%{letter}", f"%%{letter}")
    return f"""extern "C" __global__ void k(char* d, const uint4* a, const char* b, const char* c,
        int bytes, int la, int lb, int lc, int ld) {{
        __shared__ __align__(32) uint4 s[128];
        for (int i = threadIdx.x; i < bytes / 16; i += 32) s[i] = a[i];
        __syncwarp();
        unsigned at = (unsigned)__cvta_generic_to_shared(s);
        asm volatile("{text}" :: "l"(d), "r"(at), "l"(b), "l"(c), "r"(la), "r"(lb), "r"(lc), "r"(ld)
            : "memory");
    }}"""


STORED: dict[str, Callable[[Array], Array]] = {
    "f16": lambda x: x.astype(f2),
    "bf16": lambda x: to_bf16(x.astype(f4)),
    "tf32": lambda x: x.astype(f4),
    "f64": lambda x: x,
    "s8": lambda x: x.astype(np.int8),
    "u8": lambda x: x.astype(u1),
}


def add_wmma(shape: tuple[int, int, int], form: Wmma, row: bool = True) -> None:
    m, n, k = shape
    name = f"m{m}n{n}k{k}"

    def arguments(rng: Generator) -> Arguments:
        x, y = (
            ELEMENTS[form.element].random(rng, (m, k)),
            ELEMENTS[form.element].random(rng, (k, n)),
        )
        kind = {"f32": "f4", "f16": "f2", "f64": "f8", "s32": "i4"}[form.sums]
        z = whole(-500, 500)(rng, (m, n)).astype(kind)
        exact = x @ y + z
        if kind == "i4":
            out = Out(exact.T.astype(i4).copy())
        else:
            size = np.abs(x) @ np.abs(y) + np.abs(z)
            out = Out(exact.T.copy(), kind, ulps=16 if kind == "f4" else 4, scale=size.T.copy())
        store = STORED[form.element]
        a, b = (store(x), store(y.T)) if row else (store(x.T), store(y))
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        strides = (k, k) if row else (m, n)
        return [out, a, b, z, i4(a.nbytes), i4(strides[0]), i4(strides[1]), i4(n), i4(m)]

    case = f"wmma_{name}_{form.element}_{form.sums}{'' if row else '_transposed'}"
    add(case, wmma_source(name, form, row), 1, 32, arguments)


add_wmma((16, 16, 16), Wmma(8, 8, 8, "f16", "f32"))
add_wmma((16, 16, 16), Wmma(8, 8, 8, "f16", "f32"), row=False)
add_wmma((16, 16, 16), Wmma(8, 8, 4, "f16", "f16"))
add_wmma((32, 8, 16), Wmma(8, 8, 8, "f16", "f32"))
add_wmma((8, 32, 16), Wmma(8, 8, 8, "f16", "f32"))
add_wmma((16, 16, 16), Wmma(4, 4, 8, "bf16", "f32"))
add_wmma((8, 32, 16), Wmma(2, 8, 8, "bf16", "f32"))
add_wmma((16, 16, 8), Wmma(4, 4, 8, "tf32", "f32"))
add_wmma((16, 16, 16), Wmma(2, 2, 8, "s8", "s32"))
add_wmma((32, 8, 16), Wmma(4, 1, 8, "u8", "s32"))
add_wmma((8, 8, 4), Wmma(1, 1, 2, "f64", "f64"))


# Others.
@kernel(
    """extern "C" __global__ void k(float* o, const float* x, const float* w, int h, int width) {
        __shared__ float s[4][3][3];
        int t = threadIdx.y * 16 + threadIdx.x;
        if (t < 36) ((float*)s)[t] = w[blockIdx.z * 36 + t];
        __syncthreads();
        int q = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 16 + threadIdx.y;
        if (q >= width || r >= h) return;
        float sum = 0;
        for (int c = 0; c < 4; ++c)
            for (int i = -1; i < 2; ++i)
                for (int j = -1; j < 2; ++j) {
                    bool in = r + i >= 0 && r + i < h && q + j >= 0 && q + j < width;
                    sum += in ? x[(c * h + r + i) * width + q + j] * s[c][i + 1][j + 1] : 0.f;
                }
        o[(blockIdx.z * h + r) * width + q] = sum;
    }""",
    (2, 1, 3),
    (16, 16),
)
def convolution_of_images(rng: Generator) -> Arguments:
    x = rng.integers(-20, 20, (4, 13, 21)).astype(f4)
    w = rng.integers(-20, 20, (3, 4, 3, 3)).astype(f4)
    p = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    want = sum(
        np.einsum("oc,chw->ohw", w[:, :, i, j], p[:, i : i + 13, j : j + 21])
        for i in range(3)
        for j in range(3)
    )
    return [Out(np.asarray(want, f4)), x, w, i4(13), i4(21)]


@kernel(
    """extern "C" __global__ void k(float* o, const float* q, const float* key, const float* value,
                                    int n) {
        // One query a warp, 32 numbers each; the maximum and the sum move along with the keys.
        int t = threadIdx.x, row = blockIdx.x * 4 + threadIdx.y;
        float mine = q[row * 32 + t] * 0.17677669f, top = -3e38f, sum = 0, out = 0;
        for (int i = 0; i <= row && i < n; ++i) {
            float s = mine * key[i * 32 + t];
            for (int d = 16; d > 0; d >>= 1) s += __shfl_xor_sync(~0u, s, d);
            float m = fmaxf(top, s), old = __expf(top - m), p = __expf(s - m);
            out = out * old + p * value[i * 32 + t];
            sum = sum * old + p;
            top = m;
        }
        o[row * 32 + t] = out / sum;
    }""",
    5,
    (32, 4),
)
def causal_attention(rng: Generator) -> Arguments:
    q, key, value = (rng.standard_normal((20, 32)).astype(f4) for _ in range(3))
    scores = q.astype(f8) @ key.T * f8(f4(0.17677669))
    scores[np.triu_indices(20, 1)] = -np.inf
    e = np.exp(scores - scores.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return [Out(p @ value, "f4", absolute=2**-18), q, key, value, i4(20)]


@kernel(
    """extern "C" __global__ void k(int* c, const int* a, const int* b, int n, int depth) {
        // The depth is split over blockIdx.z, the parts are added in memory.
        int row = blockIdx.y * 8 + threadIdx.y, col = blockIdx.x * 32 + threadIdx.x, sum = 0;
        int part = depth / gridDim.z, from = blockIdx.z * part;
        for (int k = from; k < from + part; ++k)
            sum = __dp4a(a[row * depth + k], b[col * depth + k], sum);
        if (col < n) atomicAdd(c + row * n + col, sum);
    }""",
    (2, 2, 3),
    (32, 8),
)
def byte_product_with_split_depth(rng: Generator) -> Arguments:
    a, b = rng.integers(-128, 128, (16, 48)), rng.integers(-128, 128, (64, 48))
    want = a @ b[:60].T
    return [Out(want.astype(i4)), a.astype(np.int8), b.astype(np.int8), i4(60), i4(12)]
