"""The driver as a whole: start, devices, contexts, handles, entry points, fork, connections."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cuda.bindings import __version__ as bindings_version
from cuda.bindings import driver as cu

from coordinator.device import uuid_text
from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    PTX,
    R,
    case,
    libcuda,
    ok,
    properties,
    refuses,
    slots,
    start,
)

T = TypeVar("T")


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


def seen(wanted: str | None) -> list[int]:
    """In a child, the devices that CUDA_VISIBLE_DEVICES of this value leaves, by their memory."""
    program = (
        "from cuda.bindings import driver as cu\n"
        "if cu.cuInit(0)[0] == cu.CUresult.CUDA_ERROR_NO_DEVICE: raise SystemExit\n"
        "for d in range(cu.cuDeviceGetCount()[1]):\n"
        "    print(bytes(cu.cuDeviceGetUuid(d)[1].bytes).rstrip(bytes(1))[-3:].decode())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if wanted is not None:
        environment["CUDA_VISIBLE_DEVICES"] = wanted
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@case(emulated=True, DEVICES="3")
def visible_devices_are_those_of_the_variable_in_its_order() -> None:
    raw = [f"FlowGPU-emu-{index:03}".encode() + b"\0" for index in range(3)]
    uuids = [uuid_text(uuid, "FlowGPU emulated GPU") for uuid in raw]
    for wanted, expected in (
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1, 2", [1, 2]),
        ("1,7,2", [1]),
        ("-1,0", []),
        ("none", []),
        ("", []),
        ("0,1,0", []),
        (uuids[1], [1]),
        (f"{uuids[2]},0", [2, 0]),
        ("GPU-", []),  # of more than one device
        ("GPU-00000000", []),
    ):
        assert seen(wanted) == expected, wanted


@case(emulated=True, DEVICES="3", NAME="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
def one_part_of_a_gpu_is_visible_at_a_time() -> None:
    ok(cu.cuInit(0))
    (raw,) = [
        bytes(ok(cu.cuDeviceGetUuid(device)).bytes) for device in range(ok(cu.cuDeviceGetCount()))
    ]
    name = os.environ["FLOWGPU_EMU_NAME"]
    first = uuid_text(raw, name)
    assert first.startswith("MIG-")
    for wanted, expected in (
        (None, [0]),
        ("2", [2]),
        ("1,2", [1]),
        (first, [0]),
        (first.replace("MIG-", "GPU-"), []),
    ):
        assert seen(wanted) == expected, wanted


@case(emulated=True, DEVICES="3")
def ordinals_are_of_the_visible_devices_only() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"
    ok(cu.cuInit(0))
    refuses(cu.cuDeviceGet(2), "INVALID_DEVICE")
    refuses(cu.cuDevicePrimaryCtxRetain(2), "INVALID_DEVICE")
    refuses(cu.cuMemCreate(GRANULE, properties(2), 0), "INVALID_DEVICE")
    assert ok(cu.cuDeviceGetPCIBusId(16, 0)).startswith(b"0000:03")
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(1))))
    assert int(ok(cu.cuCtxGetDevice())) == 1
    assert int(ok(cu.cuStreamGetDevice(0))) == 1
    address = ok(cu.cuMemAlloc(MIB))
    key = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert int(ok(cu.cuPointerGetAttribute(key, address))) == 1
    handle = ok(cu.cuMemCreate(GRANULE, properties(1), 0))
    assert ok(cu.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 1


@case(emulated=True, DEVICES="2")
def imported_memory_of_a_device_that_is_not_visible_has_no_devices_number() -> None:
    importer = (
        "import sys\n"
        "from cuda.bindings import driver as cu\n"
        "cu.cuInit(0)\n"
        "cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])\n"
        "kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\n"
        "handle = cu.cuMemImportFromShareableHandle(int(sys.argv[1]), kind)[1]\n"
        "where = cu.cuMemGetAllocationPropertiesFromHandle(handle)[1].location.id\n"
        "print(cu.cuDeviceGet(where)[0].name)"
    )
    start()
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    fd = int(ok(cu.cuMemExportToShareableHandle(handle, properties().requestedHandleTypes, 0)))
    for visible, expected in (("0", "CUDA_SUCCESS"), ("1", "CUDA_ERROR_INVALID_DEVICE")):
        done = subprocess.run(
            [sys.executable, "-c", importer, str(fd)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
            pass_fds=(fd,),
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == expected, done.stderr


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


def in_thread(action: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@case()
def each_thread_has_the_context_that_it_set_last() -> None:
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, 0))

    def current() -> list[int]:
        return [int(ok(cu.cuCtxGetCurrent())) for _ in range(2)]

    for context in (second, second, first, first, second):
        ok(cu.cuCtxSetCurrent(context))
        assert current() == [int(context)] * 2

    def other() -> None:
        assert current() == [0, 0]
        ok(cu.cuCtxSetCurrent(first))
        ok(cu.cuCtxSetCurrent(first))
        assert current() == [int(first)] * 2

    in_thread(other)
    assert current() == [int(second)] * 2
    ok(cu.cuCtxPushCurrent(first))
    ok(cu.cuCtxSetCurrent(first))
    assert current() == [int(first)] * 2
    assert int(ok(cu.cuCtxPopCurrent())) == int(first)
    assert current() == [int(second)] * 2
    ok(cu.cuCtxSetCurrent(second))
    in_thread(lambda: ok(cu.cuCtxDestroy(second)))
    assert current() == [int(second)] * 2  # still, though it has ended
    refuses(cu.cuMemAlloc(4), "CONTEXT_IS_DESTROYED")
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(4))))


@case()
def what_a_context_stores_is_told_until_it_is_put_again() -> None:
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, 0))
    put, delete, get = slots("c693336e1121df11a8c368f355d89593", 3)
    keys = [ctypes.c_void_p(4711 + number) for number in range(5)]

    def stored(context: object, key: ctypes.c_void_p) -> int | None:
        found = ctypes.c_void_p()
        where = ctypes.c_void_p(int(context)) if context else None
        codes = {get(ctypes.byref(found), where, key), get(ctypes.byref(found), where, key)}
        return found.value if codes == {0} else None

    def put_all(context: object, base: int) -> None:
        for number, key in enumerate(keys):
            value = ctypes.c_void_p(base + number)
            assert put(ctypes.c_void_p(int(context)), key, value, None) == 0

    assert stored(None, keys[0]) is None
    put_all(first, 1)
    put_all(second, 11)
    again = [put(None, keys[0], ctypes.c_void_p(value), None) for value in (11, 12)]
    assert again == [int(cu.CUresult.CUDA_ERROR_INVALID_HANDLE)] * 2
    for _ in range(2):
        assert int(ok(cu.cuCtxGetCurrent())) == int(second)
        for number, key in enumerate(keys):
            assert stored(first, key) == 1 + number
            assert stored(None, key) == stored(second, key) == 11 + number
    ok(cu.cuCtxSetCurrent(first))
    assert [stored(None, key) for key in keys] == [1, 2, 3, 4, 5]

    def put_others() -> None:
        ok(cu.cuCtxSetCurrent(first))
        assert [delete(None, key) for key in keys] == [0] * len(keys)
        put_all(first, 21)

    in_thread(put_others)
    assert [stored(None, key) for key in reversed(keys)] == [25, 24, 23, 22, 21]
    assert stored(first, keys[1]) == 22
    assert delete(None, keys[1]) == 0
    assert stored(first, keys[1]) is None
    assert [stored(first, key) for key in keys] == [21, None, 23, 24, 25]
    assert [stored(second, key) for key in keys] == [11, 12, 13, 14, 15]
    assert stored(second, keys[0]) == 11
    in_thread(lambda: ok(cu.cuCtxDestroy(second)))
    assert stored(second, keys[0]) is None
    assert stored(first, keys[0]) == 21


@case()
def the_device_of_a_context_is_told() -> None:
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, 0))

    def device_of(context: object) -> tuple[str, int]:
        device = ctypes.c_int(-1)
        code = libcuda().cuCtxGetDevice_v2(ctypes.byref(device), ctypes.c_void_p(int(context)))
        return R(code).name, device.value

    for context in (0, first, second) * 2:
        assert device_of(context) == ("CUDA_SUCCESS", 0)
    ok(cu.cuCtxSetCurrent(first))
    for context in (first, second) * 2:
        assert device_of(context) == ("CUDA_SUCCESS", 0)
    while int(ok(cu.cuCtxGetCurrent())):
        ok(cu.cuCtxPopCurrent())
    assert device_of(0)[0] == "CUDA_ERROR_INVALID_CONTEXT"
    assert device_of(first) == ("CUDA_SUCCESS", 0)


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
    assert query(b"cuGetProcAddress", 11030) == (address("cuGetProcAddress"), found)
    assert query(b"cuGetProcAddress", 12000) == (address("cuGetProcAddress_v2"), found)
    gated = [
        (query(b"cuMemAlloc", 2000), "cuMemAlloc"),
        (query(b"cuLaunchKernel", 12000), "cuLaunchKernel"),
        (query(b"cuLaunchKernel", 12000, per_thread), "cuLaunchKernel_ptsz"),
        (query(b"cuMemcpyHtoD", 12000, per_thread), "cuMemcpyHtoD_v2_ptds"),
    ]
    if os.environ.get("FLOWGPU_REPLAY"):
        # The way behind the linked symbols, a function of its own for each (driver.cpp).
        addresses = {pointer for (pointer, _), _ in gated}
        assert len(addresses - {None}) == len(gated)
        assert addresses.isdisjoint(address(name) for _, name in gated)
        assert all(status == found for (_, status), _ in gated)
    else:
        assert gated == [((address(name), found), name) for _, name in gated]
    assert query(b"cuInit", 12000, per_thread) == (address("cuInit"), found)
    assert query(b"cuMemAlloc_v2", 12000) == (None, missing)
    assert query(b"cuNoSuchCall", 12000) == (None, missing)
    assert query(b"cuLibraryLoadData", 11080) == (None, too_old)


@case(emulated=True)
def what_is_missing_says_so() -> None:
    start()
    refuses(cu.cuDeviceGraphMemTrim(0), "NOT_SUPPORTED")
    # The device finds no file to map for memory that the process has for itself alone.
    own = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    byte = ctypes.c_char.from_buffer(own)
    host = ctypes.addressof(byte)
    ok(cu.cuMemHostRegister(host, 4096, 0))
    refuses(cu.cuMemHostGetDevicePointer(host, 0), "NOT_SUPPORTED")
    table = ctypes.c_void_p(1)
    uuid = (ctypes.c_char * 16)()
    assert libcuda().cuGetExportTable(ctypes.byref(table), uuid) == int(R.CUDA_ERROR_INVALID_VALUE)
    assert table.value is None
    with open(os.environ["FLOWGPU_EMU_LOG"]) as log:
        text = log.read()
    assert "unsupported cuDeviceGraphMemTrim call 1" in text
    assert "unsupported cuMemHostGetDevicePointer_v2 call 1" in text


@case()
def every_error_has_a_name() -> None:
    version = ok(cu.cuDriverGetVersion())
    newer = tuple(map(int, bindings_version.split(".")[:2])) > (
        version // 1000,
        version % 100 // 10,
    )
    for code in R:
        result, name = cu.cuGetErrorName(code)
        if result == R.CUDA_ERROR_INVALID_VALUE and newer:
            continue  # a code that came after this driver
        assert (result, name) == (R.CUDA_SUCCESS, code.name.encode())
        assert ok(cu.cuGetErrorString(code))
    assert ok(cu.cuGetErrorName(R.CUDA_ERROR_OUT_OF_MEMORY)) == b"CUDA_ERROR_OUT_OF_MEMORY"
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


def device_sockets() -> list[int]:
    """This process's connections to the device, as a tool outside would recognise them."""
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
