"""Programs that check a CUDA driver through its API; each case is one fresh process.

    python -m tests.emu.driver_cases CASE

They say what a driver does, so the same bodies run on the emulated one and on a real one. A case
marked `emulated` checks something that only the emulated driver promises: a configured size, a
stricter refusal, a log.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

MIB = 1 << 20
GRANULE = 2 * MIB
R = cu.CUresult

HEAD = ".version 7.0\n.target sm_70\n.address_size 64\n"
PTX = (
    HEAD
    + """
.visible .global .align 4 .u32 counter = 5;
.visible .const .align 4 .u32 table[2] = {11, 22};
.visible .entry inc(.param .u64 p, .param .u32 n) {
    .reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1; @%p ret;
    mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r6, [%rd3]; add.u32 %r6, %r6, 1; st.global.u32 [%rd3], %r6; ret;
}
.visible .entry wait_for(.param .u64 flag) {
    .reg .b64 %rd<2>; .reg .b32 %r<2>; .reg .pred %p;
    ld.param.u64 %rd1, [flag];
again: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p, %r1, 0; @%p bra again; ret;
}
.visible .entry bump() {
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [counter]; add.u32 %r2, %r1, 1; st.global.u32 [counter], %r2; ret;
}
"""
).encode() + b"\0"


@dataclass(frozen=True)
class Case:
    run: Callable[[], None]
    emulated: bool = False
    environment: dict[str, str] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(
    *, emulated: bool = False, **environment: str
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a body; `environment` configures the emulated device, without FLOWGPU_EMU_."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        settings = {f"FLOWGPU_EMU_{key}": value for key, value in environment.items()}
        CASES[body.__name__] = Case(body, emulated, settings)
        return body

    return register


def ok(result: tuple[Any, ...]) -> Any:
    assert result[0] == R.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


def refuses(result: tuple[Any, ...], code: str) -> None:
    assert result[0].name == f"CUDA_ERROR_{code}", result[0]


def start(device: int = 0) -> Any:
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(device))))
    ok(cu.cuCtxSetCurrent(context))
    return context


def function(name: bytes, ptx: bytes = PTX) -> Any:
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), name))


def launch(kernel: Any, values: tuple[Any, ...], types: tuple[Any, ...], stream: Any = 0) -> Any:
    return cu.cuLaunchKernel(kernel, 4, 1, 1, 64, 1, 1, 0, stream, (values, types), 0)


def launch_inc(kernel: Any, address: int, count: int, stream: Any = 0) -> Any:
    return launch(kernel, (int(address), count), (ctypes.c_uint64, ctypes.c_uint32), stream)


def launch_wait(kernel: Any, flag: int, stream: Any) -> Any:
    return cu.cuLaunchKernel(
        kernel, 1, 1, 1, 1, 1, 1, 0, stream, ((int(flag),), (ctypes.c_uint64,)), 0
    )


def download(address: int, count: int, kind: Any = np.uint32) -> Any:
    out = np.zeros(count, kind)
    ok(cu.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
    return out


def properties(device: int = 0, exportable: bool = True) -> Any:
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    kinds = cu.CUmemAllocationHandleType
    prop.requestedHandleTypes = (
        kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if exportable
        else kinds.CU_MEM_HANDLE_TYPE_NONE
    )
    return prop


def allow(address: int, size: int, mode: str = "READWRITE", device: int = 0) -> Any:
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = getattr(cu.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{mode}")
    return cu.cuMemSetAccess(address, size, [access], 1)


def fd_kind() -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@case()
def nothing_works_before_init() -> None:
    refuses(cu.cuDeviceGetCount(), "NOT_INITIALIZED")
    refuses(cu.cuMemAlloc(4), "NOT_INITIALIZED")
    assert ok(cu.cuDriverGetVersion()) >= 12000
    refuses(cu.cuInit(1), "INVALID_VALUE")
    ok(cu.cuInit(0))
    ok(cu.cuInit(0))


@case(emulated=True, DEVICES="3", MEMORY="64M", NAME="a name")
def devices_are_as_configured() -> None:
    ok(cu.cuInit(0))
    assert ok(cu.cuDeviceGetCount()) == 3
    assert ok(cu.cuDeviceTotalMem(2)) == 64 * MIB
    assert ok(cu.cuDeviceGetName(32, 0)).rstrip(b"\0 ") == b"a name"
    uuids = {bytes(ok(cu.cuDeviceGetUuid(d)).bytes) for d in range(3)}
    assert len(uuids) == 3
    refuses(cu.cuDeviceGet(3), "INVALID_DEVICE")
    attribute = cu.CUdevice_attribute
    assert ok(cu.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 1)) == 32
    assert int(ok(cu.cuDeviceGetByPCIBusId(ok(cu.cuDeviceGetPCIBusId(16, 1))))) == 1


@case()
def contexts_are_a_stack_in_each_thread() -> None:
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, 0))
    assert int(ok(cu.cuCtxGetCurrent())) == int(second)
    assert int(ok(cu.cuCtxPopCurrent())) == int(second)
    assert int(ok(cu.cuCtxGetCurrent())) == int(first)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(int(ok(cu.cuCtxGetCurrent()))))
    thread.start()
    thread.join()
    assert seen == [0]
    ok(cu.cuCtxPushCurrent(second))
    ok(cu.cuCtxDestroy(second))
    assert int(ok(cu.cuCtxGetCurrent())) == int(first)
    assert ok(cu.cuDevicePrimaryCtxGetState(0))[1] == 1
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert ok(cu.cuDevicePrimaryCtxGetState(0))[1] == 0
    assert cu.cuMemAlloc(4)[0] != R.CUDA_SUCCESS


@case(emulated=True)
def stale_and_foreign_handles_are_refused() -> None:
    start()
    stream = ok(cu.cuStreamCreate(0))
    event = ok(cu.cuEventCreate(0))
    module = ok(cu.cuModuleLoadData(PTX))
    kernel = ok(cu.cuModuleGetFunction(module, b"inc"))
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    ok(cu.cuStreamDestroy(stream))
    ok(cu.cuEventDestroy(event))
    ok(cu.cuModuleUnload(module))
    ok(cu.cuMemRelease(memory))
    refuses(cu.cuStreamSynchronize(stream), "INVALID_HANDLE")
    refuses(cu.cuStreamDestroy(stream), "INVALID_HANDLE")
    refuses(cu.cuEventRecord(event, 0), "INVALID_HANDLE")
    refuses(cu.cuModuleGetFunction(module, b"inc"), "INVALID_HANDLE")
    refuses(cu.cuFuncGetAttribute(cu.CUfunction_attribute(0), kernel), "INVALID_HANDLE")
    refuses(cu.cuMemRelease(memory), "INVALID_VALUE")
    refuses(cu.cuStreamSynchronize(cu.CUstream(0x12345600)), "INVALID_HANDLE")
    refuses(cu.cuCtxSetCurrent(cu.CUcontext(0x12345600)), "INVALID_CONTEXT")
    again = [int(ok(cu.cuStreamCreate(0))) for _ in range(4)]
    assert int(stream) not in again
    other = ok(cu.cuCtxCreate(None, 0, 0))
    ok(cu.cuCtxDestroy(other))
    refuses(cu.cuCtxSetCurrent(other), "CONTEXT_IS_DESTROYED")


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


@case(emulated=True, MEMORY="64M")
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
    ok(cu.cuMemAlloc(8 * MIB))


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
    refuses(
        cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0), "HOST_MEMORY_ALREADY_REGISTERED"
    )
    ok(cu.cuMemHostUnregister(own.ctypes.data))
    refuses(cu.cuMemHostUnregister(own.ctypes.data), "HOST_MEMORY_NOT_REGISTERED")


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
    refuses(cu.cuMemAddressReserve(GRANULE + 1, 0, 0, 0), "INVALID_VALUE")
    refuses(cu.cuMemAddressReserve(GRANULE, 3, 0, 0), "INVALID_VALUE")
    aligned = int(ok(cu.cuMemAddressReserve(GRANULE, 64 * MIB, 0, 0)))
    assert aligned % (64 * MIB) == 0
    refuses(cu.cuMemAddressFree(window, GRANULE), "INVALID_VALUE")
    ok(cu.cuMemAddressFree(window, size))
    assert int(ok(cu.cuMemAddressReserve(GRANULE, 0, window, 0))) == window


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
    refuses(cu.cuMemMap(va + 4096, GRANULE, 0, memory, 0), "INVALID_VALUE")
    refuses(cu.cuMemMap(va, 4 * GRANULE, 0, memory, 0), "INVALID_VALUE")
    refuses(allow(va, 2 * GRANULE), "INVALID_VALUE")
    ok(cu.cuMemMap(va, 2 * GRANULE, 0, memory, 0))
    refuses(cu.cuMemMap(va + GRANULE, GRANULE, 0, memory, 0), "INVALID_VALUE")
    refuses(cu.cuMemsetD32(va, 1, 4), "INVALID_VALUE")  # no access was given yet
    ok(allow(va, 2 * GRANULE))
    ok(cu.cuMemsetD32(va, 1, GRANULE // 2))
    ok(cu.cuCtxSynchronize())
    refuses(cu.cuMemAddressFree(va, 4 * GRANULE), "INVALID_VALUE")
    refuses(cu.cuMemUnmap(va, GRANULE), "INVALID_VALUE")
    retained = ok(cu.cuMemRetainAllocationHandle(va + 100))
    ok(cu.cuMemRelease(memory))
    ok(cu.cuMemRelease(retained))
    assert download(va, 2)[0] == 1  # the mapping keeps the memory
    ok(cu.cuMemUnmap(va, 2 * GRANULE))
    ok(cu.cuMemAddressFree(va, 4 * GRANULE))
    refuses(cu.cuMemsetD32(va, 1, 4), "INVALID_VALUE")


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
        refuses(
            cu.cuMemImportFromShareableHandle(stranger.fileno(), fd_kind()), "INVALID_VALUE"
        )


@case(emulated=True, MEMORY="32M")
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


@case()
def streams_run_at_the_same_time() -> None:
    start()
    wait = function(b"wait_for")
    flag = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    first, second = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(launch_wait(wait, flag, first))
    refuses(cu.cuStreamQuery(first), "NOT_READY")
    ok(cu.cuMemsetD32Async(flag, 1, 1, second))
    ok(cu.cuStreamSynchronize(first))
    ok(cu.cuStreamQuery(first))


@case()
def the_legacy_stream_waits_for_blocking_streams_only() -> None:
    start()
    wait = function(b"wait_for")
    flag, out = (int(ok(cu.cuMemAlloc(4))) for _ in range(2))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    blocking, free, helper = ok(cu.cuStreamCreate(0)), *(ok(cu.cuStreamCreate(1)) for _ in "ab")
    ok(launch_wait(wait, flag, blocking))
    ok(cu.cuMemsetD32Async(out, 5, 1, cu.CUstream(0)))
    refuses(cu.cuStreamQuery(cu.CUstream(0)), "NOT_READY")
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    assert download(out, 1)[0] == 5
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    ok(launch_wait(wait, flag, free))
    ok(cu.cuMemsetD32Async(out, 6, 1, cu.CUstream(0)))
    assert download(out, 1)[0] == 6  # a non-blocking stream holds nobody up
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    ok(cu.cuStreamSynchronize(free))


@case()
def a_thread_waiting_does_not_hold_up_another() -> None:
    context = start()
    wait = function(b"wait_for")
    flag = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    stream, helper = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(launch_wait(wait, flag, stream))
    done = threading.Event()

    def waiter() -> None:
        ok(cu.cuCtxSetCurrent(context))
        # The bindings keep the interpreter's lock during a call; ctypes does not.
        assert libcuda().cuStreamSynchronize(ctypes.c_void_p(int(stream))) == 0
        done.set()

    thread = threading.Thread(target=waiter)
    thread.start()
    assert not done.wait(0.1)
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    thread.join(10)
    assert done.is_set()


@case()
def events_order_and_measure() -> None:
    start()
    wait, inc = function(b"wait_for"), function(b"inc")
    flag, data = (int(ok(cu.cuMemAlloc(4))) for _ in range(2))
    for address in (flag, data):
        ok(cu.cuMemsetD32(address, 0, 1))
    ok(cu.cuCtxSynchronize())
    one, two, helper = (ok(cu.cuStreamCreate(1)) for _ in range(3))
    begin, end, untimed = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(2))
    ok(cu.cuEventQuery(begin))
    refuses(cu.cuEventElapsedTime(begin, end), "INVALID_HANDLE")
    ok(cu.cuEventRecord(begin, one))
    ok(launch_wait(wait, flag, one))
    ok(cu.cuEventRecord(end, one))
    refuses(cu.cuEventQuery(end), "NOT_READY")
    ok(cu.cuStreamWaitEvent(two, end, 0))
    ok(launch_inc(inc, data, 1, two))
    time.sleep(0.05)
    refuses(cu.cuStreamQuery(two), "NOT_READY")
    refuses(cu.cuEventElapsedTime(begin, end), "NOT_READY")
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    ok(cu.cuEventSynchronize(end))
    assert 40 < ok(cu.cuEventElapsedTime(begin, end)) < 10_000
    ok(cu.cuStreamSynchronize(two))
    assert download(data, 1)[0] == 1
    ok(cu.cuEventRecord(untimed, one))
    ok(cu.cuEventSynchronize(untimed))
    refuses(cu.cuEventElapsedTime(begin, untimed), "INVALID_HANDLE")


@case()
def host_functions_run_in_stream_order() -> None:
    start()
    stream = ok(cu.cuStreamCreate(1))
    seen: list[tuple[int, int, int]] = []
    own = threading.get_native_id()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    data = int(ok(cu.cuMemAlloc(4)))
    library = libcuda()

    def body(number: int | None) -> None:
        refused = library.cuCtxSynchronize()
        seen.append((number or 0, int(threading.get_native_id() != own), refused))

    call = kind(body)
    for number in (1, 2, 3):
        ok(cu.cuMemsetD32Async(data, number, 1, stream))
        assert library.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), call, number) == 0
    # The interpreter's lock must be free while the functions run.
    assert library.cuStreamSynchronize(ctypes.c_void_p(int(stream))) == 0
    not_permitted = int(R.CUDA_ERROR_NOT_PERMITTED)
    assert seen == [(n, 1, not_permitted) for n in (1, 2, 3)], seen


@case()
def the_per_thread_stream_is_its_own() -> None:
    start()
    library = libcuda()
    wait = function(b"wait_for")
    flag = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(flag, 0, 1))
    ok(cu.cuCtxSynchronize())
    ok(launch_wait(wait, flag, cu.CUstream(2)))
    assert library.cuStreamQuery_ptsz(None) == int(R.CUDA_ERROR_NOT_READY)
    found: list[int] = []
    context = ok(cu.cuCtxGetCurrent())

    def other() -> None:
        ok(cu.cuCtxSetCurrent(context))
        found.append(library.cuStreamQuery_ptsz(None))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [0]
    free = ok(cu.cuStreamCreate(1))
    ok(cu.cuMemsetD32Async(flag, 1, 1, free))
    assert library.cuStreamSynchronize_ptsz(None) == 0


@case()
def modules_functions_and_variables() -> None:
    start()
    module = ok(cu.cuModuleLoadData(PTX))
    refuses(cu.cuModuleGetFunction(module, b"none"), "NOT_FOUND")
    refuses(cu.cuModuleGetGlobal(module, b"none"), "NOT_FOUND")
    counter, size = ok(cu.cuModuleGetGlobal(module, b"counter"))
    assert size == 4 and download(int(counter), 1)[0] == 5
    table, size = ok(cu.cuModuleGetGlobal(module, b"table"))
    assert size == 8 and list(download(int(table), 2)) == [11, 22]
    bump = ok(cu.cuModuleGetFunction(module, b"bump"))
    ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    assert download(int(counter), 1)[0] == 6
    other = ok(cu.cuModuleLoadData(PTX))
    assert download(int(ok(cu.cuModuleGetGlobal(other, b"counter"))[0]), 1)[0] == 5
    inc = ok(cu.cuModuleGetFunction(module, b"inc"))
    assert [ok(cu.cuFuncGetParamInfo(inc, i)) for i in (0, 1)] == [(0, 8), (8, 4)]
    refuses(cu.cuFuncGetParamInfo(inc, 2), "INVALID_VALUE")
    assert ok(cu.cuFuncGetName(inc)) == b"inc"
    attribute = cu.CUfunction_attribute
    limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert ok(cu.cuFuncGetAttribute(limit, inc)) == 48 << 10
    refuses(cu.cuFuncSetAttribute(inc, limit, 1 << 30), "INVALID_VALUE")
    ok(cu.cuFuncSetAttribute(inc, limit, 64 << 10))
    assert ok(cu.cuFuncGetAttribute(limit, inc)) == 64 << 10
    assert ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(inc, 256, 0)) > 0
    refuses(cu.cuLaunchKernel(inc, 1, 1, 1, 2048, 1, 1, 0, 0, 0, 0), "INVALID_VALUE")


@case()
def libraries_hold_kernels() -> None:
    start()
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"inc"))
    assert ok(cu.cuLibraryGetKernelCount(library)) == 3
    data = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuMemsetD32(data, 1, 1))
    ok(launch_inc(ok(cu.cuKernelGetFunction(kernel)), data, 1))
    ok(launch_inc(cu.CUfunction(int(kernel)), data, 1))
    assert download(data, 1)[0] == 3
    counter, _ = ok(cu.cuLibraryGetGlobal(library, b"counter"))
    assert download(int(counter), 1)[0] == 5
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert ok(cu.cuKernelGetAttribute(attribute, kernel, 0)) == 1024
    ok(cu.cuLibraryUnload(library))
    refuses(cu.cuLibraryGetKernel(library, b"inc"), "INVALID_HANDLE")


@case()
def bad_images_are_refused_with_a_reason() -> None:
    start()
    log = ctypes.create_string_buffer(4096)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 4096)
    bad = HEAD.encode() + b".visible .entry k() { .reg .b32 %r<3>; frobnicate.u32 %r1, %r2; }\0"
    module = ctypes.c_void_p()
    code = libcuda().cuModuleLoadDataEx(ctypes.byref(module), bad, 2, options, values)
    assert code == int(R.CUDA_ERROR_INVALID_PTX)
    assert b"frobnicate" in log.value and values[1] == len(log.value)
    refuses(cu.cuModuleLoadData(bad), "INVALID_PTX")
    cubin = b"\x7fELF" + bytes(60)
    assert cu.cuModuleLoadData(cubin)[0] != R.CUDA_SUCCESS


@case(emulated=True)
def fat_binaries_hold_ptx() -> None:
    from tests.emu.fatbins import fatbin

    start()
    refuses(cu.cuModuleLoadData(b"\x7fELF" + bytes(60)), "NO_BINARY_FOR_GPU")
    for packing in ("none", "lz4", "zstd"):
        function(b"inc", fatbin(PTX, packing))
    refuses(cu.cuModuleLoadData(fatbin(b"\x7fELF" + bytes(64), "none", kind=2)),
            "NO_BINARY_FOR_GPU")  # fmt: skip
    refuses(cu.cuModuleLoadData(fatbin(PTX, "none", architecture=90)), "NO_BINARY_FOR_GPU")


@case()
def an_illegal_address_breaks_the_context_for_good() -> None:
    context = start()
    inc = function(b"inc")
    stream = ok(cu.cuStreamCreate(0))
    data = int(ok(cu.cuMemAlloc(4)))
    ok(launch_inc(inc, 0x10000, 1, stream))
    refuses(cu.cuStreamSynchronize(stream), "ILLEGAL_ADDRESS")
    for call in (
        cu.cuCtxSynchronize(),
        cu.cuMemAlloc(4),
        cu.cuMemFree(data),
        cu.cuStreamCreate(0),
        cu.cuStreamQuery(stream),
        cu.cuMemcpyDtoH(np.zeros(1).ctypes.data, data, 4),
        launch_inc(inc, data, 1),
    ):
        refuses(call, "ILLEGAL_ADDRESS")
    ok(cu.cuCtxSetCurrent(context))
    ok(cu.cuDeviceGetCount())


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


@case()
def entry_points_are_found_by_version() -> None:
    ok(cu.cuInit(0))
    found, missing, too_old = 0, 1, 2
    library = libcuda()

    def query(name: bytes, version: int, flags: int = 0) -> tuple[int | None, int]:
        pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
        library.cuGetProcAddress_v2(
            name, ctypes.byref(pointer), version, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return pointer.value, status.value

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    per_thread = 2
    assert query(b"cuMemAlloc", 3020) == (address("cuMemAlloc_v2"), found)
    assert query(b"cuMemAlloc", 2000) == (address("cuMemAlloc"), found)
    assert query(b"cuGetProcAddress", 11030) == (address("cuGetProcAddress"), found)
    assert query(b"cuGetProcAddress", 12000) == (address("cuGetProcAddress_v2"), found)
    assert query(b"cuLaunchKernel", 12000) == (address("cuLaunchKernel"), found)
    assert query(b"cuLaunchKernel", 12000, per_thread) == (address("cuLaunchKernel_ptsz"), found)
    assert query(b"cuMemcpyHtoD", 12000, per_thread)[0] == address("cuMemcpyHtoD_v2_ptds")
    assert query(b"cuInit", 12000, per_thread) == (address("cuInit"), found)
    assert query(b"cuMemAlloc_v2", 12000) == (None, missing)
    assert query(b"cuNoSuchCall", 12000) == (None, missing)
    assert query(b"cuLibraryLoadData", 11080) == (None, too_old)


@case(emulated=True)
def what_is_missing_says_so() -> None:
    start()
    refuses(cu.cuGraphCreate(0), "NOT_SUPPORTED")
    host = ok(cu.cuMemHostAlloc(4096, 0))
    refuses(cu.cuMemHostGetDevicePointer(int(host), 0), "NOT_SUPPORTED")
    table = ctypes.c_void_p(1)
    uuid = (ctypes.c_char * 16)()
    assert libcuda().cuGetExportTable(ctypes.byref(table), uuid) == int(R.CUDA_ERROR_NOT_FOUND)
    assert table.value is None
    with open(os.environ["FLOWGPU_EMU_LOG"]) as log:
        text = log.read()
    assert "unsupported cuGraphCreate call 1" in text
    assert "unsupported cuMemHostGetDevicePointer_v2 call 1" in text


@case()
def every_error_has_a_name() -> None:
    for code in R:
        assert ok(cu.cuGetErrorName(code)) == code.name.encode()
        assert ok(cu.cuGetErrorString(code))
    assert libcuda().cuGetErrorName(54321, ctypes.byref(ctypes.c_char_p())) == 1


@case()
def a_forked_child_may_not_use_the_driver() -> None:
    start()
    child = os.fork()
    if child == 0:
        codes = {cu.cuInit(0)[0], cu.cuMemAlloc(4)[0], cu.cuCtxGetCurrent()[0]}
        os._exit(0 if codes == {R.CUDA_ERROR_NOT_INITIALIZED} else 1)
    assert os.waitpid(child, 0)[1] == 0
    ok(cu.cuMemAlloc(4))


@case(emulated=True, KERNEL_DELAY="200000")
def a_kernel_delay_makes_launches_late() -> None:
    start()
    data = int(ok(cu.cuMemAlloc(4)))
    stream = ok(cu.cuStreamCreate(1))
    ok(launch_inc(function(b"inc"), data, 1, stream))
    refuses(cu.cuStreamQuery(stream), "NOT_READY")
    began = time.monotonic()
    ok(cu.cuStreamSynchronize(stream))
    assert time.monotonic() - began > 0.1


@case(emulated=True)
def the_write_log_is_exact() -> None:
    import json

    start()
    data = int(ok(cu.cuMemAlloc(400)))
    ok(launch_inc(function(b"inc"), data + 40, 7))
    ok(cu.cuCtxSynchronize())
    with open(os.environ["FLOWGPU_EMU_WRITE_LOG"]) as lines:
        entry = json.loads(lines.readlines()[-1])
    assert entry["kernel"] == "inc" and entry["pid"] == os.getpid()
    assert entry["writes"] == [[data + 40, 28]]


def device_sockets() -> list[int]:
    """This process's connections to the device, as a tool outside would recognise them."""
    import socket

    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as peer:
                if "flowgpu-emu" in str(peer.getpeername()):
                    found.append(int(name))
        except OSError:
            continue
    return found


@case(emulated=True)
def handles_die_with_the_connection() -> None:
    start()
    with open("/proc/self/maps") as maps:
        assert "flowgpu-emu-device" in maps.read()
    sockets = device_sockets()
    assert len(sockets) >= 2
    with open(os.devnull) as null:
        for fd in sockets:
            os.dup2(null.fileno(), fd)
    refuses(cu.cuMemAlloc(4), "DEVICE_UNAVAILABLE")
    refuses(cu.cuCtxSynchronize(), "DEVICE_UNAVAILABLE")


def main() -> None:
    CASES[sys.argv[1]].run()
    print("passed")


if __name__ == "__main__":
    main()
