"""Round trips of arrays, mipmapped arrays, texture and surface objects."""

from __future__ import annotations

from tests.emu.replay_cases import Case

# In front of a setup: what fills, reads and samples them.
HELPERS = '''
from tests.emu.array_lib import (
    ARRAY, DEVICE, F32, as_bytes, content, of_array, of_host, of_memory, told, texture,
)
from tests.emu.array_lib import shape as shape_of, surface as surface_of
def described(width, height=0, depth=0, flags=0, channels=1):
    return shape_of(width, height, depth, F32, channels, flags)
def shape(array):
    width, height, depth, _, channels, flags = told(array)
    return [width, height, depth, channels, flags]
def counted(array, first):
    width, height, depth, channels, _ = shape(array)
    extents = max(depth, 1), max(height, 1), width * channels
    count = extents[0] * extents[1] * extents[2]
    return np.arange(first, first + count, dtype=np.float32).reshape(extents)
def fill(array, first):
    data = as_bytes(counted(array, first))
    ok(cu.cuMemcpy3D(of_host(array, data)))
    return array
def holds(array, first):
    return bool((content(array).view(np.float32) == counted(array, first)).all())
KERNELS = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry sample(.param .u64 p, .param .u64 t) {
    .reg .b64 %rd<3>; .reg .f32 %f<7>;
    ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [t];
    mov.f32 %f1, 0f40200000; mov.f32 %f2, 0f3FC00000;
    tex.2d.v4.f32.f32 {%f3, %f4, %f5, %f6}, [%rd2, {%f1, %f2}];
    st.global.f32 [%rd1], %f3; ret;
}
.visible .entry fetch(.param .u64 p, .param .u64 t) {
    .reg .b64 %rd<3>; .reg .f32 %f<5>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [t];
    mov.u32 %r1, 3;
    tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd2, {%r1}];
    st.global.f32 [%rd1], %f1; ret;
}
.visible .entry touch(.param .u64 p, .param .u64 s) {
    .reg .b64 %rd<3>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [s];
    mov.u32 %r1, 8; mov.u32 %r2, 1;
    suld.b.2d.b32.trap {%r3}, [%rd2, {%r1, %r2}];
    st.global.u32 [%rd1], %r3; ret;
}
""" + bytes(1)
def reader(kernel):
    """Reads by a texture or surface: (2, 1) of two dimensions, 3 of one."""
    code = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(KERNELS)), kernel))
    out = int(ok(cu.cuMemAlloc(4)))
    def read(number):
        run(code, 1, out, int(number))
        return float(download(out, 1, np.float32)[0])
    return read
def surface(array):
    return surface_of(of_array(array))
'''

_SHAPES = """
shapes = {"1d": (33,), "2d": (33, 7), "3d": (33, 7, 5), "1d layers": (33, 0, 5, 1),
          "2d layers": (33, 7, 5, 1), "cube": (32, 32, 6, 4), "cubes": (32, 32, 12, 5),
          "surface": (33, 7, 0, 2), "four": (33, 7, 0, 0, 4), "large": (1024, 1024)}
"""

ARRAY_CASES = (
    Case(
        "arrays",
        ("cuArrayCreate", "cuArray3DCreate", "cuArrayDestroy"),
        HELPERS
        + _SHAPES
        + """
ended = ok(cu.cuArray3DCreate(described(64, 64)))
made = {name: ok(cu.cuArray3DCreate(described(*shape))) for name, shape in shapes.items()}
plain = cu.CUDA_ARRAY_DESCRIPTOR()
plain.Width, plain.Height, plain.Format, plain.NumChannels = 16, 4, F32, 2
made["by the older call"] = ok(cu.cuArrayCreate(plain))
ok(cu.cuArrayDestroy(ended))
for number, array in enumerate(made.values()):
    fill(array, 1000 * number)
apart = ok(cu.cuCtxCreate(None, 0, device))
other = fill(ok(cu.cuArray3DCreate(described(9, 9))), 5)
ok(cu.cuCtxPopCurrent())
def of_the_other():
    ok(cu.cuCtxPushCurrent(apart))
    found = holds(other, 5)
    ok(cu.cuCtxPopCurrent())
    return found
""",
        {
            "[n for i, (n, a) in enumerate(made.items()) if not holds(a, 1000 * i)]": [],
            "[shape(array) for array in made.values()]": [
                *([33, 0, 0, 1, 0], [33, 7, 0, 1, 0], [33, 7, 5, 1, 0]),
                *([33, 0, 5, 1, 1], [33, 7, 5, 1, 1], [32, 32, 6, 1, 4], [32, 32, 12, 1, 5]),
                *([33, 7, 0, 1, 2], [33, 7, 0, 4, 0], [1024, 1024, 0, 1, 0], [16, 4, 0, 2, 0]),
            ],
            "of_the_other()": True,
        },
        {
            "holds(fill(made['3d'], 7), 7)": True,
            "[name(cu.cuArrayDestroy(array)) for array in made.values()]": ["CUDA_SUCCESS"] * 11,
        },
        {"name(cu.cuArrayDestroy(made['2d']))": "INVALID_HANDLE"},
    ),
    Case(
        "mipmapped_arrays",
        ("cuMipmappedArrayCreate", "cuMipmappedArrayGetLevel", "cuMipmappedArrayDestroy"),
        HELPERS
        + """
ended = ok(cu.cuMipmappedArrayCreate(described(64, 64), 2))
made = ok(cu.cuMipmappedArrayCreate(described(64, 32, 3, 1), 4))
ok(cu.cuMipmappedArrayDestroy(ended))
levels = [fill(ok(cu.cuMipmappedArrayGetLevel(made, level)), 100 * level) for level in range(3)]
fill(ok(cu.cuMipmappedArrayGetLevel(made, 3)), 300)
""",
        {
            "[holds(level, 100 * number) for number, level in enumerate(levels)]": [True] * 3,
            "holds(ok(cu.cuMipmappedArrayGetLevel(made, 3)), 300)": True,
            "[same(ok(cu.cuMipmappedArrayGetLevel(made, n)), levels[n]) for n in range(3)]": [True]
            * 3,
            "shape(levels[2])": [16, 8, 3, 1, 1],
            "name(cu.cuMipmappedArrayGetLevel(made, 4))": "INVALID_VALUE",
        },
        {"name(cu.cuMipmappedArrayDestroy(made))": "CUDA_SUCCESS"},
    ),
    Case(
        "texture_and_surface_objects",
        ("cuTexObjectCreate", "cuTexObjectDestroy", "cuSurfObjectCreate", "cuSurfObjectDestroy"),
        HELPERS
        + """
array = fill(ok(cu.cuArray3DCreate(described(16, 4, 0, 2))), 0)
first = texture(of_array(array))
gap, second_gap = texture(of_array(array)), surface(array)
levels = ok(cu.cuMipmappedArrayCreate(described(16, 4), 2))
later = fill(ok(cu.cuArray3DCreate(described(16, 4, 0, 2))), 500)
words = int(ok(cu.cuMemAlloc(4096)))
ok(cu.cuMemcpyHtoD(words, np.arange(1024, dtype=np.float32), 4096))
line = texture(of_memory(words, 4096))
written = surface(later)
seen = texture(of_array(later))
ok(cu.cuTexObjectDestroy(gap))
ok(cu.cuSurfObjectDestroy(second_gap))
middle = texture(of_array(later))
sample, fetch, touch = (reader(name) for name in (b"sample", b"fetch", b"touch"))
apart = ok(cu.cuCtxCreate(None, 0, device))
its_array = fill(ok(cu.cuArray3DCreate(described(16, 4))), 900)
its_texture, its_sample = texture(of_array(its_array)), reader(b"sample")
ok(cu.cuCtxPopCurrent())
def in_the_other():
    ok(cu.cuCtxPushCurrent(apart))
    found = its_sample(its_texture)
    ok(cu.cuCtxPopCurrent())
    return found
def array_of(number):
    found = (ctypes.c_uint64 * 32)()
    assert lib.cuTexObjectGetResourceDesc(found, ctypes.c_uint64(number)) == 0
    return found[1]
""",
        {
            "[sample(number) for number in (first, seen, middle)]": [18.0, 518.0, 518.0],
            "fetch(line)": 3.0,
            "touch(written)": 518.0,
            "in_the_other()": 918.0,
            "[array_of(n) == int(a) for n, a in ((first, array), (seen, later))]": [True] * 2,
            "len({first, line, written, seen, middle})": 5,
        },
        {
            "sample(first) if holds(fill(array, 40), 40) else None": 58.0,
            "[sample(texture(of_array(array))) for _ in range(3)]": [58.0] * 3,
            "[name(cu.cuTexObjectDestroy(number)) for number in (first, line)]": ["CUDA_SUCCESS"]
            * 2,
            "sample(texture(of_array(later)))": 518.0,
        },
    ),
    Case(
        "copies_of_arrays_in_graphs",
        (),
        HELPERS
        + """
from tests.emu.driver_cases_graphs import add_copy, run as run_graph
where, graph = ok(cu.cuStreamCreate(1)), ok(cu.cuGraphCreate(0))
deep, flat = (ok(cu.cuArray3DCreate(described(*size))) for size in ((8, 4, 2), (8, 4)))
fill(deep, 0), fill(flat, 1000)
memory = [int(ok(cu.cuMemAlloc(256))) for _ in range(3)]
def end(copy, side, place, is_array):
    setattr(copy, side + "MemoryType", ARRAY if is_array else DEVICE)
    setattr(copy, side + ("Array" if is_array else "Device"), place)
    if not is_array:
        setattr(copy, side + "Pitch", 32), setattr(copy, side + "Height", 4)
def copied(source, target, is_array, depth):
    copy = cu.CUDA_MEMCPY3D()
    end(copy, "src", source, is_array[0]), end(copy, "dst", target, is_array[1])
    copy.WidthInBytes, copy.Height, copy.Depth = 32, 4, depth
    return copy
out = add_copy(graph, [], copied(deep, memory[0], (True, False), 2))
on = add_copy(graph, [out], copied(memory[0], memory[1], (False, False), 2))
back = add_copy(graph, [on], copied(memory[1], flat, (False, True), 1))
last = add_copy(graph, [back], copied(flat, memory[2], (True, False), 1))
made = ok(cu.cuGraphInstantiate(graph, 0))
def launched():
    fill(flat, 1000)
    for address in memory:
        ok(cu.cuMemsetD8(address, 0, 256))
    ok(cu.cuCtxSynchronize())
    run_graph(made, where)
    return [float(download(address, 64, np.float32)[n]) for address in memory for n in (31, 63)]
""",
        {
            "launched()": [31.0, 63.0, 31.0, 63.0, 31.0, 0.0],
            "same(ok(cu.cuGraphMemcpyNodeGetParams(out)).srcArray, deep)": True,
        },
        {"launched() if holds(fill(deep, 5), 5) else None": [36.0, 68.0, 36.0, 68.0, 36.0, 0.0]},
    ),
)
