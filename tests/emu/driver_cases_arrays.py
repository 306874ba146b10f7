"""Arrays and mipmapped arrays: what calls answer, and copies."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.array_lib import (
    ARRAY,
    CUBEMAP,
    DEVICE,
    F32,
    FORMATS,
    GATHER,
    HOST,
    LAYERED,
    SURFACE,
    U8,
    as_bytes,
    content,
    filled,
    of_array,
    of_host,
    of_mipmap,
    plane,
    sampling,
    shape,
    solid,
    texture,
    told,
)
from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    R,
    case,
    download,
    function,
    launch_wait,
    ok,
    refuses,
    start,
)

ROWS = np.arange(64, dtype=np.float32).reshape(4, 16, 1)


def random_bytes(*extents: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, extents, dtype=np.uint8)


def goes_round(array: Any, size: tuple[int, int, int]) -> None:
    """All of an array through device memory and back."""
    count = size[0] * size[1] * size[2]
    data = random_bytes(count)
    there, back = (int(ok(cu.cuMemAlloc(count))) for _ in range(2))
    ok(cu.cuMemcpyHtoD(there, data.ctypes.data, count))
    ok(cu.cuMemcpy3D(solid(array, there, size)))
    ok(cu.cuMemcpy3D(solid(array, back, size, back=True)))
    assert (download(back, count, np.uint8) == data).all()
    for address in (there, back):
        ok(cu.cuMemFree(address))


@case()
def arrays_of_every_shape_keep_what_is_copied() -> None:
    start()
    made = ok(cu.cuArrayCreate(plane(33, 7, U8, 2)))
    flat = ok(cu.cuArrayGetDescriptor(made))
    assert (flat.Width, flat.Height, flat.Format, flat.NumChannels) == (33, 7, U8, 2)
    assert told(made) == (33, 7, 0, U8, 2, 0)
    ok(cu.cuArrayDestroy(made))
    for about, size in (
        (shape(33), (132, 1, 1)),
        (shape(33, 7), (132, 7, 1)),
        (shape(33, 7, 5, channels=2), (264, 7, 5)),
        (shape(33, 0, 5, flags=LAYERED), (132, 1, 5)),
        (shape(33, 7, 5, flags=LAYERED), (132, 7, 5)),
        (shape(33, 7, 5, flags=LAYERED | SURFACE), (132, 7, 5)),
        (shape(32, 32, 6, flags=CUBEMAP), (128, 32, 6)),
        (shape(32, 32, 12, flags=CUBEMAP | LAYERED), (128, 32, 12)),
        (shape(33, 7, flags=GATHER), (132, 7, 1)),
        (shape(33, 7, kind=FORMATS["f2"], channels=4), (264, 7, 1)),
        (shape(1024, 1024, channels=4), (16384, 1024, 1)),
    ):
        array = ok(cu.cuArray3DCreate(about))
        extents = (about.Width, about.Height, about.Depth)
        assert told(array) == (*extents, about.Format, about.NumChannels, about.Flags)
        assert ok(cu.cuArrayGetDescriptor(array)).Height == about.Height
        goes_round(array, size)
        refuses(cu.cuArrayGetMemoryRequirements(array, 0), "INVALID_VALUE")
        ok(cu.cuArrayDestroy(array))


@case()
def every_format_is_an_array() -> None:
    start()
    for name, kind in FORMATS.items():
        for channels in (1, 2, 4):
            array = ok(cu.cuArray3DCreate(shape(5, 3, kind=kind, channels=channels)))
            assert told(array) == (5, 3, 0, kind, channels, 0)
            goes_round(array, (5 * channels * np.dtype(name).itemsize, 3, 1))
            ok(cu.cuArrayDestroy(array))


@case()
def descriptors_that_make_no_array() -> None:
    start()
    for about in (
        shape(33, 7, channels=3),
        shape(33, 7, channels=0),
        shape(0, 7),
        shape(33, 7, kind=cu.CUarray_format(0x20), flags=0x10),
        shape(33, 7, flags=0x20),
        shape(32, 32, flags=0x400),
        shape(32, 32, 5, flags=CUBEMAP),
        shape(32, 31, 6, flags=CUBEMAP),
        shape(32, 0, 6),
        shape(32, flags=LAYERED),
        shape(1 << 20, 32),
        shape(1 << 27),
    ):
        refuses(cu.cuArray3DCreate(about), "INVALID_VALUE")
    refuses(cu.cuArrayCreate(plane(0, 1)), "INVALID_VALUE")
    refuses(cu.cuArrayDestroy(None), "INVALID_HANDLE")


@case(emulated=True)
def arrays_that_the_emulated_driver_does_not_have() -> None:
    start()
    kinds = cu.CUarray_format
    for about in (
        shape(256, 256, flags=0x40),
        shape(256, 256, flags=0x80),
        shape(64, 64, kind=kinds.CU_AD_FORMAT_BC1_UNORM, channels=4),
        shape(33, 7, kind=kinds.CU_AD_FORMAT_UNORM_INT8X4, channels=4),
        shape(64, 64, kind=kinds.CU_AD_FORMAT_NV12, channels=3),
    ):
        refuses(cu.cuArray3DCreate(about), "NOT_SUPPORTED")
    refuses(cu.cuArrayGetPlane(ok(cu.cuArrayCreate(plane(4))), 0), "NOT_SUPPORTED")


@case(emulated=True, MEMORY="64M", CONTEXT="2M")
def arrays_take_device_memory() -> None:
    start()
    free = ok(cu.cuMemGetInfo())[0]
    array = ok(cu.cuArrayCreate(plane(1024, 1024)))
    assert ok(cu.cuMemGetInfo())[0] == free - 4 * MIB
    small = ok(cu.cuArrayCreate(plane(1)))
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(1024, 1024), 11))
    assert ok(cu.cuMemGetInfo())[0] == free - 4 * MIB - GRANULE - 6 * MIB
    refuses(cu.cuArrayCreate(plane(4096, 4096)), "OUT_OF_MEMORY")
    refuses(cu.cuMipmappedArrayCreate(shape(4096, 4096), 1), "OUT_OF_MEMORY")
    ok(cu.cuMipmappedArrayDestroy(mipmap))
    for one in (array, small):
        ok(cu.cuArrayDestroy(one))
        refuses(cu.cuArrayDestroy(one), "INVALID_HANDLE")
        refuses(cu.cuArray3DGetDescriptor(one), "INVALID_HANDLE")
    assert ok(cu.cuMemGetInfo())[0] == free


@case()
def mipmapped_arrays_and_their_levels() -> None:
    start()
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    for level in range(4):
        array = ok(cu.cuMipmappedArrayGetLevel(mipmap, level))
        assert int(ok(cu.cuMipmappedArrayGetLevel(mipmap, level))) == int(array)
        assert told(array) == (64 >> level, 32 >> level, 0, F32, 1, 0)
        goes_round(array, (256 >> level, 32 >> level, 1))
    refuses(cu.cuMipmappedArrayGetLevel(mipmap, 4), "INVALID_VALUE")
    last = ok(cu.cuMipmappedArrayGetLevel(mipmap, 3))
    ok(cu.cuArrayDestroy(last))
    goes_round(ok(cu.cuMipmappedArrayGetLevel(mipmap, 3)), (32, 4, 1))
    ok(cu.cuMipmappedArrayDestroy(mipmap))

    whole = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 99))
    assert told(ok(cu.cuMipmappedArrayGetLevel(whole, 6)))[:3] == (1, 1, 0)
    refuses(cu.cuMipmappedArrayGetLevel(whole, 7), "INVALID_VALUE")
    for about, second, size in (
        (shape(64, 32, 3, flags=LAYERED), (32, 16, 3), (128, 16, 3)),
        (shape(64, 32, 8), (32, 16, 4), (128, 16, 4)),
        (shape(64), (32, 0, 0), (128, 1, 1)),
    ):
        other = ok(cu.cuMipmappedArrayCreate(about, 3))
        level = ok(cu.cuMipmappedArrayGetLevel(other, 1))
        assert told(level)[:3] == second
        goes_round(level, size)
        ok(cu.cuMipmappedArrayDestroy(other))


@case(emulated=True)
def a_levels_handle_ends_with_its_mipmapped_array() -> None:
    start()
    mipmap = ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    level = ok(cu.cuMipmappedArrayGetLevel(mipmap, 1))
    refuses(cu.cuMipmappedArrayGetMemoryRequirements(mipmap, 0), "INVALID_VALUE")
    ok(cu.cuMipmappedArrayDestroy(mipmap))
    for answer in (
        cu.cuArray3DGetDescriptor(level),
        cu.cuArrayDestroy(level),
        cu.cuMipmappedArrayDestroy(mipmap),
        cu.cuMipmappedArrayGetLevel(mipmap, 0),
        cu.cuMipmappedArrayDestroy(ok(cu.cuArrayCreate(plane(4)))),
        cu.cuArrayDestroy(ok(cu.cuMipmappedArrayCreate(shape(4), 1))),
    ):
        refuses(answer, "INVALID_HANDLE")


@case()
def rows_of_arrays_are_copied() -> None:
    start()
    data, back = random_bytes(264), np.zeros(264, np.uint8)
    memory = int(ok(cu.cuMemAlloc(264)))
    line, square = ok(cu.cuArrayCreate(plane(33))), ok(cu.cuArrayCreate(plane(33, 7)))
    cube = ok(cu.cuArray3DCreate(shape(33, 7, 5)))
    for array, offset, size, answer in (
        (line, 0, 132, "ok"),
        (line, 4, 128, "ok"),
        (line, 4, 132, "INVALID_VALUE"),
        (line, 2, 8, "ok"),
        (square, 0, 132, "ok"),
        (square, 0, 264, "INVALID_VALUE"),
        (square, 132, 132, "INVALID_VALUE"),
        (cube, 0, 132, "ok"),
    ):
        results = (
            cu.cuMemcpyHtoA(array, offset, data.ctypes.data, size),
            cu.cuMemcpyHtoAAsync(array, offset, data.ctypes.data, size, 0),
            cu.cuMemcpyAtoH(back.ctypes.data, array, offset, size),
            cu.cuMemcpyAtoHAsync(back.ctypes.data, array, offset, size, 0),
        )
        ok(cu.cuCtxSynchronize())
        if answer != "ok":
            for result in results:
                refuses(result, answer)
            continue
        assert [result[0] for result in results] == [R.CUDA_SUCCESS] * 4
        assert (back[:size] == data[:size]).all()
    ok(cu.cuMemcpyHtoA(line, 0, data.ctypes.data, 132))
    ok(cu.cuMemcpyAtoA(square, 0, line, 0, 132))
    ok(cu.cuMemcpyAtoA(square, 4, square, 64, 16))
    ok(cu.cuMemcpyAtoD(memory, square, 0, 132))
    want = data[:132].copy()
    want[4:20] = data[64:80]
    assert (download(memory, 132, np.uint8) == want).all()
    ok(cu.cuMemcpyDtoA(line, 0, memory, 132))
    assert (content(line).reshape(-1) == want).all()


@case()
def copies_stay_inside_of_arrays() -> None:
    start()
    memory = int(ok(cu.cuMemAlloc(MIB)))
    square, cube = ok(cu.cuArrayCreate(plane(33, 7))), ok(cu.cuArray3DCreate(shape(33, 7, 5)))
    layers = ok(cu.cuArray3DCreate(shape(33, 0, 5, flags=LAYERED)))
    for array, size, answer in (
        (cube, (132, 7, 5), "ok"),
        (cube, (136, 7, 5), "INVALID_VALUE"),
        (cube, (132, 8, 5), "INVALID_VALUE"),
        (cube, (132, 7, 6), "INVALID_VALUE"),
        (square, (132, 7, 2), "INVALID_VALUE"),
        (square, (132, 7, 0), "ok"),
        (square, (130, 7, 1), "ok"),
        (square, (0, 7, 1), "ok"),
        (layers, (132, 5, 1), "INVALID_VALUE"),
        (layers, (132, 1, 5), "ok"),
    ):
        for result in (
            cu.cuMemcpy3D(solid(array, memory, size, back=True)),
            cu.cuMemcpy3DAsync(solid(array, memory, size, back=True), 0),
        ):
            if answer == "ok":
                ok(result)
            else:
                refuses(result, answer)
    refuses(cu.cuMemcpy3D(solid(None, memory, (132, 7, 1), back=True)), "INVALID_VALUE")


@case()
def parts_of_arrays_are_copied() -> None:
    start()
    data = random_bytes(5, 7, 132)
    cube, other = (ok(cu.cuArray3DCreate(shape(33, 7, 5))) for _ in range(2))
    ok(cu.cuMemcpy3D(of_host(cube, data)))
    assert (content(cube) == data).all()

    part = cu.CUDA_MEMCPY3D()
    part.srcMemoryType, part.srcArray = ARRAY, cube
    part.srcXInBytes, part.srcY, part.srcZ = 8, 2, 1
    part.dstMemoryType, part.dstArray = ARRAY, other
    part.dstXInBytes, part.dstY, part.dstZ = 20, 1, 2
    part.WidthInBytes, part.Height, part.Depth = 40, 3, 2
    ok(cu.cuMemcpy3DAsync(part, ok(cu.cuStreamCreate(0))))
    ok(cu.cuCtxSynchronize())
    got = content(other)
    assert (got[2:4, 1:4, 20:60] == data[1:3, 2:5, 8:48]).all()
    part.dstY = 5
    refuses(cu.cuMemcpy3D(part), "INVALID_VALUE")

    flat = cu.CUDA_MEMCPY2D()  # of slice 0
    back = np.zeros((3, 64), np.uint8)
    flat.srcMemoryType, flat.srcArray, flat.srcXInBytes, flat.srcY = ARRAY, cube, 4, 2
    flat.dstMemoryType, flat.dstHost = HOST, back.ctypes.data
    flat.dstPitch, flat.dstXInBytes, flat.dstY = 64, 8, 1
    flat.WidthInBytes, flat.Height = 48, 2
    for call in (cu.cuMemcpy2D, cu.cuMemcpy2DUnaligned):
        back[:] = 0
        ok(call(flat))
        assert (back[1:3, 8:56] == data[0, 2:4, 4:52]).all() and not back[0].any()
    flat.WidthInBytes = 132
    refuses(cu.cuMemcpy2D(flat), "INVALID_VALUE")

    memory, stream = int(ok(cu.cuMemAlloc(MIB))), ok(cu.cuStreamCreate(1))
    flat.dstMemoryType, flat.dstDevice, flat.WidthInBytes = DEVICE, memory, 48
    ok(cu.cuMemcpy2DAsync(flat, stream))
    ok(cu.cuStreamSynchronize(stream))
    seen = download(memory, 3 * 64, np.uint8).reshape(3, 64)
    assert (seen[1:3, 8:56] == data[0, 2:4, 4:52]).all()


@case()
def solid_copies_of_memory() -> None:
    start()
    data, back = random_bytes(4, 6, 32), np.zeros((2, 3, 16), np.uint8)
    memory = int(ok(cu.cuMemAlloc(data.nbytes)))
    ok(cu.cuMemcpyHtoD(memory, data.ctypes.data, data.nbytes))
    part = cu.CUDA_MEMCPY3D()
    part.srcMemoryType, part.srcDevice, part.srcPitch, part.srcHeight = DEVICE, memory, 32, 6
    part.srcXInBytes, part.srcY, part.srcZ = 5, 2, 1
    part.dstMemoryType, part.dstHost, part.dstPitch = HOST, back.ctypes.data, 16
    part.dstHeight = 3
    part.WidthInBytes, part.Height, part.Depth = 16, 3, 2
    ok(cu.cuMemcpy3D(part))
    assert (back == data[1:3, 2:5, 5:21]).all()
    part.srcPitch = 15
    refuses(cu.cuMemcpy3D(part), "INVALID_VALUE")


@case()
def arrays_of_another_context() -> None:
    first = start()
    memory = int(ok(cu.cuMemAlloc(MIB)))
    ok(cu.cuCtxCreate(None, 0, 0))
    array = filled(ROWS)
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuMemcpy3D(solid(array, memory, (64, 4, 1), back=True)))
    assert (download(memory, 64, np.float32) == ROWS.reshape(-1)).all()
    refuses(cu.cuTexObjectCreate(of_array(array), sampling(), None), "PEER_ACCESS_NOT_ENABLED")
    ok(cu.cuArrayDestroy(array))


@case(emulated=True)
def arrays_end_with_their_context() -> None:
    first = start()
    free = ok(cu.cuMemGetInfo())[0]
    other = ok(cu.cuCtxCreate(None, 0, 0))
    array, mipmap = filled(ROWS), ok(cu.cuMipmappedArrayCreate(shape(64, 32), 4))
    texture(of_mipmap(mipmap))
    ok(cu.cuCtxDestroy(other))
    ok(cu.cuCtxSetCurrent(first))
    refuses(cu.cuArrayDestroy(array), "INVALID_HANDLE")
    refuses(cu.cuMipmappedArrayDestroy(mipmap), "INVALID_HANDLE")
    refuses(cu.cuTexObjectCreate(of_array(array), sampling(), None), "INVALID_VALUE")
    assert ok(cu.cuMemGetInfo())[0] == free


@case()
def graphs_copy_arrays() -> None:
    context = start()
    stream, graph = ok(cu.cuStreamCreate(1)), ok(cu.cuGraphCreate(0))
    data = random_bytes(5, 7, 132)
    memory = int(ok(cu.cuMemAlloc(data.nbytes)))
    ok(cu.cuMemcpyHtoD(memory, data.ctypes.data, data.nbytes))
    cube, other = (ok(cu.cuArray3DCreate(shape(33, 7, 5))) for _ in range(2))
    whole = solid(cube, memory, (132, 7, 5))
    first = ok(cu.cuGraphAddMemcpyNode(graph, None, 0, whole, context))
    across = cu.CUDA_MEMCPY3D()
    across.srcMemoryType, across.srcArray = ARRAY, cube
    across.dstMemoryType, across.dstArray, across.dstZ = ARRAY, other, 1
    across.WidthInBytes, across.Height, across.Depth = 132, 7, 4
    ok(cu.cuGraphAddMemcpyNode(graph, [first], 1, across, context))
    asked = ok(cu.cuGraphMemcpyNodeGetParams(first))
    assert asked.dstMemoryType == ARRAY and int(asked.dstArray) == int(cube)
    across.Depth = 5
    refuses(cu.cuGraphAddMemcpyNode(graph, None, 0, across, context), "INVALID_VALUE")
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(made, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert (content(cube) == data).all()
    assert (content(other)[1:] == data[:4]).all()

    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    ok(cu.cuMemsetD8(memory, 0, data.nbytes))
    ok(cu.cuStreamBeginCapture(stream, mode))
    ok(cu.cuMemcpy3DAsync(solid(cube, memory, (132, 7, 5), back=True), stream))
    captured = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
    assert not download(memory, data.nbytes, np.uint8).any()
    ok(cu.cuGraphLaunch(captured, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert (download(memory, data.nbytes, np.uint8) == data.reshape(-1)).all()


@case(emulated=True)
def a_graph_that_copies_a_dead_array_fails() -> None:
    context = start()
    graph, array = ok(cu.cuGraphCreate(0)), filled(ROWS)
    memory = int(ok(cu.cuMemAlloc(256)))
    ok(cu.cuGraphAddMemcpyNode(graph, None, 0, solid(array, memory, (64, 4, 1)), context))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuArrayDestroy(array))
    ok(cu.cuGraphLaunch(made, 0))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")


@case(emulated=True)
def handles_of_arrays_mean_nothing_else() -> None:
    start()
    array, memory = filled(ROWS), int(ok(cu.cuMemAlloc(256)))
    assert (content(array) == as_bytes(ROWS.reshape(1, 4, 16, 1))).all()
    stream = ok(cu.cuStreamCreate(0))
    refuses(cu.cuArrayDestroy(int(stream)), "INVALID_HANDLE")
    refuses(cu.cuStreamDestroy(int(array)), "INVALID_HANDLE")
    ok(cu.cuArrayDestroy(array))
    refuses(cu.cuMemcpy3D(solid(array, memory, (64, 4, 1), back=True)), "INVALID_VALUE")
    refuses(cu.cuMemcpy3D(solid(stream, memory, (64, 4, 1), back=True)), "INVALID_VALUE")


@case(emulated=True)
def a_copy_from_pageable_memory_takes_it_at_once() -> None:
    start()
    array, flag = filled(ROWS), int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    stream, helper = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
    ok(launch_wait(function(b"wait_for"), flag, stream))
    data = np.full((1, 4, 64), 9, np.uint8)
    ok(cu.cuMemcpy3DAsync(of_host(array, data), stream))
    data[:] = 1
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    ok(cu.cuStreamSynchronize(stream))
    assert (content(array) == 9).all()


@case(emulated=True)
def an_array_is_destroyed_after_what_uses_it() -> None:
    start()
    array, memory = filled(ROWS), int(ok(cu.cuMemAlloc(256)))
    flag = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    stream, helper = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
    ok(launch_wait(function(b"wait_for"), flag, stream))
    ok(cu.cuMemcpy3DAsync(solid(array, memory, (64, 4, 1), back=True), stream))
    context = ok(cu.cuCtxGetCurrent())

    def release() -> None:
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuMemsetD32Async(flag, 1, 1, helper))

    timer = threading.Timer(0.2, release)
    timer.start()
    ok(cu.cuArrayDestroy(array))
    assert (download(memory, 64, np.float32) == ROWS.reshape(-1)).all()
    timer.join()
