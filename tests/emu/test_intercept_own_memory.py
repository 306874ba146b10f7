"""Memory that the program maps itself leaves with a hand-over, comes back, answers as before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from flowgpu.wire import Message, Status
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import WINDOW, Connection, Coordinator, Ghost, Program
from tests.patience import SECONDS

MIB = 1 << 20
GRANULE = 2 * MIB
FIRST_HANDLE = 1 << 60
Job = tuple[Coordinator, Program, Connection]


@pytest.fixture
def task_job(tmp_path: Path) -> Iterator[Job]:
    with lib.job(tmp_path, DEVICES="2") as made:
        yield made


@pytest.fixture
def ghost() -> Iterator[Ghost]:
    made = Ghost()
    yield made
    made.close()


# A terabyte of addresses, as PyTorch reserves them. Segments that adjoin and a hole; a handle that
# is held, one that was released, one mapped twice, one mapped nowhere; memory for
# reading alone, memory for nobody, memory of the other device. All of it knows what it must hold.
MAKE = """
TIB = 1 << 40
base = int(ok(cu.cuMemAddressReserve(TIB, 0, 0, 0)))
def at(slot): return base + TIB // 2 + slot * GRANULE
def make(granules, device=0):
    return ok(cu.cuMemCreate(granules * GRANULE, properties(device, exportable=False), 0))
def put(slot, granules, handle):
    ok(cu.cuMemMap(at(slot), granules * GRANULE, 0, handle, 0))
    ok(allow(at(slot), granules * GRANULE))
def fill(slot, granules, value):
    ok(cu.cuMemsetD8(at(slot), value, granules * GRANULE))
def holds(slot, granules, value):
    return bool((download(at(slot), granules * GRANULE, np.uint8) == value).all())
kept, gone, twice, parked, apart, remote = (make(n, d) for n, d in
    ((3, 0), (2, 0), (1, 0), (2, 0), (2, 0), (1, 1)))
put(0, 3, kept); put(3, 2, gone); ok(cu.cuMemRelease(gone))
put(5, 1, twice); put(9, 1, twice)
put(12, 2, parked); fill(12, 2, 4); ok(cu.cuCtxSynchronize())
ok(cu.cuMemUnmap(at(12), 2 * GRANULE))
put(20, 2, apart)
put(30, 1, remote)
for slot, granules, value in ((0, 3, 1), (3, 2, 2), (5, 1, 3), (20, 2, 5), (30, 1, 6)):
    fill(slot, granules, value)
ok(cu.cuCtxSynchronize())
ok(allow(at(0), 5 * GRANULE, "READWRITE", 1))  # over two handles
ok(allow(at(20), 2 * GRANULE, "NONE"))
ok(allow(at(9), GRANULE, "READ"))
ok(allow(at(9), GRANULE, "READ", 1))
handles = [kept, gone, twice, parked, apart, remote]
"""
SEEN = """
location = cu.CUmemLocation(); location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
def flags(slot, device):
    location.id = device
    return int(ok(cu.cuMemGetAccess(location, at(slot))))
def retained(slot):
    found = ok(cu.cuMemRetainAllocationHandle(at(slot) + 7)); ok(cu.cuMemRelease(found))
    return int(found)
names = ["RANGE_START_ADDR", "RANGE_SIZE", "DEVICE_ORDINAL", "MEMORY_TYPE", "ALLOWED_HANDLE_TYPES"]
kinds = [getattr(cu.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + name) for name in names]
slots = (0, 3, 5, 9, 20, 30)
def prop(handle):
    said = ok(cu.cuMemGetAllocationPropertiesFromHandle(handle))
    return [int(said.requestedHandleTypes), int(said.location.id)]
def relative(values): return [int(values[0]) - base, *map(int, values[1:])]
def several(slot):  # the raw call: the bindings do not convert every one of these in a list
    asked = (ctypes.c_int * len(kinds))(*map(int, kinds))
    values = [ctypes.c_uint64() for _ in kinds]
    places = (ctypes.c_void_p * len(kinds))(*[ctypes.addressof(v) for v in values])
    code = libcuda().cuPointerGetAttributes(len(kinds), asked, places,
                                            ctypes.c_uint64(at(slot) + 7))
    assert code == 0, code
    return [v.value for v in values]
[[flags(s, d) for s in slots for d in (0, 1)],
 [retained(s) == int(handles[i]) for s, i in zip(slots, (0, 1, 2, 2, 4, 5))],
 [prop(h) for h in (kept, twice, parked, apart, remote)],
 [relative([ok(cu.cuPointerGetAttribute(k, at(s) + 7)) for k in kinds]) for s in slots],
 [relative(several(s)) for s in slots],
 [[int(r[0]), *([int(r[1]) - base, int(r[2])] if int(r[0]) == 0 else [])] for s in (*slots, 8, 21)
  for r in [cu.cuMemGetAddressRange(at(s) + 7)]]]
"""
CONTENTS = """
remains = [holds(0, 3, 1), holds(3, 2, 2), holds(5, 1, 3), holds(9, 1, 3), holds(30, 1, 6),
           cu.cuMemsetD8(at(20), 9, 1)[0].name, cu.cuMemsetD8(at(9), 9, 1)[0].name,
           cu.cuMemsetD8(at(8), 9, 1)[0].name]
ok(allow(at(20), 2 * GRANULE)); remains.append(holds(20, 2, 5))
ok(allow(at(20), 2 * GRANULE, "NONE"))
put(12, 2, parked); remains.append(holds(12, 2, 4)); ok(cu.cuMemUnmap(at(12), 2 * GRANULE))
start(1)
ok(launch_inc(function(b"inc"), at(0), 100)); ok(cu.cuCtxSynchronize())
start(0)
remains.append(int(download(at(0), 1)[0])); fill(0, 3, 1); ok(cu.cuCtxSynchronize())
remains
"""
TEAR_DOWN = """
for slot, granules in ((0, 5), (5, 1), (9, 1), (20, 2), (30, 1)):
    ok(cu.cuMemUnmap(at(slot), granules * GRANULE))
for handle in handles:
    if handle is not gone: ok(cu.cuMemRelease(handle))
    refuses(cu.cuMemRelease(handle), "INVALID_VALUE")
ok(cu.cuMemAddressFree(base, TIB))
"""
BLOCKS, BYTES = 6, (3 + 2 + 1 + 2 + 2 + 1) * GRANULE


def bare(folder: Path, *sources: str) -> list[object]:
    """What the driver answers without the library."""
    with Program(lib.bare_environment(folder, DEVICES="2")) as program:
        program.do("start()")
        return [program.do(source) for source in sources]


def round_trip(task: Connection, ghost: Ghost) -> None:
    lib.hand_over(task, ghost)
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)


def test_the_program_sees_what_it_would_see_without_the_library(
    tmp_path: Path, task_job: Job, ghost: Ghost
) -> None:
    _, program, task = task_job
    alone = tmp_path / "alone"
    alone.mkdir()
    expected = bare(alone, MAKE, SEEN, CONTENTS, TEAR_DOWN)
    before = [program.do(source) for source in (MAKE, SEEN, CONTENTS)]
    assert before == expected[:3]
    for _ in range(2):
        round_trip(task, ghost)
        assert [program.do(SEEN), program.do(CONTENTS)] == expected[1:3]
        ghost.close()
        ghost.__init__()  # type: ignore[misc]
    program.do(TEAR_DOWN)
    assert (task.page.allocations, task.page.blocks, task.page.foreign_bytes) == (0, 0, 0)


def test_its_memory_leaves_with_the_handover(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    free = "ok(cu.cuMemGetInfo())[0]"
    before = program.do(free)
    program.do(MAKE)
    page = task.page
    assert (page.allocations, page.allocation_bytes) == (BLOCKS, BYTES)
    assert (page.blocks, page.block_bytes, page.foreign_bytes) == (BLOCKS, BYTES, 0)
    lib.hand_over(task, ghost)
    rows = sorted(ghost.rows.values(), key=lambda row: row.address)
    assert [row.size // GRANULE for row in rows] == [3, 2, 1, 2, 2, 1]
    assert [row.device for row in rows] == [0, 0, 0, 0, 0, 1]
    assert rows[0].address >= FIRST_HANDLE
    for row, following in pairwise(rows):
        assert row.address + row.size <= following.address
    # Nothing of it is left to the engine: what the driver would save is all in the ghost's hands.
    assert lib.map_back(task, ghost).blocks == BLOCKS
    task.ok(Message.OPEN)
    program.do(TEAR_DOWN)
    ghost.close()
    # The device looks after exported memory now and then. The room stays with the context.
    after = before - lib.ROOM_BYTES
    lib.wait_until(lambda: bool(program.do(free) == after), "the end of the memory")


def test_handles_come_and_go_between_export_and_gate(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(MAKE)
    lib.export(task, ghost)
    program.do("fresh = make(2); put(40, 2, fresh); fill(40, 2, 7); ok(cu.cuMemRelease(fresh))")
    program.do("ok(cu.cuMemUnmap(at(5), GRANULE)); ok(cu.cuMemUnmap(at(9), GRANULE));"
               "ok(cu.cuMemRelease(twice))")  # fmt: skip
    # Another address is nothing new to the ghost: a block is known by its handle.
    program.do("ok(cu.cuMemUnmap(at(0), 3 * GRANULE)); put(50, 3, kept)")
    task.close_gate()
    task.ok(Message.HANDOVER)
    assert len(ghost.rows) == BLOCKS + 1 and len(ghost.live) == BLOCKS
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do("[holds(40, 2, 7), holds(50, 3, 1), holds(3, 2, 2)]") == [True] * 3


def test_a_block_that_comes_late_is_mapped_then(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(MAKE)
    before = program.do(SEEN)
    lib.hand_over(task, ghost)
    late = {block for block in ghost.live if ghost.rows[block].size == GRANULE}
    assert lib.map_back(task, ghost, lambda block: block not in late).status == Status.LOST
    assert task.ask(Message.OPEN).status == Status.PROTOCOL
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    assert program.do(SEEN) == before


def test_a_device_that_had_no_access_has_none_afterwards(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(MAKE)
    round_trip(task, ghost)
    program.do("start(1); inc = function(b'inc'); ok(launch_inc(inc, at(5), 100))")
    program.do("refuses(cu.cuCtxSynchronize(), 'ILLEGAL_ADDRESS')")


def test_a_handle_is_the_same_number_for_its_life_and_never_again(task_job: Job) -> None:
    _, program, _ = task_job
    program.do(MAKE)
    numbers = program.do("[int(handle) for handle in handles]")
    assert len(set(numbers)) == len(numbers) and min(numbers) >= FIRST_HANDLE
    assert program.do("int(make(1))") not in numbers


def test_exported_memory_is_shared_before_and_after_a_checkpoint(
    task_job: Job, ghost: Ghost
) -> None:
    _, program, task = task_job
    program.do("memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))")
    lib.export(task, ghost)
    task.ok(Message.DROP)
    program.do("fd = int(ok(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0)))\n"
               "again = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))\n"
               "va = int(ok(cu.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))\n"
               "ok(cu.cuMemMap(va, GRANULE, 0, memory, 0))\n"
               "ok(cu.cuMemMap(va + GRANULE, GRANULE, 0, again, 0))\n"
               "ok(allow(va, 2 * GRANULE)); ok(cu.cuMemsetD8(va, 5, GRANULE))")  # fmt: skip
    assert program.do("int(download(va + GRANULE, 1, np.uint8)[0])") == 5
    assert program.do("int(again)") >= FIRST_HANDLE
    # An import cannot be exported: the driver refuses it too.
    program.do("refuses(cu.cuMemExportToShareableHandle(again, fd_kind(), 0), 'INVALID_VALUE')")
    second = Ghost()
    round_trip(task, second)
    own, imported = (second.rows[number] for number in sorted(second.rows))
    assert (imported.owner_id, imported.owner_low) == (own.id, task.hello.token_low)
    assert own.owner_id == own.owner_low == own.owner_high == 0 and second.askers == {}
    second.close()
    program.do("ok(cu.cuMemsetD8(va + GRANULE, 6, GRANULE))")
    assert program.do("int(download(va, 1, np.uint8)[0])") == 6
    program.do("last = ok(cu.cuMemImportFromShareableHandle(fd, fd_kind()))")
    assert program.do("int(last) == int(again)")


def test_imports_leave_the_program_the_descriptors_that_it_may_have(task_job: Job) -> None:
    _, program, task = task_job
    taken = program.do(
        "import os, resource\n"
        "count = len(os.listdir('/proc/self/fd')) + 20\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE,"
        " (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "imports = []\n"
        "for _ in range(40):\n"
        "    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))\n"
        "    fd = int(ok(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0)))\n"
        "    imports.append(ok(cu.cuMemImportFromShareableHandle(fd, fd_kind())))\n"
        "    os.close(fd)\n"
        "[resource.getrlimit(resource.RLIMIT_NOFILE)[0] == count, len(set(map(int, imports)))]"
    )
    assert taken == [True, 40]
    task.close_gate()
    task.ok(Message.OPEN)


def test_memory_that_asked_for_no_handle_type_cannot_be_exported(task_job: Job) -> None:
    _, program, task = task_job
    program.do("memory = ok(cu.cuMemCreate(GRANULE, properties(exportable=False), 0))")
    program.do("refuses(cu.cuMemExportToShareableHandle(memory, fd_kind(), 0), 'INVALID_VALUE')")
    task.close_gate()
    task.ok(Message.OPEN)


def test_what_was_asked_for_stays_true_of_an_import(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do("wanted = properties(); wanted.allocFlags.gpuDirectRDMACapable = 1\n"
               "memory = ok(cu.cuMemCreate(GRANULE, wanted, 0))")  # fmt: skip
    for _ in range(2):
        said = program.do(
            "said = ok(cu.cuMemGetAllocationPropertiesFromHandle(memory))\n"
            "[int(said.allocFlags.gpuDirectRDMACapable), int(said.requestedHandleTypes)]"
        )
        assert said == [1, 1]
        if not ghost.live:
            round_trip(task, ghost)


FOREIGN_TO_VMM = """
held = int(ok(cu.cuMemAlloc(4 * GRANULE))); memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
[cu.cuMemUnmap(held, 4 * GRANULE)[0].name, allow(held, 4 * GRANULE)[0].name,
 cu.cuMemMap(held, GRANULE, 0, memory, 0)[0].name, cu.cuMemMap(0, GRANULE, 0, memory, 0)[0].name,
 cu.cuMemRetainAllocationHandle(held)[0].name, cu.cuMemRelease(12345)[0].name,
 cu.cuMemUnmap(0, GRANULE)[0].name, cu.cuMemMap(held, GRANULE, 0, 999, 0)[0].name,
 cu.cuMemGetAllocationPropertiesFromHandle(999)[0].name,
 *(cu.cuMemCreate(size, properties(device), flags)[0].name
   for size, device, flags in ((GRANULE + 1, 0, 0), (0, 0, 0), (GRANULE, 7, 0), (GRANULE, 0, 1)))]
"""


def test_memory_from_cumemalloc_is_no_mapping(tmp_path: Path, task_job: Job) -> None:
    """The window's mappings are not the program's to change, and wrong calls fail as they would."""
    _, program, _ = task_job
    alone = tmp_path / "alone"
    alone.mkdir()
    assert [program.do(FOREIGN_TO_VMM)] == bare(alone, FOREIGN_TO_VMM)
    assert program.do("held") >= WINDOW
    program.do("ok(cu.cuMemsetD8(held, 1, 4 * GRANULE)); ok(cu.cuMemFree(held))")


def test_without_any_other_memory_or_context_a_handle_goes_and_comes(
    task_job: Job, ghost: Ghost
) -> None:
    _, program, task = task_job
    program.do("memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))\n"
               "ok(cu.cuDevicePrimaryCtxReset(0))")  # fmt: skip
    round_trip(task, ghost)
    program.do("start(); ok(cu.cuMemRelease(memory))")
    assert task.page.blocks == 0


def test_a_forked_child_leaves_the_parents_memory_alone(task_job: Job, ghost: Ghost) -> None:
    _, program, task = task_job
    program.do(MAKE)
    lib.hand_over(task, ghost)
    assert lib.map_back(task, ghost).status == Status.OK
    task.ok(Message.OPEN)
    code = program.do("import os\nchild = os.fork()\nif child == 0: os._exit(0)\n"
                      "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])")  # fmt: skip
    assert code == 0 and program.do("holds(0, 3, 1)")


# This program prints if memory that the ghost creates is capable of RDMA, and if the device offers
# that.
GHOSTS_MEMORY = """
from coordinator.device import CudaDriver
ghost = CudaDriver()
cu = ghost._cu
handle, _ = ghost.create_block(0, ghost.granularity(0))
found = ghost._call("cuMemGetAllocationPropertiesFromHandle", handle)
offer = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
print(found.allocFlags.gpuDirectRDMACapable, ghost._call("cuDeviceGetAttribute", offer, 0))
"""


@pytest.mark.parametrize("lane", ["emulated", pytest.param("nvidia", marks=pytest.mark.gpu)])
def test_memory_that_the_ghost_creates_is_capable_of_rdma(lane: str, tmp_path: Path) -> None:
    environment = lib.bare_environment(tmp_path) if lane == "emulated" else dict(os.environ)
    words = [sys.executable, "-c", GHOSTS_MEMORY]
    said = subprocess.check_output(words, env=environment, cwd=lib.ROOT, text=True, timeout=SECONDS)
    assert said in (["1 1\n"] if lane == "emulated" else ["0 0\n", "1 1\n"])
