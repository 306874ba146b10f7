"""Module variables under replay: nothing of a program changes by where they lie.

Each program runs prepared and plain, and must be answered alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.launch import GpuKind
from tests.emu.replay_cases import PRELUDE
from tests.emu.test_replay import LANES, Task, task_on


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> GpuKind:
    kind: GpuKind = request.param
    return kind


@pytest.fixture(params=[True, False], ids=["prepared", "plain"])
def either(lane: GpuKind, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Task]:
    with task_on(lane, tmp_path, replay=request.param) as task:
        task.do(PRELUDE)
        yield task


@pytest.fixture
def prepared(lane: GpuKind, tmp_path: Path) -> Iterator[Task]:
    with task_on(lane, tmp_path) as task:
        task.do(PRELUDE)
        yield task


LIBRARY = """
library = ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"read"))
read = cu.CUfunction(int(kernel))
"""


@pytest.mark.parametrize("first", ["table", "counter"])
def test_whichever_variable_is_asked_for_first(either: Task, first: str) -> None:
    either.do(LIBRARY)
    either.do(f"place = int(ok(cu.cuLibraryGetGlobal(library, {first.encode()!r}))[0])")
    assert either.do("value_of(place)") == {"table": 11, "counter": 5}[first]
    either.do("ok(cu.cuMemsetD32(place, 33, 1))")
    assert either.do("read_by(read)") == {"table": [5, 33], "counter": [33, 11]}[first]
    assert either.do("name(cu.cuMemFree(place))") == "INVALID_VALUE"
    size = {"table": 8, "counter": 4}[first]
    asked = "[int(v) for v in ok(cu.cuMemGetAddressRange(place))] == [place, {}]"
    assert either.do(asked.format(size))


def test_a_variable_of_a_module_that_is_loaded_and_asked_in_a_capture(either: Task) -> None:
    either.do("""
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
module = ok(cu.cuModuleLoadData(VARIABLES))
read = ok(cu.cuModuleGetFunction(module, b"read"))
counter = int(ok(cu.cuModuleGetGlobal(module, b"counter"))[0])
ok(cu.cuMemsetD32(counter, 77, 1))
ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(stream))))
""")
    assert either.do("[*read_by(read), value_of(counter)]") == [77, 11, 77]


def test_a_variable_that_is_asked_for_while_another_context_is_current(either: Task) -> None:
    either.do("""
module = ok(cu.cuModuleLoadData(VARIABLES))
read = ok(cu.cuModuleGetFunction(module, b"read"))
second = ok(cu.cuCtxCreate(None, 0, device))
counter = int(ok(cu.cuModuleGetGlobal(module, b"counter"))[0])
ok(cu.cuCtxPopCurrent())
ok(cu.cuMemsetD32(counter, 77, 1))
""")
    assert either.do("[*read_by(read), value_of(counter)]") == [77, 11, 77]


@pytest.mark.parametrize("launched", [True, False])
def test_a_library_is_as_new_once_the_context_has_ended(either: Task, launched: bool) -> None:
    either.do(LIBRARY)
    either.do("""
counter = int(ok(cu.cuLibraryGetGlobal(library, b"counter"))[0])
ok(cu.cuMemsetD32(counter, 77, 1))
""")
    if launched:
        assert either.do("read_by(read)") == [77, 11]
    either.do("""
ok(cu.cuDevicePrimaryCtxReset(device))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
mine = [int(ok(cu.cuMemAlloc(4096))) for _ in range(20)]
for each in mine:
    ok(cu.cuMemsetD32(each, 99, 1024))
""")
    assert either.do("read_by(read)") == [5, 11]
    either.do("ok(cu.cuLibraryUnload(library))")
    assert either.do("[name(cu.cuMemFree(each)) for each in mine]") == ["CUDA_SUCCESS"] * 20


def test_threads_find_one_kernel_while_another_asks_for_a_variable(either: Task) -> None:
    either.do("""
import threading
counts = []
for _ in range(40):
    library = ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0))
    barrier, found = threading.Barrier(2), set()
    def find():
        ok(cu.cuCtxSetCurrent(primary))
        barrier.wait()
        for _ in range(20):
            found.add(int(ok(cu.cuLibraryGetKernel(library, b"read"))))
    thread = threading.Thread(target=find)
    thread.start()
    barrier.wait()
    counter = int(ok(cu.cuLibraryGetGlobal(library, b"counter"))[0])
    thread.join()
    ok(cu.cuMemsetD32(counter, 7, 1))
    counts.append([len(found), read_by(cu.CUfunction(found.pop()))[0]])
    ok(cu.cuLibraryUnload(library))
""")
    assert either.do("counts") == [[1, 7]] * 40


def test_a_child_finds_no_lock_taken(either: Task) -> None:
    either.do("""
import os, threading, time
codes = []
for turn in range(20):
    library, other = (ok(cu.cuLibraryLoadData(VARIABLES, [], [], 0, [], [], 0)) for _ in range(2))
    add = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(other, b"add"))))
    barrier = threading.Barrier(2)
    def find():
        ok(cu.cuCtxSetCurrent(primary))
        barrier.wait()
        ok(cu.cuLibraryGetGlobal(library, b"counter"))
    thread = threading.Thread(target=find)
    thread.start()
    barrier.wait()
    time.sleep(0.0003 * (turn % 10))
    child = os.fork()
    if child == 0:
        os._exit(int(cu.cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    thread.join()
""")
    assert either.do("codes") == [3] * 20  # CUDA_ERROR_NOT_INITIALIZED


def test_a_module_outlives_the_library_that_its_code_lay_in(either: Task) -> None:
    either.do("""
import _ctypes, subprocess
folder = pathlib.Path(tempfile.mkdtemp())
code = ",".join(str(byte) for byte in VARIABLES)
(folder / "code.c").write_text("const unsigned char code[] = {" + code + "};")
subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "code.so", folder / "code.c"], check=True)
plugin = ctypes.CDLL(str(folder / "code.so"))
library = ctypes.c_void_p()
image = ctypes.addressof(ctypes.c_char.in_dll(plugin, "code"))
lib.cuLibraryLoadData.argtypes = None
assert lib.cuLibraryLoadData(
    ctypes.byref(library), ctypes.c_void_p(image), None, None, 0, None, None, 0
) == 0
_ctypes.dlclose(plugin._handle)
library = cu.CUlibrary(library.value)
counter = int(ok(cu.cuLibraryGetGlobal(library, b"counter"))[0])
""")
    assert either.do("value_of(counter)") == 5


def test_code_of_a_library_that_was_unloaded_is_named(prepared: Task) -> None:
    prepared.do("""
import _ctypes, subprocess
folder = pathlib.Path(tempfile.mkdtemp())
def plugin(name, entry):
    code = ",".join(str(byte) for byte in VARIABLES.replace(b"entry add", entry))
    (folder / "code.c").write_text("const unsigned char code[] = {" + code + "};")
    words = ["gcc", "-shared", "-fPIC", "-o", folder / name, folder / "code.c"]
    subprocess.run(words, check=True)
    return str(folder / name)
def opened(path):
    found = ctypes.CDLL(path)
    return found, ctypes.addressof(ctypes.c_char.in_dll(found, "code"))
one, image = opened(plugin("one.so", b"entry add"))
others = [plugin(f"{number}.so", b"entry other") for number in range(20)]
lib.cuLibraryLoadData.argtypes = None
library = ctypes.c_void_p()
assert lib.cuLibraryLoadData(
    ctypes.byref(library), ctypes.c_void_p(image), None, None, 0, None, None, 0
) == 0
library = cu.CUlibrary(library.value)
""")
    prepared.checkpoint()
    prepared.do("_ctypes.dlclose(one._handle)")
    named = "a library of which the code lay in a library that was unloaded"
    assert prepared.ask().detail == named
    # One of these mostly comes to lie in its place.
    prepared.do("held = [opened(path) for path in others]")
    assert prepared.ask().detail == named
    prepared.do("ok(cu.cuLibraryUnload(library))")
    prepared.checkpoint()


def test_a_large_variable_is_not_there_twice(either: Task) -> None:
    either.do("""
extra = b".visible .global .align 4 .u32 many[33554432];\\n.visible .entry add"
large = VARIABLES.replace(b".visible .entry add", extra)
before = ok(cu.cuMemGetInfo())[0]
module = ok(cu.cuModuleLoadData(large))
run(ok(cu.cuModuleGetFunction(module, b"add")), 1)
used = before - ok(cu.cuMemGetInfo())[0]
""")
    assert 128 << 20 <= either.do("used") < 192 << 20


def test_reserved_addresses_are_not_taken_by_a_module_that_is_made_again(prepared: Task) -> None:
    prepared.do("""
reserved = int(ok(cu.cuMemAddressReserve(2 << 20, 2 << 20, 0, 0)))
module = ok(cu.cuModuleLoadData(VARIABLES))
""")
    for _ in range(3):
        prepared.checkpoint()
    assert prepared.do("name(cu.cuMemAddressFree(reserved, 2 << 20))") == "CUDA_SUCCESS"


def test_a_kernels_node_gets_the_constants_present_address(prepared: Task) -> None:
    # The first module's end leaves room where the second one's constants will be.
    prepared.do("""
gone, module = (ok(cu.cuModuleLoadData(VARIABLES)) for _ in range(2))
read = ok(cu.cuModuleGetFunction(module, b"read"))
table = int(ok(cu.cuModuleGetGlobal(module, b"table"))[0])
inc = function(b"inc")
ok(cu.cuModuleUnload(gone))
""")
    prepared.checkpoint()
    prepared.do("""
address, count = ctypes.c_uint64(table), ctypes.c_uint32(2)
arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
node = cu.CUDA_KERNEL_NODE_PARAMS()
node.func = inc
node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
node.blockDimX = 32
node.kernelParams = ctypes.addressof(arguments)
graph = ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddKernelNode(graph, [], 0, node))
made = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphLaunch(made, 0))
ok(cu.cuCtxSynchronize())
""")
    assert prepared.do("read_by(read)") == [5, 12]
    assert prepared.ask().detail == "a graph with the address of a constant"
