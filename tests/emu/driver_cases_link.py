"""The JIT linker: PTX becomes a cubin, which loads as the PTX would have."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import PTX, R, case, download, libcuda, ok, refuses, start
from tests.emu.fatbins import container, entry
from tests.emu.program_lib import HEAD

KIND = cu.CUjitInputType
TEXT = KIND.CU_JIT_INPUT_PTX
BAD = HEAD.encode() + b".visible .entry k() { .reg .b32 %r<3>; frobnicate.u32 %r1, %r2; }\0"
# An address in a first value, and one with something added.
POINTERS = PTX.replace(
    b".visible .entry bump",
    b".visible .global .align 8 .u64 to[3] = {counter, 9, generic(table)+4};\n.visible .entry bump",
)


def add(state: Any, data: bytes, kind: Any = TEXT) -> Any:
    return cu.cuLinkAddData(state, kind, data, len(data), b"input", 0, [], [])


def linked(ptx: bytes = PTX) -> bytes:
    """A copy of what the linker makes of it."""
    state = ok(cu.cuLinkCreate(0, [], []))
    ok(add(state, ptx))
    cubin, size = ok(cu.cuLinkComplete(state))
    code = ctypes.string_at(cubin, size)
    ok(cu.cuLinkDestroy(state))
    return code


def architecture() -> int:
    kind = cu.CUdevice_attribute
    major = ok(cu.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0))
    minor = ok(cu.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0))
    return int(10 * major + minor)


def counts(module: Any) -> None:
    """The module's kernel counts in the module's variable."""
    counter, size = ok(cu.cuModuleGetGlobal(module, b"counter"))
    assert (size, download(int(counter), 1)[0]) == (4, 5)
    table, size = ok(cu.cuModuleGetGlobal(module, b"table"))
    assert (size, list(download(int(table), 2))) == (8, [11, 22])
    bump = ok(cu.cuModuleGetFunction(module, b"bump"))
    for _ in range(2):
        ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    assert download(int(counter), 1)[0] == 7


@case()
def linked_ptx_loads_in_every_way() -> None:
    start()
    code = linked()
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 190
    counts(ok(cu.cuModuleLoadData(code)))
    counts(ok(cu.cuModuleLoadDataEx(code, 0, [], [])))
    binary = container(entry(code, "none", kind=2, architecture=architecture()))
    counts(ok(cu.cuModuleLoadData(binary)))
    counts(ok(cu.cuModuleLoadFatBinary(binary)))
    library = ok(cu.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    counts(ok(cu.cuLibraryGetModule(library)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "linked.cubin")
        file.write_bytes(code)
        counts(ok(cu.cuModuleLoad(bytes(file))))


@case()
def what_the_linker_has_made_is_there_until_its_state_goes() -> None:
    start()
    state = ok(cu.cuLinkCreate(0, [], []))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "code.ptx")
        refuses(cu.cuLinkAddFile(state, TEXT, bytes(file), 0, [], []), "FILE_NOT_FOUND")
        file.write_bytes(PTX[:-1])
        ok(cu.cuLinkAddFile(state, TEXT, bytes(file), 0, [], []))
    cubin, _ = ok(cu.cuLinkComplete(state))
    module = ctypes.c_void_p()
    for _ in range(2):
        assert libcuda().cuModuleLoadData(ctypes.byref(module), ctypes.c_void_p(int(cubin))) == 0
    ok(cu.cuLinkDestroy(state))
    counts(cu.CUmodule(module.value))


@case()
def addresses_in_first_values_are_those_of_the_module() -> None:
    start()
    code = linked(POINTERS)
    for _ in range(2):
        module = ok(cu.cuModuleLoadData(code))
        places = {
            name: int(ok(cu.cuModuleGetGlobal(module, name))[0])
            for name in (b"to", b"counter", b"table")
        }
        wanted = [places[b"counter"], 9, places[b"table"] + 4]
        assert list(download(places[b"to"], 3, np.uint64)) == wanted
        counts(module)


@case()
def the_linker_says_what_is_wrong_with_its_input() -> None:
    start()
    log = ctypes.create_string_buffer(4096)
    options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 4096)
    state = ctypes.c_void_p()
    driver = libcuda()
    assert driver.cuLinkCreate_v2(2, options, values, ctypes.byref(state)) == 0
    code = driver.cuLinkAddData_v2(state, 1, BAD, ctypes.c_size_t(len(BAD)), b"bad", 0, None, None)
    assert code == int(R.CUDA_ERROR_INVALID_PTX)
    assert b"frobnicate" in log.value
    assert driver.cuLinkDestroy(state) == 0


@case()
def a_cubin_is_no_input_of_the_linker() -> None:
    start()
    state = ok(cu.cuLinkCreate(0, [], []))
    refuses(add(state, linked(), KIND.CU_JIT_INPUT_CUBIN), "NO_BINARY_FOR_GPU")
    ok(cu.cuLinkDestroy(state))


@case()
def the_linker_wants_a_context() -> None:
    ok(cu.cuInit(0))
    refuses(cu.cuLinkCreate(0, [], []), "INVALID_CONTEXT")


@case(emulated=True)
def the_linker_refuses_what_makes_no_sense() -> None:
    start()
    driver = libcuda()
    state = ok(cu.cuLinkCreate(0, [], []))
    own = ctypes.c_void_p(int(state))
    size, cubin = ctypes.c_size_t(4), ctypes.c_void_p()
    invalid = int(R.CUDA_ERROR_INVALID_VALUE)
    assert driver.cuLinkCreate_v2(0, None, None, None) == invalid
    assert driver.cuLinkCreate_v2(1, None, None, ctypes.byref(cubin)) == invalid
    assert driver.cuLinkAddData_v2(own, 1, None, size, None, 0, None, None) == invalid
    assert driver.cuLinkAddData_v2(own, 1, PTX, ctypes.c_size_t(0), None, 0, None, None) == invalid
    assert driver.cuLinkAddData_v2(own, 77, PTX, size, None, 0, None, None) == invalid
    assert driver.cuLinkAddFile_v2(own, 1, None, 0, None, None) == invalid
    assert driver.cuLinkComplete(own, None, None) == invalid
    assert driver.cuLinkComplete(own, ctypes.byref(cubin), None) == invalid  # without input
    for kind, code in (("FATBINARY", "UNKNOWN"), ("OBJECT", "UNKNOWN"), ("NVVM", "NOT_SUPPORTED")):
        refuses(add(state, PTX, getattr(KIND, f"CU_JIT_INPUT_{kind}")), code)
    ok(add(state, PTX))
    refuses(add(state, PTX), "NOT_SUPPORTED")
    ok(cu.cuLinkComplete(state))
    assert driver.cuLinkComplete(own, ctypes.byref(cubin), None) == 0
    refuses(add(state, PTX), "INVALID_VALUE")
    ok(cu.cuLinkDestroy(state))
    for gone in (state, cu.CUlinkState(0), cu.CUlinkState(0x1230)):
        refuses(add(gone, PTX), "INVALID_HANDLE")
        refuses(cu.cuLinkComplete(gone), "INVALID_HANDLE")
        refuses(cu.cuLinkDestroy(gone), "INVALID_HANDLE")


@case(emulated=True)
def the_logs_of_an_input_come_before_those_of_the_linker() -> None:
    start()
    driver = libcuda()
    logs = [ctypes.create_string_buffer(64) for _ in range(4)]
    options = (ctypes.c_int * 4)(3, 4, 5, 6)  # the log of information, that of errors, their sizes
    outer, inner = (
        (ctypes.c_void_p * 4)(ctypes.addressof(info), 64, ctypes.addressof(error), 64)
        for info, error in (logs[:2], logs[2:])
    )
    state = ctypes.c_void_p()
    size = ctypes.c_size_t(len(BAD))
    assert driver.cuLinkCreate(4, options, outer, ctypes.byref(state)) == 0
    for _ in range(2):  # the sizes are those at the creation
        assert driver.cuLinkAddData(state, 1, BAD, size, None, 0, None, None) == 218
        assert logs[1].value and outer[3] == len(logs[1].value) and outer[1] is None
    logs[1].value = b""
    assert driver.cuLinkAddData(state, 1, BAD, size, None, 4, options, inner) == 218
    assert logs[3].value and inner[3] == len(logs[3].value) and not logs[1].value
    assert driver.cuLinkDestroy(state) == 0
