"""Round trips of driver calls under the record: what a program made or set is there afterwards.

A case's setup runs once; what it asks is asked before a checkpoint and after each, and its answer
must stay the same, and be what the case expects where it says so. `last` is asked at the end only:
it changes what it asks about. Nothing here is the emulated driver's own: a real one answers alike,
but to what names an ended object (`ended`, asked last): there it may also end the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ANY = object()  # the same every time; what it is, is the driver's affair


@dataclass(frozen=True)
class Case:
    """One round trip of the functions of `families` (native/intercept/api.def)."""

    name: str
    families: tuple[str, ...]
    setup: str
    asks: dict[str, Any]
    last: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    emulated_only: bool = False


# What they give is refused.
WITHOUT_A_CASE = {
    "cuArrayGetPlane": "arrays of several planes are refused",
    "cuMemMapArrayAsync": "arrays to which memory is mapped are refused",
}

# For every setup: answers by name, a library from a file, values behind pointers.
PRELUDE = '''
import ctypes, pathlib, tempfile
def name(result):
    return result[0].name.removeprefix("CUDA_ERROR_")
def same(one, other):
    return int(one) == int(other)
def inc_of(kernel, count=64, stream=0):
    buffer = int(ok(cu.cuMemAlloc(4 * count)))
    ok(cu.cuMemsetD32(buffer, 1, count))
    ok(cu.cuCtxSynchronize())
    ok(launch_inc(kernel, buffer, count, stream))
    ok(cu.cuCtxSynchronize())
    total = int(download(buffer, count).sum())
    ok(cu.cuMemFree(buffer))
    return total
def file_of(code):
    path = pathlib.Path(tempfile.mkdtemp()) / "code.ptx"
    path.write_bytes(code)
    return str(path).encode()
def value_of(address):
    return int(download(address, 1)[0])
VARIABLES = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counter = 5;
.visible .const .align 4 .u32 table[2] = {11, 22};
.visible .entry add() {
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [counter]; add.u32 %r2, %r1, 1; st.global.u32 [counter], %r2; ret;
}
.visible .entry read(.param .u64 p) {
    .reg .b64 %rd<2>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [p]; ld.global.u32 %r1, [counter]; ld.const.u32 %r2, [table];
    st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; ret;
}
""" + bytes(1)
def run(kernel, times, *values):
    for _ in range(times):
        types = (ctypes.c_uint64,) * len(values)
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, (values, types), 0))
    ok(cu.cuCtxSynchronize())
def read_by(kernel):
    buffer = int(ok(cu.cuMemAlloc(8)))
    run(kernel, 1, buffer)
    values = [int(v) for v in download(buffer, 2)]
    ok(cu.cuMemFree(buffer))
    return values
device = ok(cu.cuDeviceGet(0))
primary = ok(cu.cuCtxGetCurrent())
lib = libcuda()
'''

ATTRIBUTE = "cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
