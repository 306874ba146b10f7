"""The memory stub with the intercept library in a program: what the coordinator takes for active.

The frameworks are small libraries of the same interfaces (programs/frameworks.cpp), loaded as
Python loads extension modules.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.active import active_ranges, merge
from flowgpu import launch, live
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import PROGRAMS, Connection, Coordinator, Ghost, Program
from tests.patience import SECONDS

MIB = 1 << 20
Job = tuple[Coordinator, Program, Connection]

LOAD = """
import ctypes
torch = ctypes.CDLL({cuda!r}, mode=0)  # RTLD_LOCAL
core = ctypes.CDLL({core!r}, mode=0)
core.profiled_bytes.restype = ctypes.c_int64
def report(address, size, device=0):
    torch.report(ctypes.c_uint64(address), ctypes.c_int64(size), device)
"""

CAPTURE = (
    LOAD
    + """
import os
import numpy as np
from coordinator.active import GRANULE, look_at
from coordinator.live_set import LiveSet
cuda = stub = ctypes.CDLL(None)
assert cuda.cuInit(0) == 0
stream, graph = ctypes.c_void_p(16), ctypes.c_void_p()
blocks = [0x200000000000 + i * (64 << 20) for i in range(3)]
report(blocks[0], 512)
assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
report(blocks[1], 512)
assert cuda.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
report(blocks[2], 512)
rows = np.array([[block, GRANULE, block] for block in blocks], np.uint64)
for known in look_at(LiveSet(os.dup(stub.flowgpu_memstub_fd())), rows).known:
    print(not known)
"""
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("frameworks")
    made = {part: str(folder / f"lib{part}.so") for part in ("core", "cuda", "bfc")}
    for part, path in made.items():
        needs = [f"-L{folder}", "-lcore", f"-Wl,-rpath,{folder}"] if part == "cuda" else []
        subprocess.run(
            ["c++", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared",
             "-fvisibility=hidden", f"-DPART_{part.upper()}", str(PROGRAMS / "frameworks.cpp"),
             "-o", path, *needs],
            check=True,
        )  # fmt: skip
    return made


@pytest.fixture
def framework_job(tmp_path: Path, libraries: dict[str, str]) -> Iterator[Job]:
    with lib.job(tmp_path) as made:
        made[1].do(LOAD.format(**libraries))
        yield made


def together(*ranges: list[int]) -> list[list[int]]:
    """Ranges as the coordinator gives them: sorted, with neighbours as one."""
    merged: list[list[int]] = merge(np.array(ranges, np.uint64).reshape(-1, 2)).tolist()
    return merged


def active(task: Connection) -> list[list[int]]:
    """Take the task through a hand-over and back; the active ranges at its hand-over."""
    ghost = Ghost()
    try:
        lib.export(task, ghost)
        task.close_gate()
        assert task.live
        task.ok(lib.Message.HANDOVER)
        rows = np.array([[r.address, r.size, r.place] for r in ghost.allocations], np.uint64)
        found: list[list[int]] = active_ranges(rows.reshape(-1, 3), task.live).tolist()
        assert lib.map_back(task, ghost).status == lib.Status.OK
        task.ok(lib.Message.OPEN)
    finally:
        ghost.close()
    return found


def test_a_task_closes_its_gate_at_the_low_point_of_a_step(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do(
        """
import threading, time
pool = int(ok(cu.cuMemAlloc(8 * MIB)))
report(pool, 1024)
def steps():
    while True:
        report(pool + MIB, MIB)  # high for 4 ms, low for some 0.3 ms
        time.sleep(0.004)
        report(pool + MIB, -MIB)
        until = time.perf_counter() + 0.0003
        while time.perf_counter() < until:
            cu.cuCtxGetCurrent()
        cu.cuCtxSynchronize()
threading.Thread(target=steps, daemon=True).start()
"""
    )
    assert task.live
    for _ in range(5):
        reply = task.gate(wait_ms=60_000, live_bytes=1024)
        assert reply.status == lib.Status.OK and reply.waited_us < 60_000_000
        time.sleep(0.02)
        assert task.live.live_bytes() == 1024
        task.ok(lib.Message.OPEN)
    # Below what it ever has, it is waited for no longer than allowed.
    assert 50_000 <= task.gate(wait_ms=50, live_bytes=1).waited_us < 5_000_000
    task.ok(lib.Message.OPEN)


def test_in_the_last_quarter_of_the_wait_somewhat_more_is_low_enough(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do("report(int(ok(cu.cuMemAlloc(8 * MIB))), 10400)")
    assert 4_500_000 <= task.gate(wait_ms=6000, live_bytes=10000).waited_us < 6_000_000
    task.ok(lib.Message.OPEN)
    assert task.gate(wait_ms=600, live_bytes=9900).waited_us >= 600_000
    task.ok(lib.Message.OPEN)


def test_a_gate_that_closed_too_late_for_the_low_point_opens_again(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do(
        """
import threading, time
pool = int(ok(cu.cuMemAlloc(256 * MIB)))
host = bytearray(256 * MIB)
report(pool, 1024)
report(pool + MIB, MIB)
copying = threading.Event()
context = ok(cu.cuCtxGetCurrent())
passed = 0
def copies():
    ok(cu.cuCtxSetCurrent(context))
    while True:
        copying.set()
        ok(cu.cuMemcpyDtoH(host, pool, len(host)))  # takes far more than 15 ms
def lows():
    global passed
    while True:
        copying.wait()
        copying.clear()
        time.sleep(0.005)
        report(pool + MIB, -MIB)
        time.sleep(0.01)
        report(pool + MIB, MIB)
        passed += 1
for body in (copies, lows):
    threading.Thread(target=body, daemon=True).start()
"""
    )
    assert task.live

    def passes() -> int:
        """Low points that pass while the gate is to close. Behind a closed one none begins."""
        before = int(program.do("passed"))  # type: ignore[call-overload]
        assert task.gate(wait_ms=2000, live_bytes=1024).status == lib.Status.OK
        after = int(program.do("passed"))  # type: ignore[call-overload]
        task.ok(lib.Message.OPEN)
        return after - before

    # When it is low, the other thread is in a call that ends when it is high, unless it has lost
    # its processor before that call.
    assert any(passes() > 2 for _ in range(10))


def test_a_task_and_the_coordinator_read_the_same_in_a_sum(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do("pool = int(ok(cu.cuMemAlloc(8 * MIB)))\nreport(pool, 1024)")
    assert task.live
    most = 1 << 40

    def says_nothing(value: int, at: int) -> bool:
        """True if the set tells both readers nothing while its header has this word."""
        assert task.live
        before = os.pread(task.live._fd, 8, at)
        os.pwrite(task.live._fd, struct.pack("=q", value), at)
        waited = task.gate(wait_ms=50, live_bytes=most).waited_us >= 50_000
        task.ok(lib.Message.OPEN)
        assert (task.live.live_bytes() is None) == waited
        os.pwrite(task.live._fd, before, at)
        return waited

    last_sum = live.Header.SIZE - 8
    assert not says_nothing(0, last_sum)
    assert says_nothing(-4096, last_sum)
    assert not says_nothing(-1024, last_sum)
    # The coordinator looks at the version when the task connects.
    os.pwrite(task.live._fd, struct.pack("=H", live.VERSION + 1), 4)
    assert task.gate(wait_ms=50, live_bytes=most).waited_us >= 50_000
    task.ok(lib.Message.OPEN)


def test_only_live_blocks_of_the_framework_are_active(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do("pool, own, small = (int(ok(cu.cuMemAlloc(n))) for n in (8 * MIB, 3 * MIB, 700))")
    pool, own, small = program.do("[pool, own, small]")
    strangers = [[own, 3 * MIB], [small, 700]]
    assert active(task) == together([pool, 8 * MIB], *strangers)
    program.do("report(pool, 1024); report(pool + 4 * MIB, 512)")
    assert task.live and task.live.live_bytes() == 1536
    assert active(task) == together([pool, 1024], [pool + 4 * MIB, 512], *strangers)
    program.do("report(pool, -1024)")
    assert task.live.live_bytes() == 512
    assert active(task) == together([pool + 4 * MIB, 512], *strangers)
    program.do("report(pool + 4 * MIB, -512)")
    assert active(task) == together(*strangers)
    assert program.do("core.profiled_bytes()") == 0
    program.do("report(pool, 1024)")
    assert program.do("core.profiled_bytes()") == 1024  # a profiler goes on hearing of all


def test_memory_that_comes_anew_belongs_to_nobody(framework_job: Job) -> None:
    """What torch.cuda.empty_cache() gives back, a library may be given."""
    _, program, task = framework_job
    pool = program.do("pool = int(ok(cu.cuMemAlloc(4 * MIB))); report(pool, 512); pool")
    program.do("report(pool, -512)")
    assert active(task) == []
    again = program.do("ok(cu.cuMemFree(pool)); int(ok(cu.cuMemAlloc(4 * MIB)))")
    assert again == pool
    assert active(task) == [[pool, 4 * MIB]]


def test_pools_of_graphs_are_active_as_a_whole(framework_job: Job) -> None:
    _, program, task = framework_job
    pool, private = program.do(
        "pool, private = (int(ok(cu.cuMemAlloc(n * MIB))) for n in (4, 6)); [pool, private]"
    )
    program.do("report(pool, 512)")
    # The count of captures is the test's.
    program.do("""
captures = ctypes.c_uint32(1)
stub = ctypes.CDLL(None)
stub.flowgpu_memstub_captures(ctypes.byref(captures))
report(private, 1024)
report(private, -1024)
captures.value = 0
stub.flowgpu_memstub_captures(ctypes.byref(captures))
report(pool + MIB, 512)
None
""")
    assert active(task) == together([pool, 512], [pool + MIB, 512], [private, 6 * MIB])


def test_the_stub_counts_the_captures_that_the_intercept_library_counts(
    tmp_path: Path, libraries: dict[str, str]
) -> None:
    """Over a driver that lets a stream be captured, which the emulated one does not."""
    driver = lib.compile_program("stub_driver.c", tmp_path / "driver.so", "-shared", "-fPIC")
    (tmp_path / "stats").write_bytes(bytes(4096))
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    environment |= {"FLOWGPU_REAL_LIBCUDA": str(driver), "STUB_STATS": str(tmp_path / "stats")}
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE.format(**libraries)],
        env=environment,
        cwd=lib.ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", "False"]


def test_memory_that_the_framework_maps_itself_is_followed(framework_job: Job) -> None:
    """Expandable segments do so: blocks lie over the borders of mappings."""
    _, program, task = framework_job
    address = program.do("""
properties = cu.CUmemAllocationProp()
properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access = cu.CUmemAccessDesc()
access.location = properties.location
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
space = int(ok(cu.cuMemAddressReserve(64 * MIB, 0, 0, 0)))
def extend(at):
    handle = ok(cu.cuMemCreate(2 * MIB, properties, 0))
    ok(cu.cuMemMap(space + at, 2 * MIB, 0, handle, 0))
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemSetAccess(space + at, 2 * MIB, [access], 1))
for i in range(4):
    extend(2 * i * MIB)
report(space + 512, 3 * MIB)
report(space + 4 * MIB, 512)
report(space + 4 * MIB, -512)
space
""")
    found = active(task)
    assert sum(size for _, size in found) == 3 * MIB + 2 * MIB  # the last was never used
    program.do("ok(cu.cuMemUnmap(space + 4 * MIB, 2 * MIB)); extend(4 * MIB)")
    assert sum(size for _, size in active(task)) == 3 * MIB + 4 * MIB
    assert address


def test_devices_are_counted_apart_and_together(tmp_path: Path, libraries: dict[str, str]) -> None:
    with lib.job(tmp_path, DEVICES="2") as (_, program, task):
        program.do(LOAD.format(**libraries))
        program.do("report(0x200000000000, 512, 0); report(0x300000000000, 1024, 1)")
        assert task.live and task.live.live_bytes() == 1536


def test_a_child_does_not_write_into_its_parents_set(framework_job: Job) -> None:
    _, program, task = framework_job
    program.do("report(0x200000000000, 512)")
    status = program.do("""
import os
import struct
child = os.fork()
if child == 0:
    report(0x200000000000, -512)
    report(0x200000400000, 4096)
    os._exit(0)
os.waitpid(child, 0)[1]
""")
    assert status == 0
    assert task.live and task.live.live_bytes() == 512


def test_an_allocator_with_virtual_functions_is_seen(
    tmp_path: Path, libraries: dict[str, str]
) -> None:
    with lib.job(tmp_path) as (_, program, task):
        program.do(f"import ctypes; bfc = ctypes.CDLL({libraries['bfc']!r}, mode=0)")
        program.do("bfc.allocate.restype = ctypes.c_void_p")
        address = program.do("a = bfc.allocate(ctypes.c_size_t(4096)); a")
        assert address and task.live and task.live.live_bytes() == 4096
        assert program.do("bfc.allocate(ctypes.c_size_t(2 << 30))") is None
        assert task.live.live_bytes() == 4096
        program.do("bfc.deallocate(ctypes.c_void_p(a))")
        assert task.live.live_bytes() == 0


def test_a_program_without_cuda_makes_nothing() -> None:
    code = "print(open('/proc/self/maps').read())"
    environment = dict(os.environ) | {"LD_PRELOAD": str(launch.memory_stub())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "libflowgpu_memstub" in done.stdout
    assert "flowgpu-live" not in done.stdout
