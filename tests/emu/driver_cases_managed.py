"""Managed memory: one address for the host and for kernels, advice, prefetches, variables."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_cases_link import linked
from tests.emu.driver_lib import (
    CALLER,
    MIB,
    PTX,
    R,
    case,
    download,
    function,
    launch_inc,
    libcuda,
    ok,
    refuses,
    start,
)

Attach, Advise, Modes, Pointer, Range, Where = (
    cu.CUmemAttach_flags,
    cu.CUmem_advise,
    cu.CUstreamCaptureMode,
    cu.CUpointer_attribute,
    cu.CUmem_range_attribute,
    cu.CUmemLocationType,
)
GLOBAL, HOST = Attach.CU_MEM_ATTACH_GLOBAL, Attach.CU_MEM_ATTACH_HOST
MANAGED = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_MANAGED
PINNED = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
PAGE = 4096
CPU, NONE = -1, -2  # CU_DEVICE_CPU, CU_DEVICE_INVALID
VARIABLE = PTX.rstrip(b"\0") + (
    b".visible .global .attribute(.managed) .align 4 .u32 both[2] = {7, 8};\n"
    b".visible .entry bump_both() { .reg .b32 %r<3>;\n"
    b"ld.global.u32 %r1, [both]; add.u32 %r2, %r1, 1; st.global.u32 [both], %r2; ret; }\0"
)


def managed(size: int, flags: Any = GLOBAL) -> int:
    return int(ok(cu.cuMemAllocManaged(size, flags)))


def words(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def location(kind: str, number: int = 0) -> Any:
    where = cu.CUmemLocation()
    where.type = getattr(Where, f"CU_MEM_LOCATION_TYPE_{kind}")
    where.id = number
    return where


def pool_made(kind: str, most: int = 0, type_of: Any = MANAGED) -> Any:
    """What the driver answers to the wish for a pool there, of so many bytes at most; 0: any."""
    props = cu.CUmemPoolProps()
    props.allocType = type_of
    props.location = location(kind)
    props.maxSize = most
    return cu.cuMemPoolCreate(props)


def managed_pool(kind: str = "DEVICE") -> Any:
    """A pool whose memory prefers to be in such a location."""
    return ok(pool_made(kind))


def from_pool(pool: Any, size: int, stream: Any = 0) -> int:
    return int(ok(cu.cuMemAllocFromPoolAsync(size, pool, stream)))


def given_in_a_capture(pool: Any) -> list[str]:
    """The answers to an allocation in a relaxed capture, and to the end of that."""
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(stream, Modes.CU_STREAM_CAPTURE_MODE_RELAXED))
    given = cu.cuMemAllocFromPoolAsync(4096, pool, stream)
    if given[0] == R.CUDA_SUCCESS:
        ok(cu.cuMemFreeAsync(given[1], stream))
    ended = cu.cuStreamEndCapture(stream)
    if ended[0] == R.CUDA_SUCCESS:
        ok(cu.cuGraphDestroy(ended[1]))
    ok(cu.cuStreamDestroy(stream))
    return [answer[0].name.removeprefix("CUDA_ERROR_") for answer in (given, ended)]


def told(name: str, address: int, size: int) -> int:
    """An attribute of a range that is one number."""
    value = ctypes.c_int(-99)
    key = getattr(Range, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    code = libcuda().cuMemRangeGetAttribute(
        ctypes.byref(value), ctypes.c_size_t(4), int(key), ctypes.c_uint64(address),
        ctypes.c_size_t(size),
    )  # fmt: skip
    assert code == 0, code
    return value.value


def accessed_by(address: int, size: int) -> list[int]:
    value = (ctypes.c_int * 3)()
    code = libcuda().cuMemRangeGetAttribute(
        value, ctypes.c_size_t(12), int(Range.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY),
        ctypes.c_uint64(address), ctypes.c_size_t(size),
    )  # fmt: skip
    assert code == 0, code
    return list(value)


def advise(name: str, address: int, size: int, where: Any = None) -> None:
    advice = getattr(Advise, f"CU_MEM_ADVISE_{name}")
    ok(cu.cuMemAdvise(address, size, advice, where or location("DEVICE")))


@case()
def the_host_and_kernels_see_each_other_write_managed_memory() -> None:
    start()
    inc = function(b"inc")
    held = []
    for size in (4096, 3 * MIB, 40 * MIB):
        for flags in (GLOBAL, HOST):
            data = managed(size, flags)
            held.append(data)
            end = data + size - 64 * 4
            for part in (data, end):
                words(part, 64)[:] = np.arange(64)
                ok(launch_inc(inc, part, 64))
            ok(cu.cuCtxSynchronize())
            assert (words(data, 64) == np.arange(64) + 1).all()
            words(end, 64)[:] += 1
            ok(launch_inc(inc, end, 64))
            ok(cu.cuCtxSynchronize())
            assert (words(end, 64) == np.arange(64) + 3).all()
            base, known = ok(cu.cuMemGetAddressRange(end))
            assert (int(base), known) == (data, size)
    for data in held:
        ok(cu.cuMemFree(data))
        refuses(cu.cuMemFree(data), "INVALID_VALUE")


@case()
def managed_memory_is_both_ends_of_copies_and_memsets() -> None:
    start()
    data, other, plain = managed(MIB), managed(MIB), int(ok(cu.cuMemAlloc(MIB)))
    ok(cu.cuMemsetD32(data, 3, MIB // 4))
    ok(cu.cuMemcpyDtoD(plain, data, MIB))
    ok(cu.cuMemcpyDtoH(other, plain, MIB))  # as host memory
    assert (words(other, MIB // 4) == 3).all()
    words(data, MIB // 4)[:] = 4
    ok(cu.cuMemcpyHtoD(plain, data, MIB))
    assert (download(plain, MIB // 4) == 4).all()
    words(data, MIB // 4)[:] = 5
    ok(cu.cuMemcpy(cu.CUdeviceptr(other), cu.CUdeviceptr(data), MIB))
    ok(cu.cuCtxSynchronize())  # what device memory is copied to is not waited for
    assert (words(other, MIB // 4) == 5).all()
    assert (download(data, MIB // 4) == 5).all()


@case()
def managed_pools_give_managed_memory_in_the_order_of_a_stream() -> None:
    start()
    inc, stream, size = function(b"inc"), ok(cu.cuStreamCreate(1)), 3 * MIB
    pool, other = managed_pool(), managed_pool("HOST")
    used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    reserved = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    data = from_pool(pool, size, stream)
    ok(cu.cuMemsetD32Async(data, 3, size // 4, stream))
    ok(cu.cuStreamSynchronize(stream))
    words(data, 64)[:] += 1
    ok(launch_inc(inc, data, 64))
    ok(cu.cuCtxSynchronize())
    assert (words(data, 64) == 5).all()
    assert (words(data + 256, size // 4 - 64) == 3).all()
    assert ok(cu.cuPointerGetAttribute(Pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED, data))
    owner = Pointer.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    assert int(ok(cu.cuPointerGetAttribute(owner, data))) == int(pool)
    assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) >= size
    assert int(ok(cu.cuMemPoolGetAttribute(pool, reserved))) == 32 * MIB
    assert from_pool(pool, 0, stream) == 0
    kept = from_pool(other, 4096, stream)
    ok(cu.cuMemPoolDestroy(other))
    words(kept, 1)[0] = 7  # memory of a pool that is gone stays until it is freed
    assert download(kept, 1)[0] == 7
    for address in (data, kept):
        ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) == 0


@case()
def a_managed_pool_has_any_location_and_no_limit() -> None:
    start()
    for kind in ("NONE", "DEVICE", "HOST", "HOST_NUMA", "HOST_NUMA_CURRENT"):
        for most in (MIB, 64 * MIB):
            refuses(pool_made(kind, most), "INVALID_VALUE")
        pool = managed_pool(kind)
        data = from_pool(pool, 4096)
        ok(cu.cuStreamSynchronize(0))
        words(data, 1)[0] = 9
        assert download(data, 1)[0] == 9
        ok(cu.cuMemFree(data))
        ok(cu.cuMemPoolDestroy(pool))


@case()
def a_pool_that_is_not_managed_has_a_place_and_any_limit() -> None:
    start()
    for most in (0, MIB, 64 * MIB):
        for kind in ("DEVICE", "HOST", "HOST_NUMA"):
            ok(cu.cuMemPoolDestroy(ok(pool_made(kind, most, PINNED))))
        for kind in ("NONE", "HOST_NUMA_CURRENT"):
            refuses(pool_made(kind, most, PINNED), "INVALID_VALUE")


@case()
def managed_pools_give_no_memory_beside_a_capture_that_is_not_relaxed() -> None:
    start()
    for kind in ("NONE", "DEVICE", "HOST", "HOST_NUMA", "HOST_NUMA_CURRENT"):
        pool = managed_pool(kind)
        captured, other = (ok(cu.cuStreamCreate(1)) for _ in range(2))
        ok(cu.cuStreamBeginCapture(captured, Modes.CU_STREAM_CAPTURE_MODE_GLOBAL))
        refuses(cu.cuMemAllocFromPoolAsync(4096, pool, other), "STREAM_CAPTURE_UNSUPPORTED")
        refuses(cu.cuMemAllocFromPoolAsync(4096, pool, captured), "STREAM_CAPTURE_INVALIDATED")
        refuses(cu.cuStreamEndCapture(captured), "STREAM_CAPTURE_INVALIDATED")
        ok(cu.cuStreamBeginCapture(captured, Modes.CU_STREAM_CAPTURE_MODE_RELAXED))
        ok(cu.cuMemFreeAsync(from_pool(pool, 4096, other), other))
        ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(captured))))
        ok(cu.cuStreamSynchronize(other))


@case()
def managed_pools_of_a_device_alone_give_memory_in_a_capture() -> None:
    start()
    plain = ok(cu.cuDeviceGetDefaultMemPool(0))  # the emulated device has no such nodes
    assert given_in_a_capture(managed_pool()) == given_in_a_capture(plain)
    for kind, why in (
        ("NONE", "INVALID_VALUE"),
        ("HOST", "NOT_SUPPORTED"),
        ("HOST_NUMA", "NOT_SUPPORTED"),
        ("HOST_NUMA_CURRENT", "INVALID_VALUE"),
    ):
        assert given_in_a_capture(managed_pool(kind)) == [why, "CUDA_SUCCESS"]


@case()
def a_location_has_a_managed_pool_of_its_own() -> None:
    start()
    where = location("DEVICE")
    own = ok(cu.cuMemGetDefaultMemPool(where, MANAGED))
    assert int(ok(cu.cuMemGetMemPool(where, MANAGED))) == int(own)
    refuses(cu.cuMemPoolDestroy(own), "INVALID_VALUE")
    plain = ok(cu.cuDeviceGetDefaultMemPool(0))
    assert int(ok(cu.cuMemGetDefaultMemPool(where, PINNED))) == int(plain) != int(own)
    data = from_pool(own, 4096)
    ok(cu.cuStreamSynchronize(0))
    words(data, 1)[0] = 9
    assert download(data, 1)[0] == 9
    ok(cu.cuMemFree(data))


@case()
def small_managed_memory_lies_close_together() -> None:
    start()
    one, next_to_it = managed(1), managed(4096)
    assert next_to_it - one == 512  # measured
    large = managed(3 * MIB)
    assert large % (2 * MIB) == 0
    ok(cu.cuMemFree(one))
    words(next_to_it, 2)[:] = (1, 2)
    assert list(download(next_to_it, 2)) == [1, 2]


@case()
def a_managed_pointer_says_what_it_is() -> None:
    context = start()
    data = managed(10_000)

    def is_(name: str, address: int = data + 40) -> Any:
        return ok(
            cu.cuPointerGetAttribute(getattr(Pointer, f"CU_POINTER_ATTRIBUTE_{name}"), address)
        )

    assert is_("IS_MANAGED")
    assert int(is_("MEMORY_TYPE")) == int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    assert int(is_("DEVICE_POINTER")) == data + 40
    assert int(is_("HOST_POINTER")) == data + 40
    assert int(is_("RANGE_START_ADDR")) == data
    assert int(is_("RANGE_SIZE")) == 10_000
    assert int(is_("CONTEXT")) == int(context)
    assert int(is_("DEVICE_ORDINAL")) == 0
    plain = int(ok(cu.cuMemAlloc(4096)))
    assert not is_("IS_MANAGED", plain)
    both = [Pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED, Pointer.CU_POINTER_ATTRIBUTE_HOST_POINTER]
    found = ok(cu.cuPointerGetAttributes(2, both, data))
    assert found[0] and int(found[1]) == data
    ok(cu.cuMemFree(data))
    refuses(
        cu.cuPointerGetAttribute(Pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED, data), "INVALID_VALUE"
    )


@case()
def the_device_tells_how_it_shares_memory() -> None:
    start()
    attribute = cu.CUdevice_attribute

    def has(name: str) -> int:
        key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(ok(cu.cuDeviceGetAttribute(key, 0)))

    assert has("MANAGED_MEMORY") == 1
    assert has("CONCURRENT_MANAGED_ACCESS") == 1
    assert has("PAGEABLE_MEMORY_ACCESS") == 0
    assert has("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES") == 0
    assert has("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST") == 0


@case()
def advice_is_told_of_the_pages_that_it_is_for() -> None:
    start()
    size = 40 * MIB
    data = managed(size)
    assert told("READ_MOSTLY", data, size) == 0
    assert told("PREFERRED_LOCATION", data, size) == NONE
    assert told("LAST_PREFETCH_LOCATION", data, size) == NONE
    assert accessed_by(data, size) == [NONE] * 3
    advise("SET_READ_MOSTLY", data, size)
    advise("SET_PREFERRED_LOCATION", data, 4 * MIB)
    advise("SET_ACCESSED_BY", data, size)
    advise("SET_ACCESSED_BY", data + 8 * MIB, MIB, location("HOST"))
    assert told("READ_MOSTLY", data, size) == 1
    assert told("PREFERRED_LOCATION", data, size) == NONE
    assert told("PREFERRED_LOCATION", data, 4 * MIB) == 0
    assert told("PREFERRED_LOCATION_TYPE", data, 4 * MIB) == int(location("DEVICE").type)
    assert told("PREFERRED_LOCATION_TYPE", data, size) == int(location("INVALID").type)
    assert accessed_by(data, size) == [0, NONE, NONE]
    assert sorted(accessed_by(data + 8 * MIB, MIB)) == [NONE, CPU, 0]
    advise("UNSET_READ_MOSTLY", data + MIB, PAGE)
    assert told("READ_MOSTLY", data, size) == 0
    assert told("READ_MOSTLY", data, MIB) == 1
    assert told("READ_MOSTLY", data + MIB + PAGE, MIB) == 1
    advise("UNSET_PREFERRED_LOCATION", data, size)
    assert told("PREFERRED_LOCATION", data, 4 * MIB) == NONE
    advise("SET_PREFERRED_LOCATION", data, size, location("HOST"))
    assert told("PREFERRED_LOCATION", data, size) == CPU
    advise("UNSET_ACCESSED_BY", data, size)
    assert accessed_by(data, size) == [NONE] * 3
    ok(cu.cuMemFree(data))
    again = managed(size)
    assert told("PREFERRED_LOCATION", again, size) == NONE


@case()
def prefetches_are_told_and_change_no_contents() -> None:
    start()
    size = 3 * MIB
    data, where = managed(size), ok(cu.cuStreamCreate(1))
    words(data, size // 4)[:] = np.arange(size // 4)
    for place, answer in ((location("DEVICE"), 0), (location("HOST"), CPU)):
        ok(cu.cuMemPrefetchAsync(data, size, place, 0, where))
        assert told("LAST_PREFETCH_LOCATION", data, size) == answer
        ok(cu.cuStreamSynchronize(where))
        ok(launch_inc(function(b"inc"), data, 1))
        ok(cu.cuCtxSynchronize())
    assert words(data, 1)[0] == 2
    assert (words(data, size // 4)[1:] == np.arange(size // 4)[1:]).all()
    ok(cu.cuMemPrefetchAsync(data, MIB, location("DEVICE"), 0, where))
    assert told("LAST_PREFETCH_LOCATION", data, size) == NONE
    assert told("LAST_PREFETCH_LOCATION", data, MIB) == 0
    ok(cu.cuStreamSynchronize(where))


@case()
def calls_of_before_there_were_locations_name_a_device() -> None:
    start()
    data = managed(MIB)
    library = libcuda()
    address, size = ctypes.c_uint64(data), ctypes.c_size_t(MIB)
    preferred = int(Advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION)
    for device in (CPU, 0):
        assert library.cuMemAdvise(address, size, preferred, device) == 0
        assert told("PREFERRED_LOCATION", data, MIB) == device
        assert library.cuMemPrefetchAsync(address, size, device, None) == 0
        assert told("LAST_PREFETCH_LOCATION", data, MIB) == device
    ok(cu.cuCtxSynchronize())
    nobody = int(R.CUDA_ERROR_INVALID_DEVICE)
    assert library.cuMemAdvise(address, size, preferred, 99) == nobody
    assert library.cuMemPrefetchAsync(address, size, 99, None) == nobody


@case()
def what_managed_memory_is_not_for_is_refused() -> None:
    start()
    refuses(cu.cuMemAllocManaged(0, GLOBAL), "INVALID_VALUE")
    refuses(cu.cuMemAllocManaged(4096, 0), "INVALID_VALUE")
    refuses(cu.cuMemAllocManaged(4096, 3), "INVALID_VALUE")
    refuses(cu.cuMemAllocManaged(4096, Attach.CU_MEM_ATTACH_SINGLE), "INVALID_VALUE")
    data, plain = managed(MIB), int(ok(cu.cuMemAlloc(MIB)))
    read_mostly = Advise.CU_MEM_ADVISE_SET_READ_MOSTLY
    refuses(cu.cuMemPrefetchAsync(plain, MIB, location("DEVICE"), 0, 0), "INVALID_VALUE")
    refuses(cu.cuMemAdvise(plain, MIB, read_mostly, location("DEVICE")), "INVALID_VALUE")
    refuses(cu.cuMemPrefetchAsync(data, 0, location("DEVICE"), 0, 0), "INVALID_VALUE")
    refuses(cu.cuMemPrefetchAsync(data, MIB, location("DEVICE"), 1, 0), "INVALID_VALUE")
    refuses(cu.cuMemPrefetchAsync(data, MIB, location("DEVICE", 99), 0, 0), "INVALID_DEVICE")
    value = ctypes.c_int()
    key = int(Range.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY)
    wrong = libcuda().cuMemRangeGetAttribute(
        ctypes.byref(value), ctypes.c_size_t(3), key, ctypes.c_uint64(data), ctypes.c_size_t(MIB)
    )
    assert wrong == int(R.CUDA_ERROR_INVALID_VALUE)
    refuses(cu.cuMemRangeGetAttribute(4, Range(key), plain, MIB), "INVALID_VALUE")


@case()
def managed_memory_is_attached_as_a_whole() -> None:
    start()
    data, plain, where = managed(MIB), int(ok(cu.cuMemAlloc(MIB))), ok(cu.cuStreamCreate(1))
    single = Attach.CU_MEM_ATTACH_SINGLE
    for flags in (single, GLOBAL, HOST):
        ok(cu.cuStreamAttachMemAsync(where, data, 0, flags))
        ok(cu.cuStreamAttachMemAsync(where, data, MIB, flags))
    refuses(cu.cuStreamAttachMemAsync(where, data, 4096, single), "INVALID_VALUE")
    refuses(cu.cuStreamAttachMemAsync(where, plain, 0, single), "INVALID_VALUE")
    refuses(cu.cuStreamAttachMemAsync(0, data, 0, single), "INVALID_VALUE")
    ok(cu.cuStreamSynchronize(where))
    ok(launch_inc(function(b"inc"), data, 4))
    ok(cu.cuCtxSynchronize())


@case()
def a_modules_managed_variable_has_one_address_for_all() -> None:
    start()
    for code in (VARIABLE, linked(VARIABLE)):
        module = ok(cu.cuModuleLoadData(code))
        address, size = ok(cu.cuModuleGetGlobal(module, b"both"))
        both = words(int(address), 2)
        assert size == 8 and list(both) == [7, 8]
        both[0] = 20
        bump = ok(cu.cuModuleGetFunction(module, b"bump_both"))
        ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuCtxSynchronize())
        assert list(both) == [21, 8]
        assert ok(cu.cuPointerGetAttribute(Pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED, address))
        refuses(cu.cuMemFree(address), "INVALID_VALUE")
        ok(cu.cuModuleUnload(module))


@case()
def a_librarys_managed_variable_is_asked_for_by_name() -> None:
    start()
    library = ok(cu.cuLibraryLoadData(VARIABLE, [], [], 0, [], [], 0))
    address, size = ok(cu.cuLibraryGetManaged(library, b"both"))
    assert size == 8 and list(words(int(address), 2)) == [7, 8]
    refuses(cu.cuLibraryGetManaged(library, b"counter"), "NOT_FOUND")
    refuses(cu.cuLibraryGetManaged(library, b"nothing"), "NOT_FOUND")
    bump = ok(cu.cuLibraryGetKernel(library, b"bump_both"))
    ok(cu.cuLaunchKernel(cu.CUfunction(int(bump)), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    ok(cu.cuCtxSynchronize())
    assert list(words(int(address), 2)) == [8, 8]
    ok(cu.cuLibraryUnload(library))


@case()
def a_librarys_managed_variable_outlives_contexts() -> None:
    ok(cu.cuInit(0))
    context = ok(cu.cuCtxCreate(None, 0, 0))
    library = ok(cu.cuLibraryLoadData(VARIABLE, [], [], 0, [], [], 0))
    bump = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"bump_both"))))
    address = int(ok(cu.cuLibraryGetManaged(library, b"both"))[0])
    for count in (50, 60):
        words(address, 1)[0] = count
        ok(cu.cuCtxDestroy(context))
        assert words(address, 1)[0] == count
        words(address, 1)[0] += 5
        context = ok(cu.cuCtxCreate(None, 0, 0))
        assert int(ok(cu.cuLibraryGetManaged(library, b"both"))[0]) == address
        ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuCtxSynchronize())
        assert list(words(address, 2)) == [count + 6, 8]
    ok(cu.cuLibraryUnload(library))


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in maps]
    return any(begin <= address < end for begin, end in ranges)


@case()
def a_forked_child_has_no_managed_memory() -> None:
    start()
    data = managed(3 * MIB)
    words(data, 1)[0] = 1
    assert is_mapped(data)
    child = os.fork()
    if child == 0:
        os._exit(int(is_mapped(data)))
    assert os.waitpid(child, 0)[1] == 0
    assert words(data, 1)[0] == 1


@case()
def managed_memory_ends_with_its_context() -> None:
    ok(cu.cuInit(0))
    context = ok(cu.cuCtxCreate(None, 0, 0))
    data = managed(40 * MIB)
    words(data, 1)[0] = 1
    ok(cu.cuCtxDestroy(context))
    start()
    refuses(
        cu.cuPointerGetAttribute(Pointer.CU_POINTER_ATTRIBUTE_IS_MANAGED, data), "INVALID_VALUE"
    )


@case()
def a_process_with_managed_memory_is_not_checkpointed_and_runs_on() -> None:
    start()
    data = managed(MIB)
    words(data, 1)[0] = 5

    def call(verb: str, *more: str) -> str:
        command = [sys.executable, "-c", CALLER, verb, str(os.getpid()), *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert call("Lock", "5000") == "CUDA_SUCCESS"
    assert call("Checkpoint") == "CUDA_ERROR_NOT_SUPPORTED"
    assert call("Unlock") == "CUDA_SUCCESS"
    ok(launch_inc(function(b"inc"), data, 1))
    ok(cu.cuCtxSynchronize())
    assert words(data, 1)[0] == 6
    ok(cu.cuMemFree(data))
    assert call("Lock", "5000") == "CUDA_SUCCESS"
    assert call("Checkpoint") == "CUDA_ERROR_UNKNOWN"  # measured: for good
    assert call("Unlock") == "CUDA_SUCCESS"
    ok(cu.cuMemFree(managed(MIB)))


@case(emulated=True, MEMORY="64M", CONTEXT="2M")
def managed_memory_takes_the_devices_only_where_it_is_free() -> None:
    start()
    free, _ = ok(cu.cuMemGetInfo())
    data = managed(128 * MIB)  # more than the device has
    assert ok(cu.cuMemGetInfo())[0] == free
    ok(cu.cuMemPrefetchAsync(data, 16 * MIB, location("DEVICE"), 0, 0))
    ok(cu.cuCtxSynchronize())
    assert ok(cu.cuMemGetInfo())[0] == free - 16 * MIB
    ok(cu.cuMemPrefetchAsync(data, 128 * MIB, location("DEVICE"), 0, 0))
    ok(cu.cuCtxSynchronize())
    assert ok(cu.cuMemGetInfo())[0] == 0
    plain = int(ok(cu.cuMemAlloc(32 * MIB)))  # drives it out
    ok(cu.cuMemPrefetchAsync(data, 128 * MIB, location("HOST"), 0, 0))
    ok(cu.cuCtxSynchronize())
    assert ok(cu.cuMemGetInfo())[0] == free - 32 * MIB
    ok(cu.cuMemPrefetchAsync(data, MIB, location("DEVICE"), 0, 0))
    ok(cu.cuMemFree(data))
    ok(cu.cuMemFree(plain))
    assert ok(cu.cuMemGetInfo())[0] == free


@case(emulated=True)
def a_managed_region_is_reserved_whole_and_goes_with_its_last_memory() -> None:
    start()
    large = managed(33 * MIB)
    assert large % (32 * MIB) == 0 and is_mapped(large + 63 * MIB)
    inside = managed(4096)
    ok(cu.cuMemFree(large))
    with open("/proc/self/maps") as maps:
        names = [line for line in maps if "flowgpu-emu-device:managed" in line]
    assert len(names) == 1 and " rw-s " in names[0]
    ok(cu.cuMemFree(inside))
    assert not is_mapped(large) and not is_mapped(inside)


@case(emulated=True)
def a_managed_mapping_is_of_a_descriptor_of_the_drivers_at_its_own_address() -> None:
    start()
    data = managed(3 * MIB)
    words(data, 2)[:] = (3, 4)
    with open("/proc/self/maps") as maps:
        (line,) = (line for line in maps if line.startswith(f"{data:x}-"))
    assert line.split()[1:3] == ["rw-s", f"{data:08x}"]
    (fd,) = managed_files()
    # What lies there may be taken away, and put back by the same descriptor.
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    place, size = ctypes.c_void_p(data), ctypes.c_size_t(3 * MIB)
    fixed, shared, mine, anonymous = 0x10, 1, 2, 0x20
    for flags, file, at in ((mine | anonymous, -1, 0), (shared, fd, data)):
        found = library.mmap(place, size, 3, fixed | flags, file, ctypes.c_long(at))
        assert found == data
    words(data, 2)[:] += 1
    ok(launch_inc(function(b"inc"), data, 2))
    ok(cu.cuCtxSynchronize())
    assert list(words(data, 2)) == [5, 6]
    ok(cu.cuMemFree(data))
    assert managed_files() == []
    assert words(managed(3 * MIB), 1)[0] == 0  # nothing is left of it


def managed_files() -> list[int]:
    links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return [
        fd
        for fd, path in links.items()
        if os.path.islink(path) and "flowgpu-emu-device:managed" in os.readlink(path)
    ]
