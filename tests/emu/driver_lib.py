"""What the cases of the driver tests share: their registry, their kernels, short names for calls.

The cases say what a driver does, so the same bodies run on the emulated one and on a real one. A
case marked `emulated` checks something that only the emulated driver promises: a configured size,
a stricter refusal, a log.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.program_lib import HEAD, INC

MIB = 1 << 20
GRANULE = 2 * MIB
R = cu.CUresult

PTX = (
    HEAD
    + """
.visible .global .align 4 .u32 counter = 5;
.visible .const .align 4 .u32 table[2] = {11, 22};
"""
    + INC
    + """.visible .entry wait_for(.param .u64 flag) {
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


def pool_properties() -> Any:
    props = cu.CUmemPoolProps()
    props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = 0
    return props


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


def access_of(device: int, mode: str) -> Any:
    """A CUmemAccessDesc."""
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = getattr(cu.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{mode}")
    return access


def allow(address: int, size: int, mode: str = "READWRITE", device: int = 0) -> Any:
    return cu.cuMemSetAccess(address, size, [access_of(device, mode)], 1)


def fd_kind() -> Any:
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def slots(table: str, count: int) -> list[ctypes._FuncPointer]:
    """The first slots of a private table; where it begins with its size, that is none to call."""
    address = ctypes.c_void_p()
    ok((R(libcuda().cuGetExportTable(ctypes.byref(address), bytes.fromhex(table))), None))
    words = (ctypes.c_void_p * count).from_address(address.value or 0)
    return [ctypes.CFUNCTYPE(ctypes.c_int)(word) for word in words]


# Makes one of the driver's calls for checkpoints: VERB PID [MILLISECONDS].
CALLER = """
import sys
from cuda.bindings import driver as cu
pid = int(sys.argv[2])
verb = sys.argv[1]
if verb == "Lock":
    args = cu.CUcheckpointLockArgs()
    args.timeoutMs = int(sys.argv[3])
    print(cu.cuCheckpointProcessLock(pid, args)[0].name)
elif verb == "GetState":
    result = cu.cuCheckpointProcessGetState(pid)
    print(result[0].name if int(result[0]) else int(result[1]))
elif verb == "GetRestoreThreadId":
    print(cu.cuCheckpointProcessGetRestoreThreadId(pid)[1])
else:
    print(getattr(cu, "cuCheckpointProcess" + verb)(pid, None)[0].name)
"""
