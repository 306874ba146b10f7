"""Texture and surface objects: their numbers, what they are made of, what kernels see by them."""

from __future__ import annotations

import ctypes

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.array_lib import (
    SURFACE,
    U8,
    filled,
    of_array,
    of_memory,
    of_mipmap,
    of_pitch,
    plane,
    sampling,
    shape,
    surface,
    texture,
)
from tests.emu.cuda_source import compile_cuda
from tests.emu.driver_cases_arrays import ROWS
from tests.emu.driver_lib import GRANULE, MIB, R, case, download, function, ok, refuses, start

READS = """
typedef unsigned long long Number;
#define KERNEL(name) extern "C" __global__ void name(Number t, float* out, int x)
KERNEL(fetch) { *out = tex1Dfetch<float>(t, x); }
KERNEL(point) { *out = tex2D<float>(t, x + 0.5f, 0.5f); }
KERNEL(load) { *out = surf2Dread<float>(t, x, 0); }
KERNEL(store) { surf2Dwrite(1.0f, t, x, 0); }
"""


def read(kernel: str, number: int, x: int = 0) -> float | str:
    """What a kernel reads by a number at a place, or the name of its fault."""
    found = function(kernel.encode(), compile_cuda(READS).encode() + b"\0")
    out = int(ok(cu.cuMemAlloc(4)))
    values, types = (number, out, x), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    ok(cu.cuLaunchKernel(found, 1, 1, 1, 1, 1, 1, 0, 0, (values, types), 0))
    result = cu.cuCtxSynchronize()
    if result[0] == R.CUDA_SUCCESS:
        return float(download(out, 1, np.float32)[0])
    return result[0].name.removeprefix("CUDA_ERROR_")


@case()
def texture_and_surface_objects_are_numbers() -> None:
    start()
    array = filled(ROWS, SURFACE)
    made = [texture(of_array(array)), surface(of_array(array)), texture(of_array(array))]
    assert made == list(range(made[0], made[0] + 3)) and 1 <= made[0] < 64
    ok(cu.cuTexObjectDestroy(made[0]))
    ok(cu.cuSurfObjectDestroy(made[1]))
    again = {surface(of_array(array)), texture(of_array(array))}
    for _ in range(1000):  # a driver that is at work frees them later
        if set(made[:2]) <= again:
            break
        ok(cu.cuCtxSynchronize())
        again.add(texture(of_array(array)))
    assert set(made[:2]) <= again
    for number in (0, 777):
        ok(cu.cuTexObjectDestroy(number))
        ok(cu.cuSurfObjectDestroy(number))
        refuses(cu.cuTexObjectGetResourceDesc(number), "INVALID_VALUE")
    refuses(cu.cuSurfObjectGetResourceDesc(made[2]), "INVALID_VALUE")
    first = ok(cu.cuCtxGetCurrent())
    ok(cu.cuCtxCreate(None, 0, 0))
    assert texture(of_array(filled(ROWS))) <= made[0]
    ok(cu.cuCtxSetCurrent(first))


@case(emulated=True)
def numbers_that_the_driver_takes_for_itself() -> None:
    start()
    array = ok(cu.cuArrayCreate(plane(16, 4)))
    assert [texture(of_array(array)), texture(of_array(array))] == [1, 2]
    ok(cu.cuMemcpyHtoA(array, 0, ROWS.ctypes.data, 64))
    assert texture(of_array(array)) == 4
    ok(cu.cuMemcpyHtoA(array, 0, ROWS.ctypes.data, 64))
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    assert texture(of_array(array)) == 6
    for number in (3, 5):
        refuses(cu.cuTexObjectGetResourceDesc(number), "INVALID_VALUE")
        ok(cu.cuTexObjectDestroy(number))
    assert texture(of_array(array)) == 7
    ok(cu.cuMipmappedArrayDestroy(mipmap))
    assert texture(of_array(array)) == 5
    refuses(cu.cuSurfObjectDestroy(1), "INVALID_VALUE")
    refuses(cu.cuTexObjectDestroy(surface(of_array(array))), "INVALID_VALUE")
    ok(cu.cuCtxCreate(None, 0, 0))
    other = ok(cu.cuArrayCreate(plane(16, 4)))
    assert texture(of_array(other)) == 1


@case()
def what_objects_are_made_of() -> None:
    start()
    memory, array = int(ok(cu.cuMemAlloc(MIB))), filled(ROWS)
    unmapped = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    for resource, answer in (
        (of_array(array), "ok"),
        (of_mipmap(mipmap), "ok"),
        (of_memory(memory, 4096), "ok"),
        (of_memory(memory + 4, 4096), "INVALID_VALUE"),
        (of_memory(memory, 2 * MIB), "ok"),
        (of_memory(memory, 0), "ok"),
        (of_memory(0, 4096), "INVALID_VALUE"),
        (of_memory(unmapped, 4096), "ok"),
        (of_memory(memory, 4096, U8), "ok"),
        (of_pitch(memory, 16, 4, 64), "ok"),
        (of_pitch(memory, 16, 4, 32), "ok"),
        (of_pitch(memory, 16, 4, 80), "INVALID_VALUE"),
        (of_pitch(memory + 32, 16, 4, 64), "INVALID_VALUE"),
        (of_pitch(unmapped, 16, 4, 64), "ok"),
    ):
        result = cu.cuTexObjectCreate(resource, cu.CUDA_TEXTURE_DESC(), None)
        if answer == "ok":
            ok(result)
        else:
            refuses(result, answer)
    ok(cu.cuSurfObjectCreate(of_array(array)))  # without CUDA_ARRAY3D_SURFACE_LDST
    refuses(cu.cuSurfObjectCreate(of_mipmap(mipmap)), "INVALID_VALUE")
    refuses(cu.cuSurfObjectCreate(of_memory(memory, 4096)), "INVALID_VALUE")
    ok(cu.cuArrayDestroy(array))


@case(emulated=True)
def objects_that_the_emulated_driver_does_not_have() -> None:
    start()
    array, integers = filled(ROWS), filled(ROWS.astype(np.int32))
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    srgb, part, biased = sampling(flags=0x10), cu.CUDA_RESOURCE_VIEW_DESC(), sampling()
    part.width, part.height = 8, 4
    biased.mipmapLevelBias = 1.0
    for resource, how, view in (
        (of_array(array), srgb, None),
        (of_array(array), sampling(), part),
        (of_mipmap(mipmap), biased, None),
        (of_array(integers), sampling("BORDER", border=1.0), None),
    ):
        refuses(cu.cuTexObjectCreate(resource, how, view), "NOT_SUPPORTED")
    for resource, how in (
        (of_array(integers), sampling(linear=True)),
        (of_array(array), sampling(flags=0x100)),
        (of_array(None), sampling()),
        (of_mipmap(None), sampling()),
    ):
        refuses(cu.cuTexObjectCreate(resource, how, None), "INVALID_VALUE")
    refuses(cu.cuTexObjectCreate(of_array(array), None, None), "INVALID_VALUE")


@case()
def objects_say_what_they_were_made_of() -> None:
    start()
    array, memory = filled(ROWS), int(ok(cu.cuMemAlloc(4096)))
    how = sampling("MIRROR", linear=True, flags=2, border=0.5)
    number = texture(of_array(array), how)
    found = ok(cu.cuTexObjectGetResourceDesc(number))
    assert found.resType == cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
    assert int(found.res.array.hArray) == int(array)
    told_how = ok(cu.cuTexObjectGetTextureDesc(number))
    assert list(told_how.addressMode) == list(how.addressMode)
    assert told_how.filterMode == how.filterMode and told_how.flags == 2
    assert list(told_how.borderColor) == [0] * 4  # it is not told
    nothing = ok(cu.cuTexObjectGetResourceViewDesc(number))
    assert (int(nothing.format), nothing.width, nothing.height) == (0, 0, 0)
    refuses(cu.cuTexObjectGetResourceViewDesc(number + 1000), "INVALID_VALUE")
    whole = cu.CUDA_RESOURCE_VIEW_DESC()
    whole.format = cu.CUresourceViewFormat.CU_RES_VIEW_FORMAT_FLOAT_1X32
    whole.width, whole.height = 16, 4
    viewed = ok(cu.cuTexObjectGetResourceViewDesc(texture(of_array(array), how, whole)))
    assert (viewed.format, viewed.width, viewed.height) == (whole.format, 16, 4)
    flat = ok(cu.cuTexObjectGetResourceDesc(texture(of_memory(memory, 4096, U8, 4))))
    assert int(flat.res.linear.devPtr) == memory and flat.res.linear.sizeInBytes == 4096
    assert flat.res.linear.format == U8 and flat.res.linear.numChannels == 4
    there = ok(cu.cuSurfObjectGetResourceDesc(surface(of_array(filled(ROWS, SURFACE)))))
    assert there.resType == cu.CUresourcetype.CU_RESOURCE_TYPE_ARRAY


@case()
def a_number_means_the_object_of_the_kernels_context() -> None:
    first = start()
    array, memory = filled(ROWS), int(ok(cu.cuMemAlloc(4096)))
    number = texture(of_array(array))
    ok(cu.cuMemcpyHtoD(memory, ROWS.ctypes.data, 256))
    second = ok(cu.cuCtxCreate(None, 0, 0))
    other = filled(ROWS + 100)
    numbers = [texture(of_array(other)) for _ in range(number)]
    assert read("point", number, 3) == 103 and number in numbers
    ok(cu.cuCtxSetCurrent(first))
    assert read("point", number, 3) == 3
    line = texture(of_memory(memory, 256))
    assert [read("fetch", line, x) for x in (0, 63, 64, -1)] == [0, 63, 0, 0]
    ok(cu.cuTexObjectDestroy(number))
    again = texture(of_array(filled(ROWS + 7)))
    assert read("point", again, 2) == 9
    ok(cu.cuCtxDestroy(second))


@case()
def textures_see_what_is_copied_later() -> None:
    start()
    array = filled(ROWS)
    number = texture(of_array(array))
    assert read("point", number, 5) == 5
    later = np.full(16, 77, np.float32)
    ok(cu.cuMemcpyHtoA(array, 0, later.ctypes.data, 64))
    assert read("point", number, 5) == 77
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(16, 4), 1))
    first = ok(cu.cuMipmappedArrayGetLevel(mipmap, 0))
    ok(cu.cuMemcpyAtoA(first, 0, array, 0, 64))
    assert read("point", texture(of_mipmap(mipmap)), 5) == 77


@case(emulated=True)
def textures_of_several_levels_are_not_read() -> None:
    start()
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(16, 4), 3))
    assert read("point", texture(of_mipmap(mipmap)), 5) == "ILLEGAL_ADDRESS"


@case()
def a_surface_beyond_its_row_traps() -> None:
    start()
    assert read("store", surface(of_array(filled(ROWS, SURFACE))), 64) == "ILLEGAL_ADDRESS"


@case()
def a_texture_of_memory_that_is_not_mapped_faults() -> None:
    start()
    unmapped = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    assert read("fetch", texture(of_memory(unmapped, 4096)), 3) == "ILLEGAL_ADDRESS"


def faults(kernel: str, number: int, answer: str = "ILLEGAL_ADDRESS", x: int = 0) -> None:
    assert (found := read(kernel, number, x)) == answer, found


@case(emulated=True)
def a_number_that_is_none_faults() -> None:
    start()
    faults("point", 9)


@case(emulated=True)
def a_number_of_the_drivers_own_faults() -> None:
    start()
    filled(ROWS)
    faults("point", 1)


@case(emulated=True)
def a_texture_whose_array_is_gone_faults() -> None:
    start()
    array = filled(ROWS)
    number = texture(of_array(array))
    ok(cu.cuArrayDestroy(array))
    faults("point", number)


@case(emulated=True)
def a_texture_that_is_gone_faults() -> None:
    start()
    number = texture(of_array(filled(ROWS)))
    assert read("point", number, 1) == 1
    ok(cu.cuTexObjectDestroy(number))
    faults("point", number)


@case(emulated=True)
def a_surface_of_an_array_that_is_none_for_surfaces_faults() -> None:
    start()
    faults("load", surface(of_array(filled(ROWS))))


@case(emulated=True)
def a_surface_is_no_texture() -> None:
    start()
    faults("point", surface(of_array(filled(ROWS, SURFACE))))


@case(emulated=True)
def a_surface_between_elements_is_misaligned() -> None:
    start()
    faults("load", surface(of_array(filled(ROWS, SURFACE))), "MISALIGNED_ADDRESS", 2)


@case(emulated=True)
def a_texture_of_other_dimensions_is_an_illegal_instruction() -> None:
    start()
    faults("point", texture(of_array(filled(ROWS[0]))), "ILLEGAL_INSTRUCTION")


@case(emulated=True)
def a_fetch_from_an_array_by_fractions_is_an_illegal_instruction() -> None:
    start()
    how = sampling(flags=2)
    number = texture(of_array(filled(ROWS[0])), how)
    faults("fetch", number, "ILLEGAL_INSTRUCTION")
