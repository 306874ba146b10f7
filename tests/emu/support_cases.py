"""Kinds of memory and objects: what a program does with each before and after a checkpoint.

Those that the emulated GPU has; support_cases_gpu.py has the others.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    PTX,
    allow,
    download,
    fd_kind,
    function,
    launch_inc,
    ok,
    properties,
    start,
)
from tests.emu.support_lib import CASES, Say, case
from tests.patience import SECONDS

__all__ = ["CASES"]

LARGE = int(os.environ.get("FLOWGPU_SUPPORT_LARGE", 64 * MIB))


def holds(address: int, value: int, size: int) -> bool:
    return bool((download(address, size, np.uint8) == value).all())


def address_range(address: int) -> tuple[int, int]:
    base, size = ok(cu.cuMemGetAddressRange(address))
    return int(base), size


def set_bytes(address: int, value: int, size: int) -> None:
    ok(cu.cuMemsetD8(address, value, size))


@case("small allocations that share a block")
def small_allocations(say: Say) -> Iterator[None]:
    start()
    sizes = [1 + 97 * n % 3000 for n in range(300)]
    held = [(int(ok(cu.cuMemAlloc(size))), n % 251, size) for n, size in enumerate(sizes)]
    for one in held:
        set_bytes(*one)
    ranges = [address_range(address) for address, _, _ in held]
    say("base and size", ranges == [(address, size) for address, _, size in held])
    yield
    say("contents", all(holds(*one) for one in held))
    say("ranges", ranges == [address_range(address) for address, _, _ in held])
    for address, _, _ in held[::2]:
        ok(cu.cuMemFree(address))
    fresh = [int(ok(cu.cuMemAlloc(700))) for _ in range(50)]
    for address in fresh:
        set_bytes(address, 255, 700)
    kept = held[1::2]
    say("others", all(holds(*one) for one in kept), not {a for a, _, _ in kept} & {*fresh})
    for address in [*fresh, *(a for a, _, _ in kept)]:
        ok(cu.cuMemFree(address))


@case("large allocations")
def large_allocations(say: Say) -> Iterator[None]:
    start()
    address = int(ok(cu.cuMemAlloc(LARGE)))
    ends = (address, address + LARGE - MIB)
    set_bytes(address, 0, LARGE)
    for end in ends:
        set_bytes(end, 7, MIB)
    ok(cu.cuCtxSynchronize())
    yield
    say("ends", [holds(end, 7, MIB) for end in ends])
    say("middle", holds(address + LARGE // 2, 0, MIB), holds(address + MIB, 0, MIB))
    ok(launch_inc(function(b"inc"), ends[1], 64))
    say("a kernel", download(ends[1], 1)[0] == 0x07070708)
    ok(cu.cuMemFree(address))


@case("answers of the query calls")
def queries(say: Say) -> Iterator[None]:
    start()
    address = int(ok(cu.cuMemAlloc(5 * MIB + 3)))
    names = ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_START_ADDR", "RANGE_SIZE", "IS_MANAGED",
             "MAPPED", "ALLOWED_HANDLE_TYPES")  # fmt: skip
    kinds = [getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}") for name in names]

    def seen() -> list[object]:
        found: list[object] = [str(cu.cuPointerGetAttribute(kind, address + 9)) for kind in kinds]
        free, total = ok(cu.cuMemGetInfo())
        device = ok(cu.cuCtxGetDevice())
        uuid = bytes(ok(cu.cuDeviceGetUuid(device)).bytes)
        return [*found, address_range(address + MIB), total, free > total // 2, int(device), uuid]

    before = seen()
    yield
    say("the same", [a == b for a, b in zip(seen(), before, strict=True)])
    ok(cu.cuMemFree(address))
    say("no memory", cu.cuMemGetAddressRange(address)[0].name)


@case("frees in the order of streams")
def order_of_frees(say: Say) -> Iterator[None]:
    start()
    inc = function(b"inc")
    first, second = (ok(cu.cuStreamCreate(1)) for _ in "ab")
    out = np.zeros((2, MIB), np.uint32)
    event = ok(cu.cuEventCreate(2))

    def turn(row: int) -> None:
        data = int(ok(cu.cuMemAlloc(4 * MIB)))
        ok(cu.cuMemsetD32Async(data, 3 + row, MIB, first))
        ok(launch_inc(inc, data, 64, first))
        ok(cu.cuEventRecord(event, first))
        ok(cu.cuStreamWaitEvent(second, event, 0))
        ok(cu.cuMemcpyDtoHAsync(out[row].ctypes.data, data, 4 * MIB, second))
        ok(cu.cuMemFreeAsync(data, second))

    turn(0)  # under way when the checkpoint is asked for
    yield
    turn(1)
    ok(cu.cuStreamSynchronize(second))
    say([(int(row[0]), int(row[63]), int(row[64]), int(row[-1])) for row in out])


@case("memory that the program maps itself (expandable segments)")
def own_mappings(say: Say) -> Iterator[None]:
    start()
    va = int(ok(cu.cuMemAddressReserve(8 * GRANULE, 0, 0, 0)))
    handles = [
        ok(cu.cuMemCreate(size * GRANULE, properties(exportable=False), 0)) for size in (2, 1)
    ]
    places = {va: handles[0], va + 2 * GRANULE: handles[1], va + 5 * GRANULE: handles[1]}
    sizes = {int(handles[0]): 2 * GRANULE, int(handles[1]): GRANULE}
    for place, handle in places.items():
        ok(cu.cuMemMap(place, sizes[int(handle)], 0, handle, 0))
        ok(allow(place, sizes[int(handle)]))
    set_bytes(va, 1, 2 * GRANULE)
    set_bytes(va + 2 * GRANULE, 2, GRANULE)
    ok(cu.cuCtxSynchronize())
    yield
    say("contents", holds(va, 1, 2 * GRANULE), holds(va + 5 * GRANULE, 2, GRANULE))
    set_bytes(va + 5 * GRANULE, 3, GRANULE)
    say("mapped twice", holds(va + 2 * GRANULE, 3, GRANULE))
    found = ok(cu.cuMemRetainAllocationHandle(va + 5))
    say("handle", int(found) == int(handles[0]))
    for place, handle in places.items():
        ok(cu.cuMemUnmap(place, sizes[int(handle)]))
    for handle in (*handles, found):
        ok(cu.cuMemRelease(handle))
    ok(cu.cuMemAddressFree(va, 8 * GRANULE))


@case("`cuMemAllocAsync` and the default pool")
def stream_ordered_memory(say: Say) -> Iterator[None]:
    start()
    stream = ok(cu.cuStreamCreate(1))
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(32 * MIB)))
    data = int(ok(cu.cuMemAllocAsync(3 * MIB, stream)))
    ok(cu.cuMemsetD32Async(data, 9, 3 * MIB // 4, stream))
    wide = int(ok(cu.cuMemAllocAsync(72 * MIB, stream)))
    small = [int(ok(cu.cuMemAllocAsync(100 + n, stream))) for n in range(3)]
    for place, word in ((wide, 10), (wide + 72 * MIB - 4096, 11), *((a, 12) for a in small)):
        ok(cu.cuMemsetD32Async(place, word, 25, stream))
    ok(cu.cuStreamSynchronize(stream))
    yield
    say("contents", bool((download(data, 3 * MIB // 4) == 9).all()))
    for place in (wide, wide + 72 * MIB - 4096, *small):
        say("word", download(place, 25)[[0, -1]])
    say("range", ok(cu.cuMemGetAddressRange(wide + 5))[1])
    ok(cu.cuMemFree(small.pop()))
    for place in (wide, *small):
        ok(cu.cuMemFreeAsync(place, stream))
    say("threshold", int(ok(cu.cuMemPoolGetAttribute(pool, threshold))) // MIB)
    say("pool", int(ok(cu.cuDeviceGetMemPool(0))) == int(pool))
    more = int(ok(cu.cuMemAllocFromPoolAsync(MIB, pool, stream)))
    ok(cu.cuMemcpyDtoDAsync(more, data, MIB, stream))
    for address in (data, more):
        ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))


@case("host memory, allocated and registered")
def host_memory(say: Say) -> Iterator[None]:
    start()
    size = MIB
    pinned = [int(ok(cu.cuMemHostAlloc(size, 0))), int(ok(cu.cuMemAllocHost(size)))]
    own = np.arange(size // 4, dtype=np.uint32)
    ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    for n, address in enumerate(pinned):
        ctypes.memset(address, 5 + n, size)
    flags = [ok(cu.cuMemHostGetFlags(address)) for address in (*pinned, own.ctypes.data)]
    yield
    data, stream = int(ok(cu.cuMemAlloc(size))), ok(cu.cuStreamCreate(1))
    for address in (*pinned, own.ctypes.data):
        ok(cu.cuMemcpyHtoDAsync(data, address, size, stream))
        ok(cu.cuStreamSynchronize(stream))
        say(download(data, size // 4)[[0, 100, -1]])
    say("flags", flags == [ok(cu.cuMemHostGetFlags(a)) for a in (*pinned, own.ctypes.data)])
    again = cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0)
    say("again", again[0].name)
    ok(cu.cuMemHostUnregister(own.ctypes.data))
    for address in pinned:
        ok(cu.cuMemFreeHost(address))


@case("modules, libraries and their variables")
def module_globals(say: Say) -> Iterator[None]:
    start()
    module = ok(cu.cuModuleLoadData(PTX))
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    bump = ok(cu.cuModuleGetFunction(module, b"bump"))
    kernel = ok(cu.cuLibraryGetKernel(library, b"bump"))
    places = [ok(cu.cuModuleGetGlobal(module, name))[0] for name in (b"counter", b"table")]
    places.append(ok(cu.cuLibraryGetGlobal(library, b"counter"))[0])

    def turn() -> None:
        for one in (bump, bump, cu.CUfunction(int(kernel))):
            ok(cu.cuLaunchKernel(one, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        say([int(download(int(place), 1)[0]) for place in places])

    turn()
    yield
    turn()
    say("same place", int(ok(cu.cuModuleGetGlobal(module, b"counter"))[0]) == int(places[0]))
    again = ok(cu.cuModuleGetFunction(module, b"bump"))
    say("same function", int(again) == int(bump))
    ok(cu.cuModuleUnload(module))


@case(
    "variables of a library, where the program sees several GPUs",
    devices=2,
    unsaved="the addresses of module variables",
)
def globals_and_gpus(say: Say) -> Iterator[None]:
    yield from module_globals(say)


@case("streams with priorities")
def priorities(say: Say) -> Iterator[None]:
    start()
    inc = function(b"inc")
    least, most = ok(cu.cuCtxGetStreamPriorityRange())
    streams = [ok(cu.cuStreamCreateWithPriority(1, level)) for level in (least, most)]
    data = int(ok(cu.cuMemAlloc(256)))
    set_bytes(data, 0, 256)
    ok(cu.cuCtxSynchronize())

    def turn() -> None:
        for stream in streams:
            ok(launch_inc(inc, data, 64, stream))
            ok(cu.cuStreamSynchronize(stream))
        say(int(download(data, 1)[0]))
        levels = [ok(cu.cuStreamGetPriority(stream)) for stream in streams]
        say(levels == [least, most], [ok(cu.cuStreamGetFlags(stream)) for stream in streams])

    turn()
    yield
    turn()


@case("events with timing")
def events(say: Say) -> Iterator[None]:
    start()
    stream = ok(cu.cuStreamCreate(1))
    first, second, untimed = (ok(cu.cuEventCreate(flags)) for flags in (0, 0, 2))
    for event in (first, untimed):
        ok(cu.cuEventRecord(event, stream))
        ok(cu.cuEventSynchronize(event))
    yield
    say("done", cu.cuEventQuery(first)[0].name)
    ok(cu.cuEventRecord(second, stream))
    ok(cu.cuEventSynchronize(second))
    say("time goes on", 0 <= ok(cu.cuEventElapsedTime(first, second)) < 600_000)
    say("no time", cu.cuEventElapsedTime(untimed, second)[0].name)
    ok(cu.cuStreamWaitEvent(stream, first, 0))
    ok(cu.cuStreamSynchronize(stream))


@case("several contexts")
def several_contexts(say: Say) -> Iterator[None]:
    primary = start()
    other = ok(cu.cuCtxCreate(None, 0, 0))
    data = {}
    for value, context in enumerate((primary, other), 1):
        ok(cu.cuCtxSetCurrent(context))
        data[int(context)] = int(ok(cu.cuMemAlloc(3 * MIB)))
        set_bytes(data[int(context)], value, 3 * MIB)
        ok(cu.cuCtxSynchronize())
    yield
    say("current", int(ok(cu.cuCtxGetCurrent())) == int(other))
    for value, context in enumerate((primary, other), 1):
        ok(cu.cuCtxPushCurrent(context))
        address = data[int(context)]
        ok(launch_inc(function(b"inc"), address, 64))
        say(hex(download(address, 1)[0]), holds(address + MIB, value, MIB))
        ok(cu.cuCtxPopCurrent())
    ok(cu.cuCtxDestroy(other))
    ok(cu.cuCtxSetCurrent(primary))
    say("the other's end", holds(data[int(primary)] + MIB, 1, MIB))


@case("peer access between two GPUs", devices=2)
def peer_access(say: Say) -> Iterator[None]:
    context = start(0)
    other = ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxPushCurrent(other))
    remote = int(ok(cu.cuMemAlloc(4 * MIB)))
    set_bytes(remote, 0, 4 * MIB)
    ok(cu.cuCtxSynchronize())
    ok(cu.cuCtxPopCurrent())
    ok(cu.cuCtxEnablePeerAccess(other, 0))
    local, inc = int(ok(cu.cuMemAlloc(4 * MIB))), function(b"inc")

    def turn() -> None:
        ok(launch_inc(inc, remote, 64))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuMemcpyPeer(local, context, remote, other, 4 * MIB))
        say(download(local, 2), cu.cuCtxEnablePeerAccess(other, 0)[0].name)

    turn()
    yield
    turn()
    ok(cu.cuCtxDisablePeerAccess(other))


@case("a handle that is mapped for two GPUs, each at an address of its own", devices=2)
def handle_of_two_gpus(say: Say) -> Iterator[None]:
    """NCCL maps handles so within a process."""
    context = start(0)
    other = ok(cu.cuDevicePrimaryCtxRetain(1))
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    near, far = (int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0))) for _ in range(2))
    for device, place in enumerate((near, far)):
        ok(cu.cuMemMap(place, GRANULE, 0, handle, 0))
        ok(allow(place, GRANULE, device=device))
    ok(cu.cuMemRelease(handle))
    set_bytes(near, 0, GRANULE)
    ok(cu.cuCtxSynchronize())

    def turn() -> None:
        ok(cu.cuCtxPushCurrent(other))
        ok(launch_inc(function(b"inc"), far, 64))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuCtxPopCurrent())
        ok(launch_inc(function(b"inc"), near, 64))
        ok(cu.cuCtxSynchronize())
        say(download(near, 2), int(ok(cu.cuCtxGetCurrent())) == int(context))

    turn()
    yield
    turn()


@case("user objects of graphs")
def user_objects(say: Say) -> Iterator[None]:
    start()
    gone: list[int] = []
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gone.append)
    destroy = cu.CUhostFn(ctypes.cast(called, ctypes.c_void_p).value)
    graph, stream = ok(cu.cuGraphCreate(0)), ok(cu.cuStreamCreate(1))
    for number, flags in ((1, 0), (2, 1)):
        held = ok(cu.cuUserObjectCreate(number, destroy, 1, 1))
        ok(cu.cuGraphRetainUserObject(graph, held, 1, flags))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    yield
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    say("kept", gone)
    ok(cu.cuGraphExecDestroy(executable))
    deadline = time.monotonic() + SECONDS
    while not gone and time.monotonic() < deadline:
        time.sleep(0.001)
    say("gone", gone)


@case("memory that was asked to be capable of GPUDirect RDMA")
def rdma_capable(say: Say) -> Iterator[None]:
    start()
    wanted: Any = properties(exportable=False)
    wanted.allocFlags.gpuDirectRDMACapable = 1
    handle = ok(cu.cuMemCreate(GRANULE, wanted, 0))
    va = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    ok(cu.cuMemMap(va, GRANULE, 0, handle, 0))
    ok(allow(va, GRANULE))
    set_bytes(va, 4, GRANULE)
    ok(cu.cuCtxSynchronize())
    yield
    said = ok(cu.cuMemGetAllocationPropertiesFromHandle(handle))
    say("asked for", int(said.allocFlags.gpuDirectRDMACapable), holds(va, 4, GRANULE))


@case("shareable handles, exported")
def exported_handles(say: Say) -> Iterator[None]:
    start()
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    fd = int(ok(cu.cuMemExportToShareableHandle(handle, fd_kind(), 0)))
    va = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    ok(cu.cuMemMap(va, GRANULE, 0, handle, 0))
    ok(allow(va, GRANULE))
    set_bytes(va, 8, GRANULE)
    ok(cu.cuCtxSynchronize())
    yield
    other = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))
    os.close(fd)
    there = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    ok(cu.cuMemMap(there, GRANULE, 0, other, 0))
    ok(allow(there, GRANULE))
    say(holds(va, 8, GRANULE), holds(there, 8, GRANULE))


@case("shareable handles, imported")
def imported_handles(say: Say) -> Iterator[None]:
    start()
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    fd = int(ok(cu.cuMemExportToShareableHandle(handle, fd_kind(), 0)))
    other = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))
    os.close(fd)
    va = int(ok(cu.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    for place, one in ((va, handle), (va + GRANULE, other)):
        ok(cu.cuMemMap(place, GRANULE, 0, one, 0))
    ok(allow(va, 2 * GRANULE))
    set_bytes(va, 8, GRANULE)
    ok(cu.cuCtxSynchronize())
    yield
    say(holds(va + GRANULE, 8, GRANULE))
    set_bytes(va + GRANULE, 9, GRANULE)
    ok(cu.cuCtxSynchronize())
    say(holds(va, 9, GRANULE))
