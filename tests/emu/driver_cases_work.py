"""Work: streams, events, host functions, modules, libraries, launches and their faults."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import time

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    HEAD,
    PTX,
    R,
    case,
    download,
    function,
    launch_inc,
    launch_wait,
    libcuda,
    ok,
    refuses,
    start,
)
from tests.emu.fatbins import fatbin


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
def kernels_reach_shared_memory_of_the_host_that_is_registered() -> None:
    start()
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    words = (ctypes.c_uint32 * 2).from_buffer(memory, mmap.PAGESIZE)
    address = ctypes.addressof(words)
    ok(cu.cuMemHostRegister(address, mmap.PAGESIZE, cu.CU_MEMHOSTREGISTER_DEVICEMAP))
    seen = int(ok(cu.cuMemHostGetDevicePointer(address, 0)))
    stream = ok(cu.cuStreamCreate(1))
    wait, inc = function(b"wait_for"), function(b"inc")
    ok(launch_wait(wait, seen, stream))
    ok(launch_inc(inc, seen, 2, stream))
    refuses(cu.cuStreamQuery(stream), "NOT_READY")
    words[0] = 7
    ok(cu.cuStreamSynchronize(stream))
    assert list(words) == [8, 1]
    ok(cu.cuMemHostUnregister(address))
    refuses(cu.cuMemHostGetDevicePointer(address, 0), "INVALID_VALUE")


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
def the_work_of_a_destroyed_stream_is_waited_for() -> None:
    context = start()
    flag, out = (int(ok(cu.cuMemAlloc(4))) for _ in range(2))
    for address in (flag, out):
        ok(cu.cuMemsetD32(address, 0, 1))
    ok(cu.cuCtxSynchronize())
    stream, helper = (ok(cu.cuStreamCreate(1)) for _ in range(2))
    ok(launch_wait(function(b"wait_for"), flag, stream))
    ok(cu.cuMemsetD32Async(out, 5, 1, stream))
    ok(cu.cuStreamDestroy(stream))

    def release() -> None:
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuMemsetD32Async(flag, 1, 1, helper))

    releasing = threading.Timer(0.1, release)
    releasing.start()
    assert libcuda().cuCtxSynchronize() == 0
    assert download(out, 1)[0] == 5
    releasing.join()


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
def functions_are_loaded_when_they_are_asked_for() -> None:
    start()
    if ok(cu.cuModuleGetLoadingMode()) == cu.CUmoduleLoadingMode.CU_MODULE_EAGER_LOADING:
        return  # all at once
    module = ok(cu.cuModuleLoadData(PTX))
    listed = ok(cu.cuModuleEnumerateFunctions(3, module))

    def loaded() -> list[int]:
        return [int(ok(cu.cuFuncIsLoaded(function))) for function in listed]

    assert loaded() == [0, 0, 0]
    ok(cu.cuFuncGetAttribute(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, listed[0]))
    assert loaded() == [0, 0, 0]
    ok(cu.cuFuncLoad(listed[0]))
    assert loaded() == [1, 0, 0]
    ok(cu.cuModuleGetFunction(module, ok(cu.cuFuncGetName(listed[1]))))
    assert loaded() == [1, 1, 0]
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    of_kernel = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"bump"))))
    assert int(ok(cu.cuFuncIsLoaded(of_kernel))) == 1


@case()
def a_kernel_may_say_how_large_its_blocks_are() -> None:
    start()
    text = (
        PTX.partition(b".visible .entry")[0]
        + b"""
.visible .entry most() .maxntid 32, 2 { ret; }
.visible .entry just() .reqntid 32, 2 { ret; }
"""
    )
    module = ok(cu.cuModuleLoadData(text))
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    answers = {
        b"most": (64, {(32, 2): 0, (64, 1): 0, (32, 1): 0, (33, 2): 1}),
        b"just": (1024, {(32, 2): 0, (64, 1): 1, (32, 1): 1, (33, 2): 1}),
    }
    for name, (most, blocks) in answers.items():
        function = ok(cu.cuModuleGetFunction(module, name))
        assert ok(cu.cuFuncGetAttribute(attribute, function)) == most
        for (x, y), code in blocks.items():
            assert int(cu.cuLaunchKernel(function, 1, 1, 1, x, y, 1, 0, 0, 0, 0)[0]) == code


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
    refuses(cu.cuLibraryGetKernel(library, b"inc"), "NOT_FOUND")


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


@case(emulated=True, KERNEL_DELAY="2000000")
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
    start()
    data = int(ok(cu.cuMemAlloc(400)))
    ok(launch_inc(function(b"inc"), data + 40, 7))
    ok(cu.cuCtxSynchronize())
    with open(os.environ["FLOWGPU_EMU_WRITE_LOG"]) as lines:
        entry = json.loads(lines.readlines()[-1])
    assert entry["kernel"] == "inc" and entry["pid"] == os.getpid()
    assert entry["writes"] == [[data + 40, 28]]
