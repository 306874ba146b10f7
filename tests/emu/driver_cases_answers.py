"""Answers in corners, each measured: an H200's driver (580.159.04) gave them to drawn programs."""

from __future__ import annotations

import ctypes

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    GRANULE,
    HEAD,
    MIB,
    PTX,
    allow,
    case,
    download,
    fd_kind,
    function,
    launch_inc,
    libcuda,
    ok,
    properties,
    refuses,
    start,
)

MAP_HOST = 8  # CU_CTX_MAP_HOST


@case()
def a_primary_context_keeps_its_handle() -> None:
    first = start()
    assert ok(cu.cuCtxGetFlags()) & MAP_HOST
    assert ok(cu.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    held = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuDevicePrimaryCtxReset(0))
    for enter in (cu.cuCtxSetCurrent, cu.cuCtxPushCurrent):
        ok(enter(first))
        assert int(ok(cu.cuCtxGetDevice())) == 0
    assert ok(cu.cuCtxGetFlags()) & MAP_HOST == 0
    for result in (
        cu.cuCtxSynchronize(),
        cu.cuMemAlloc(4),
        cu.cuMemFree(held),
        cu.cuEventCreate(0),
    ):
        refuses(result, "CONTEXT_IS_DESTROYED")
    refuses(cu.cuCtxDestroy(first), "INVALID_CONTEXT")
    assert int(ok(cu.cuDevicePrimaryCtxRetain(0))) == int(first)
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(4))))
    # A reset takes no reference away.
    ok(cu.cuDevicePrimaryCtxRelease(0))
    assert ok(cu.cuDevicePrimaryCtxGetState(0))[1] == 1
    ok(cu.cuDevicePrimaryCtxRelease(0))
    refuses(cu.cuDevicePrimaryCtxRelease(0), "INVALID_CONTEXT")


@case()
def memory_is_freed_in_the_order_of_a_stream_wherever_it_is_from() -> None:
    start()
    stream = ok(cu.cuStreamCreate(1))
    data = int(ok(cu.cuMemAlloc(4 * MIB)))
    ok(cu.cuMemsetD32Async(data, 3, MIB, stream))
    refuses(cu.cuMemFreeAsync(data + 4, stream), "INVALID_VALUE")
    ok(cu.cuMemFreeAsync(data, stream))
    ok(cu.cuStreamSynchronize(stream))
    refuses(cu.cuMemFree(data), "INVALID_VALUE")
    ok(cu.cuMemFreeAsync(0, stream))


@case()
def the_context_is_looked_at_before_the_address() -> None:
    start()
    data = int(ok(cu.cuMemAlloc(4)))
    context = ok(cu.cuCtxPopCurrent())
    for result in (
        cu.cuMemGetAddressRange(data),
        cu.cuMemHostGetFlags(8),
        cu.cuEventRecord(cu.CUevent(0), 0),
    ):
        refuses(result, "INVALID_CONTEXT")
    ok(cu.cuMemFreeHost(0))
    refuses(cu.cuMemFreeHost(8), "INVALID_VALUE")
    refuses(cu.cuMemHostUnregister(8), "HOST_MEMORY_NOT_REGISTERED")
    refuses(cu.cuMemHostUnregister(0), "INVALID_VALUE")
    ok(cu.cuCtxSetCurrent(context))
    ok(cu.cuMemFree(data))


@case()
def what_a_context_has_lost_is_named_after_it() -> None:
    context = start()
    module = ok(cu.cuModuleLoadData(PTX))
    inc = ok(cu.cuModuleGetFunction(module, b"inc"))
    ok(launch_inc(inc, 0x10000, 1))
    refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    refuses(cu.cuCtxGetApiVersion(cu.CUcontext(0)), "ILLEGAL_ADDRESS")
    ok(cu.cuDevicePrimaryCtxRelease(0))
    ok(cu.cuCtxSetCurrent(context))
    # The real driver has said both.
    code = cu.cuModuleGetGlobal(module, b"table")[0].name
    assert code in ("CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_INVALID_HANDLE"), code


@case()
def handles_that_are_none_are_refused_before_anything_else() -> None:
    no_event, no_function = cu.CUevent(0), cu.CUfunction(0)
    refuses(cu.cuEventQuery(no_event), "INVALID_HANDLE")
    refuses(cu.cuEventElapsedTime(no_event, no_event), "INVALID_HANDLE")
    start()
    refuses(cu.cuFuncGetName(no_function), "INVALID_VALUE")
    refuses(cu.cuFuncGetParamInfo(no_function, 0), "INVALID_VALUE")
    refuses(cu.cuCtxDestroy(cu.CUcontext(0)), "INVALID_VALUE")
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"inc"))
    refuses(cu.cuFuncGetParamInfo(cu.CUfunction(int(kernel)), 2), "INVALID_HANDLE")


@case()
def numbers_that_mean_nothing_are_invalid() -> None:
    start()
    refuses(cu.cuCtxGetLimit(cu.CUlimit.CU_LIMIT_MAX), "INVALID_VALUE")
    refuses(cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_MAX, 1), "INVALID_VALUE")
    refuses(cu.cuDeviceGetMemPool(99), "INVALID_VALUE")
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    high = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH
    refuses(cu.cuMemPoolSetAttribute(pool, high, cu.cuuint64_t(1)), "INVALID_VALUE")
    ok(cu.cuMemPoolSetAttribute(pool, high, cu.cuuint64_t(0)))
    refuses(cu.cuMemHostAlloc(1 << 60, 64), "INVALID_VALUE")
    refuses(cu.cuMemImportFromShareableHandle((1 << 64) - 1, fd_kind()), "UNKNOWN")


@case()
def host_memory_that_is_registered_is_memory_of_the_device() -> None:
    start()
    own = np.arange(1024, dtype=np.uint32)
    refuses(cu.cuMemcpyDtoH(np.zeros_like(own).ctypes.data, own.ctypes.data, 64), "INVALID_VALUE")
    ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    mapped = 2  # CU_MEMHOSTREGISTER_DEVICEMAP, asked for or not
    assert ok(cu.cuMemHostGetFlags(own.ctypes.data)) == mapped
    assert (download(own.ctypes.data, 1024) == own).all()
    types = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    assert int(ok(cu.cuPointerGetAttribute(types, own.ctypes.data))) == 0


@case()
def what_a_context_has_registered_ends_with_it() -> None:
    start()
    own = np.zeros(1024, np.uint32)
    second = ok(cu.cuCtxCreate(None, 0, 0))
    ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    refuses(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0), "HOST_MEMORY_ALREADY_REGISTERED")
    ok(cu.cuCtxDestroy(second))
    ok(cu.cuMemHostRegister(own.ctypes.data, own.nbytes, 0))
    ok(cu.cuMemHostUnregister(own.ctypes.data))


@case()
def what_is_no_pointer_leaves_the_size_as_it_was() -> None:
    start()
    kinds = (ctypes.c_int * 3)(2, 9, 12)  # type, ordinal, range size
    values = (ctypes.c_uint64 * 3)(77, 77, 77)
    data = (ctypes.c_void_p * 3)(*(ctypes.addressof(values) + 8 * i for i in range(3)))
    code = libcuda().cuPointerGetAttributes(3, kinds, data, ctypes.c_uint64(1 << 40))
    assert code == 0
    assert (values[0] & 0xFFFFFFFF, ctypes.c_int32(values[1]).value, values[2]) == (0, -2, 77)


@case()
def images_are_told_apart() -> None:
    start()
    refuses(cu.cuModuleLoadData(b"no image at all\0"), "INVALID_IMAGE")
    newer = PTX.replace(HEAD.encode(), HEAD.replace("7.0", "77.0").encode())
    refuses(cu.cuModuleLoadData(newer), "UNSUPPORTED_PTX_VERSION")
    function(b"inc")


@case()
def a_size_is_compared_with_the_handle_before_the_range() -> None:
    start()
    va = int(ok(cu.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    ok(cu.cuMemUnmap(va, 4096))  # of nothing
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    refuses(cu.cuMemMap(va, 4 * GRANULE, 0, memory, 0), "NOT_SUPPORTED")
    ok(cu.cuMemMap(va, GRANULE, 0, memory, 0))
    ok(allow(va, GRANULE))
    refuses(cu.cuMemUnmap(va, 4096), "INVALID_VALUE")
    odd = properties()
    ctypes.c_int32.from_address(odd.getPtr() + 4).value = 64  # a bit that names no type
    ok(cu.cuMemCreate(GRANULE, odd, 0))


@case(emulated=True)
def the_device_outlives_a_copy_of_a_size_that_cannot_be() -> None:
    start()
    own = np.zeros(64, np.uint8)
    refuses(
        cu.cuMemcpy(cu.CUdeviceptr(own.ctypes.data), cu.CUdeviceptr(0), 1 << 40), "INVALID_VALUE"
    )
    ok(cu.cuMemAlloc(4))
