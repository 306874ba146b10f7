"""Memory: allocations, copies, host memory, virtual memory management, several devices."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    R,
    allow,
    case,
    download,
    fd_kind,
    function,
    launch_inc,
    ok,
    pool_properties,
    properties,
    refuses,
    start,
)


@case()
def allocations_answer_like_the_driver() -> None:
    start()
    small = [int(ok(cu.cuMemAlloc(1))) for _ in range(2)]
    assert abs(small[0] - small[1]) == 512
    base, size = ok(cu.cuMemGetAddressRange(small[0]))
    assert (int(base), size) == (small[0], 1)
    odd = int(ok(cu.cuMemAlloc(300 * 1024)))
    assert ok(cu.cuMemGetAddressRange(odd + 1000))[1] == 307200
    large = int(ok(cu.cuMemAlloc(5 * MIB + 3)))
    assert ok(cu.cuMemGetAddressRange(large + MIB))[1] == 5 * MIB + 3
    attribute = cu.CUpointer_attribute
    assert ok(cu.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, odd)) == 0
    for pointer in (*small, odd, large):
        ok(cu.cuMemFree(pointer))
    refuses(cu.cuMemFree(large), "INVALID_VALUE")
    ok(cu.cuMemFree(0))
    refuses(cu.cuMemAlloc(0), "INVALID_VALUE")
    address, pitch = ok(cu.cuMemAllocPitch(100, 10, 4))
    assert pitch >= 100 and pitch % 4 == 0
    ok(cu.cuMemFree(address))


@case(emulated=True, MEMORY="64M", CONTEXT="2M")
def memory_runs_out_where_it_is_configured() -> None:
    start()
    free, total = ok(cu.cuMemGetInfo())
    assert total == 64 * MIB and free <= total
    held = []
    while (result := cu.cuMemAlloc(8 * MIB))[0] == R.CUDA_SUCCESS:
        held.append(result[1])
    refuses(result, "OUT_OF_MEMORY")
    assert len(held) == free // (8 * MIB)
    refuses(cu.cuMemCreate(64 * MIB, properties(), 0), "OUT_OF_MEMORY")
    refuses(cu.cuMemAlloc(1 << 60), "OUT_OF_MEMORY")
    ok(cu.cuMemFree(held.pop()))
    assert ok(cu.cuMemGetInfo())[0] == free - len(held) * 8 * MIB
    for pointer in (*held, ok(cu.cuMemAlloc(8 * MIB))):
        ok(cu.cuMemsetD8(pointer, 1, MIB))
        ok(cu.cuMemFree(pointer))
    assert ok(cu.cuMemGetInfo())[0] == free


@case()
def copies_and_memsets_of_every_kind() -> None:
    start()
    count = 3 * MIB // 4 + 5
    source = np.arange(count, dtype=np.uint32)
    a, b = (int(ok(cu.cuMemAlloc(source.nbytes))) for _ in range(2))
    ok(cu.cuMemcpyHtoD(a, source.ctypes.data, source.nbytes))
    ok(cu.cuMemcpyDtoD(b, a, source.nbytes))
    assert (download(b, count) == source).all()
    ok(cu.cuMemsetD32(a, 0xDEADBEEF, count))
    ok(cu.cuMemsetD16(a, 0x1234, 3))
    ok(cu.cuMemsetD8(a + 8, 0x77, 1))
    assert [hex(v) for v in download(a, 4)] == ["0x12341234", "0xdead1234", "0xdeadbe77",
                                               "0xdeadbeef"]  # fmt: skip
    stream = ok(cu.cuStreamCreate(1))
    ok(cu.cuMemcpyHtoDAsync(a, source.ctypes.data, source.nbytes, stream))
    ok(cu.cuMemsetD32Async(a, 9, 1, stream))
    ok(cu.cuMemcpyDtoDAsync(b, a, source.nbytes, stream))
    out = np.zeros_like(source)
    ok(cu.cuMemcpyDtoHAsync(out.ctypes.data, b, out.nbytes, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert out[0] == 9 and (out[1:] == source[1:]).all()
    ok(cu.cuMemcpy(cu.CUdeviceptr(out.ctypes.data), cu.CUdeviceptr(a), 8))
    ok(cu.cuMemcpy(b, cu.CUdeviceptr(source.ctypes.data), 8))
    assert (download(b, 2) == [0, 1]).all()
    refuses(cu.cuMemcpyDtoH(out.ctypes.data, a, source.nbytes + 1), "INVALID_VALUE")
    refuses(cu.cuMemsetD8(a + source.nbytes, 0, 1), "INVALID_VALUE")


def host_memory(size: int) -> Iterator[tuple[str, int]]:
    """Host memory that a device may write: made by the driver, and registered with it."""
    yield "allocated", int(ok(cu.cuMemAllocHost(size)))
    yield "allocated for all", int(ok(cu.cuMemHostAlloc(size, cu.CU_MEMHOSTALLOC_PORTABLE)))
    pages = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ok(cu.cuMemHostRegister(address, size, 0))
    yield "registered", address
    ok(cu.cuMemHostUnregister(address))


@case()
def memsets_write_host_memory_of_the_driver() -> None:
    start()
    size = 2 * MIB + 4096
    stream = ok(cu.cuStreamCreate(1))
    for kind, address in host_memory(size):
        seen = np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
        # Nothing waits for these: the call does.
        ok(cu.cuMemsetD8(address, 0x11, size))
        assert (seen == 0x11).all(), kind
        ok(cu.cuMemsetD16(address + 2, 0x2233, 3))
        assert seen[:10].tobytes().hex() == "1111" + 3 * "3322" + "1111", kind
        ok(cu.cuMemsetD32(address + MIB, 0x44556677, 1))
        assert seen[MIB - 1 : MIB + 5].tobytes().hex() == "117766554411", kind
        ok(cu.cuMemsetD2D8(address, 64, 0x88, 3, 2))
        assert seen[:3].tolist() == seen[64:67].tolist() == [0x88] * 3 and seen[67] == 0x11, kind
        ok(cu.cuMemsetD32Async(address, 0x99999999, size // 4, stream))
        ok(cu.cuMemsetD8Async(address + 1, 0xAA, 1, stream))
        ok(cu.cuStreamSynchronize(stream))
        assert seen[1] == 0xAA and seen[0] == 0x99 and (seen[2:] == 0x99).all(), kind


@case(emulated=True)
def memsets_refuse_host_memory_that_is_not_the_driver_s() -> None:
    start()
    pages = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    refuses(cu.cuMemsetD8(address, 1, 1), "INVALID_VALUE")
    ok(cu.cuMemHostRegister(address, 4096, 0))
    ok(cu.cuMemsetD8(address, 1, 4096))
    assert pages[:4097] == b"\1" * 4096 + b"\0"
    refuses(cu.cuMemsetD8(address, 1, 4097), "INVALID_VALUE")
    refuses(cu.cuMemsetD2D8(address, 4096, 1, 1, 2), "INVALID_VALUE")
    ok(cu.cuMemHostUnregister(address))
    refuses(cu.cuMemsetD8(address, 1, 1), "INVALID_VALUE")


@case()
def copies_of_rectangles() -> None:
    start()
    source = np.arange(64, dtype=np.uint8).reshape(8, 8)
    device = int(ok(cu.cuMemAlloc(8 * 16)))
    ok(cu.cuMemsetD2D8(device, 16, 0xEE, 16, 8))
    up = cu.CUDA_MEMCPY2D()
    up.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    up.srcHost = source.ctypes.data
    up.srcPitch, up.srcXInBytes, up.srcY = 8, 2, 1
    up.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    up.dstDevice, up.dstPitch, up.dstXInBytes = device, 16, 3
    up.WidthInBytes, up.Height = 4, 5
    ok(cu.cuMemcpy2D(up))
    want = np.full((8, 16), 0xEE, np.uint8)
    want[0:5, 3:7] = source[1:6, 2:6]
    assert (download(device, 128, np.uint8).reshape(8, 16) == want).all()
    up.Height = 9
    refuses(cu.cuMemcpy2D(up), "INVALID_VALUE")


@case()
def pinned_host_memory_copies_and_answers() -> None:
    start()
    host = ok(cu.cuMemHostAlloc(MIB, 0))
    view = np.ctypeslib.as_array((ctypes.c_uint32 * (MIB // 4)).from_address(int(host)))
    view[:] = np.arange(MIB // 4)
    device = int(ok(cu.cuMemAlloc(MIB)))
    ok(cu.cuMemcpyHtoDAsync(device, int(host), MIB, 0))
    ok(cu.cuCtxSynchronize())
    assert (download(device, MIB // 4) == view).all()
    kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    found = ok(cu.cuPointerGetAttribute(kind, int(host)))
    assert int(found) == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST)
    ok(cu.cuMemFreeHost(int(host)))
    own = np.zeros(1 << 16, np.uint8)
    ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    refuses(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0), "HOST_MEMORY_ALREADY_REGISTERED")
    ok(cu.cuMemHostUnregister(own.ctypes.data))
    refuses(cu.cuMemHostUnregister(own.ctypes.data), "HOST_MEMORY_NOT_REGISTERED")


@case()
def a_registration_stands_when_its_memory_is_gone() -> None:
    start()
    size = 1 << 16
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t

    def registered() -> int:
        nowhere, offset = ctypes.c_void_p(), ctypes.c_long()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = int(libc.mmap(nowhere, ctypes.c_size_t(size), 3, flags, -1, offset))
        ok(cu.cuMemHostRegister(address, size, 0))
        return address

    closed, unmapped = registered(), registered()
    flags = ok(cu.cuMemHostGetFlags(unmapped))
    assert libc.mprotect(ctypes.c_void_p(closed), ctypes.c_size_t(size), 0) == 0
    assert libc.munmap(ctypes.c_void_p(unmapped), ctypes.c_size_t(size)) == 0
    kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    for address in (unmapped, closed):
        assert ok(cu.cuMemHostGetFlags(address)) == flags
        assert int(ok(cu.cuPointerGetAttribute(kind, address))) == 1
        refuses(cu.cuMemHostRegister(address, size, 0), "HOST_MEMORY_ALREADY_REGISTERED")
        ok(cu.cuMemHostUnregister(address))
        refuses(cu.cuMemHostUnregister(address), "HOST_MEMORY_NOT_REGISTERED")
    assert cu.cuMemHostRegister(closed, size, 0)[0] != R.CUDA_SUCCESS


@case()
def shared_pages_of_a_file_are_registered_for_reading_or_in_memory() -> None:
    start()
    size = 1 << 16

    def mapped(folder: str, flags: int) -> int:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size))
            file.flush()
            pages = mmap.mmap(file.fileno(), size, flags)
        kept.append(pages)
        return ctypes.addressof(ctypes.c_char.from_buffer(pages))

    kept: list[mmap.mmap] = []
    for_reading = cu.CU_MEMHOSTREGISTER_READ_ONLY
    disk = os.getcwd()
    on_disk = subprocess.check_output(["stat", "-f", "-c", "%T", disk], text=True) != "tmpfs\n"
    shared = mapped(disk, mmap.MAP_SHARED)
    if on_disk:
        refuses(cu.cuMemHostRegister(shared, size, 0), "INVALID_VALUE")
    ok(cu.cuMemHostRegister(shared, size, for_reading))
    for address in (mapped(disk, mmap.MAP_PRIVATE), mapped("/dev/shm", mmap.MAP_SHARED)):
        ok(cu.cuMemHostRegister(address, size, 0))


@case(emulated=True)
def device_pointers_cannot_be_followed_on_the_host() -> None:
    start()
    device = int(ok(cu.cuMemAlloc(4 * MIB)))
    child = os.fork()
    if child == 0:
        ctypes.c_uint32.from_address(device).value = 1
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 11, status


@case()
def reservations_honour_their_hint() -> None:
    start()
    window, size = 0x2000_0000_0000, 16 << 40
    began = time.monotonic()
    assert int(ok(cu.cuMemAddressReserve(size, 0, window, 0))) == window
    assert time.monotonic() - began < 1
    elsewhere = int(ok(cu.cuMemAddressReserve(GRANULE, 0, window, 0)))
    assert not window <= elsewhere < window + size
    # The wish of a small one is not fulfilled.
    piece = window - (1 << 30)
    assert int(ok(cu.cuMemAddressReserve(GRANULE, 0, piece, 0))) != piece
    assert int(ok(cu.cuMemAddressReserve(32 * MIB, 0, piece, 0))) == piece
    refuses(cu.cuMemAddressReserve(GRANULE + 1, 0, 0, 0), "INVALID_VALUE")
    refuses(cu.cuMemAddressReserve(GRANULE, 3, 0, 0), "INVALID_VALUE")
    aligned = int(ok(cu.cuMemAddressReserve(GRANULE, 64 * MIB, 0, 0)))
    assert aligned % (64 * MIB) == 0
    refuses(cu.cuMemAddressFree(window, GRANULE), "INVALID_VALUE")
    ok(cu.cuMemAddressFree(window, size))


@case()
def mappings_are_strict() -> None:
    start()
    granularity = ok(cu.cuMemGetAllocationGranularity(
        properties(), cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    ))  # fmt: skip
    assert granularity == GRANULE
    refuses(cu.cuMemCreate(GRANULE + 4096, properties(), 0), "INVALID_VALUE")
    va = int(ok(cu.cuMemAddressReserve(4 * GRANULE, 0, 0, 0)))
    memory = ok(cu.cuMemCreate(2 * GRANULE, properties(), 0))
    refuses(cu.cuMemMap(va + 4096, 2 * GRANULE, 0, memory, 0), "INVALID_VALUE")
    for size, offset in ((GRANULE, 0), (GRANULE, GRANULE), (4 * GRANULE, 0)):
        refuses(cu.cuMemMap(va, size, offset, memory, 0), "NOT_SUPPORTED")
    refuses(allow(va, 2 * GRANULE), "INVALID_VALUE")
    ok(cu.cuMemMap(va, 2 * GRANULE, 0, memory, 0))
    refuses(cu.cuMemMap(va + GRANULE, 2 * GRANULE, 0, memory, 0), "INVALID_VALUE")
    refuses(cu.cuMemsetD32(va, 1, 4), "INVALID_VALUE")  # no access was given yet
    ok(allow(va, 2 * GRANULE))
    ok(cu.cuMemsetD32(va, 1, GRANULE // 2))
    ok(cu.cuCtxSynchronize())
    refuses(cu.cuMemAddressFree(va, 4 * GRANULE), "INVALID_VALUE")
    refuses(cu.cuMemUnmap(va, GRANULE), "INVALID_VALUE")
    retained = ok(cu.cuMemRetainAllocationHandle(va + 100))
    assert int(retained) == int(memory)
    ok(cu.cuMemRelease(memory))
    ok(cu.cuMemRelease(retained))
    # The very same handle comes back as long as there is a mapping.
    assert int(ok(cu.cuMemRetainAllocationHandle(va))) == int(memory)
    ok(cu.cuMemRelease(memory))
    assert download(va, 2)[0] == 1  # the mapping keeps the memory
    ok(cu.cuMemUnmap(va, 2 * GRANULE))
    ok(cu.cuMemAddressFree(va, 4 * GRANULE))
    refuses(cu.cuMemsetD32(va, 1, 4), "INVALID_VALUE")


@case()
def a_kernel_finds_nothing_where_memory_was_unmapped() -> None:
    start()
    va = int(ok(cu.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    ok(cu.cuMemMap(va, GRANULE, 0, memory, 0))
    ok(allow(va, GRANULE))
    kernel = function(b"inc")
    ok(launch_inc(kernel, va, 16))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemUnmap(va, GRANULE))
    ok(launch_inc(kernel, va, 16))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    refuses(cu.cuMemAlloc(4), "ILLEGAL_ADDRESS")


@case()
def neighbouring_mappings_copy_as_one() -> None:
    start()
    va = int(ok(cu.cuMemAddressReserve(4 * GRANULE, 0, 0, 0)))
    for i in range(4):
        memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
        ok(cu.cuMemMap(va + i * GRANULE, GRANULE, 0, memory, 0))
        ok(cu.cuMemRelease(memory))
    ok(allow(va, 4 * GRANULE))
    source = np.arange(GRANULE, dtype=np.uint32)
    ok(cu.cuMemcpyHtoD(va, source.ctypes.data, source.nbytes))
    assert (download(va, GRANULE) == source).all()
    ok(cu.cuMemUnmap(va, 4 * GRANULE))


@case()
def an_import_shares_memory_and_cannot_be_exported() -> None:
    start()
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    fd = ok(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0))
    imported = ok(cu.cuMemImportFromShareableHandle(int(fd), fd_kind()))
    refuses(cu.cuMemExportToShareableHandle(imported, fd_kind(), 0), "INVALID_VALUE")
    va = int(ok(cu.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    ok(cu.cuMemMap(va, GRANULE, 0, memory, 0))
    ok(cu.cuMemMap(va + GRANULE, GRANULE, 0, imported, 0))
    ok(allow(va, 2 * GRANULE))
    ok(cu.cuMemsetD32(va, 77, GRANULE // 4))
    assert download(va + GRANULE, 1)[0] == 77
    private = ok(cu.cuMemCreate(GRANULE, properties(exportable=False), 0))
    assert cu.cuMemExportToShareableHandle(private, fd_kind(), 0)[0] != R.CUDA_SUCCESS
    with open(os.devnull) as stranger:
        refuses(cu.cuMemImportFromShareableHandle(stranger.fileno(), fd_kind()), "UNKNOWN")


@case(emulated=True, MEMORY="128M", CONTEXT="40M")
def a_context_takes_device_memory_until_it_ends() -> None:
    start()
    device = ok(cu.cuDeviceGet(0))
    assert ok(cu.cuMemGetInfo()) == (88 * MIB, 128 * MIB)
    second = ok(cu.cuCtxCreate(None, 0, 0))
    third = ok(cu.cuCtxCreate(None, 0, 0))
    refuses(cu.cuCtxCreate(None, 0, 0), "OUT_OF_MEMORY")
    refuses(cu.cuMemAlloc(10 * MIB), "OUT_OF_MEMORY")
    ok(cu.cuCtxDestroy(third))
    ok(cu.cuCtxDestroy(second))
    assert ok(cu.cuMemGetInfo())[0] == 88 * MIB
    held = ok(cu.cuMemCreate(60 * MIB, properties(), 0))
    ok(cu.cuDevicePrimaryCtxReset(device))
    memory = ok(cu.cuMemCreate(60 * MIB, properties(), 0))
    refuses(cu.cuDevicePrimaryCtxRetain(device), "OUT_OF_MEMORY")
    ok(cu.cuMemRelease(memory))
    ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuMemRelease(held))


@case(emulated=True, MEMORY="34M", CONTEXT="2M")
def exported_memory_counts_until_its_last_holder_is_gone() -> None:
    start()
    before = ok(cu.cuMemGetInfo())[0]
    memory = ok(cu.cuMemCreate(16 * MIB, properties(), 0))
    fd = int(ok(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0)))
    ok(cu.cuMemRelease(memory))
    assert ok(cu.cuMemGetInfo())[0] == before - 16 * MIB
    refuses(cu.cuMemCreate(32 * MIB, properties(), 0), "OUT_OF_MEMORY")
    again = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))
    assert ok(cu.cuMemGetInfo())[0] == before - 16 * MIB
    ok(cu.cuMemRelease(again))
    os.close(fd)
    ok(cu.cuMemCreate(32 * MIB, properties(), 0))


@case(emulated=True)
def one_byte_past_an_allocation_is_illegal() -> None:
    start()
    inc = function(b"inc")
    data = int(ok(cu.cuMemAlloc(4 * 63)))
    ok(launch_inc(inc, data, 64))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")


@case(emulated=True)
def reading_is_not_writing() -> None:
    start()
    inc = function(b"inc")
    va = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    ok(cu.cuMemMap(va, GRANULE, 0, memory, 0))
    ok(allow(va, GRANULE, "READ"))
    assert download(va, 1)[0] == 0
    refuses(cu.cuMemsetD32(va, 1, 1), "INVALID_VALUE")
    ok(launch_inc(inc, va, 1))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")


@case(emulated=True, DEVICES="2", PEERS="0")
def devices_without_a_link_are_refused_each_others_memory() -> None:
    start(0)
    other = ok(cu.cuDevicePrimaryCtxRetain(1))
    assert ok(cu.cuDeviceCanAccessPeer(0, 1)) == 0
    attribute = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
    assert ok(cu.cuDeviceGetP2PAttribute(attribute, 0, 1)) == 0
    refuses(cu.cuDeviceCanAccessPeer(0, 2), "INVALID_DEVICE")
    refuses(cu.cuCtxEnablePeerAccess(other, 0), "PEER_ACCESS_UNSUPPORTED")
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    at = int(ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0)))
    ok(cu.cuMemMap(at, GRANULE, 0, handle, 0))
    ok(allow(at, GRANULE))
    refuses(allow(at, GRANULE, device=1), "INVALID_DEVICE")


@case(emulated=True, DEVICES="2")
def devices_see_each_other_only_when_allowed() -> None:
    start(0)
    other = ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxPushCurrent(other))
    remote = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(remote, 4, 1))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuCtxPopCurrent())
    inc = function(b"inc")
    assert ok(cu.cuDeviceCanAccessPeer(0, 1)) == 1
    ok(cu.cuCtxEnablePeerAccess(other, 0))
    refuses(cu.cuCtxEnablePeerAccess(other, 0), "PEER_ACCESS_ALREADY_ENABLED")
    ok(launch_inc(inc, remote, 1))
    ok(cu.cuCtxSynchronize())
    assert download(remote, 1)[0] == 5
    ok(cu.cuCtxDisablePeerAccess(other))
    local = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemcpyPeer(local, ok(cu.cuCtxGetCurrent()), remote, other, 4))
    assert download(local, 1)[0] == 5
    ok(launch_inc(inc, remote, 1))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")


@case()
def stream_ordered_allocations() -> None:
    start()
    stream = ok(cu.cuStreamCreate(1))
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    assert int(ok(cu.cuDeviceGetMemPool(0))) == int(pool)
    data = int(ok(cu.cuMemAllocAsync(4 * MIB, stream)))
    ok(cu.cuMemsetD32Async(data, 3, MIB, stream))
    out = np.zeros(MIB, np.uint32)
    ok(cu.cuMemcpyDtoHAsync(out.ctypes.data, data, out.nbytes, stream))
    ok(cu.cuMemFreeAsync(data, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert (out == 3).all()
    assert cu.cuMemFree(data)[0] != R.CUDA_SUCCESS
    for nothing in (cu.cuMemAllocAsync(0, stream), cu.cuMemAllocFromPoolAsync(0, pool, stream)):
        assert int(ok(nothing)) == 0
    ok(cu.cuMemFreeAsync(0, stream))


@case()
def pools_of_the_program() -> None:
    start()
    stream = ok(cu.cuStreamCreate(1))
    pool = ok(cu.cuMemPoolCreate(pool_properties()))
    default = ok(cu.cuDeviceGetDefaultMemPool(0))
    used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    owner = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE

    data = int(ok(cu.cuMemAllocFromPoolAsync(4 * MIB, pool, stream)))
    ok(cu.cuMemsetD32Async(data, 3, MIB, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert int(ok(cu.cuPointerGetAttribute(owner, data))) == int(pool)
    assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) == 4 * MIB
    assert int(ok(cu.cuMemPoolGetAttribute(default, used))) == 0
    ok(cu.cuDeviceSetMemPool(0, pool))
    more = int(ok(cu.cuMemAllocAsync(2 * MIB, stream)))
    assert int(ok(cu.cuPointerGetAttribute(owner, more))) == int(pool)
    refuses(cu.cuMemPoolDestroy(default), "INVALID_VALUE")
    ok(cu.cuMemPoolDestroy(pool))
    assert int(ok(cu.cuDeviceGetMemPool(0))) == int(default)
    assert (download(data, MIB) == 3).all()  # memory of a pool that is gone stays until it is freed
    for address in (data, more):
        ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))
