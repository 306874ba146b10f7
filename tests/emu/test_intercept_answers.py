"""Memory behind the intercept library answers as the driver's own memory does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import WINDOW, WINDOW_BYTES, Connection, Coordinator, Program

MIB = 1 << 20
GRANULE = 2 * MIB
SIZES = [1, 511, 512, 513, 300 * 1024, GRANULE - 1, GRANULE, GRANULE + 1, 5 * MIB + 3]
ALLOCATE = f"sizes = {SIZES}; held = [int(ok(cu.cuMemAlloc(n))) for n in sizes]\nheld"
FREE = "ok(cu.cuMemGetInfo())[0]"

Job = tuple[Coordinator, Program, Connection]


@pytest.fixture
def task_job(tmp_path: Path) -> Iterator[Job]:
    with lib.job(tmp_path) as made:
        yield made


def test_addresses_are_aligned_and_inside_one_window(task_job: Job) -> None:
    _, program, _ = task_job
    held = program.do(ALLOCATE)
    ranges = sorted(zip(held, SIZES, strict=True))
    assert all(address % 512 == 0 for address in held)
    assert ranges[0][0] >= WINDOW and ranges[-1][0] + ranges[-1][1] <= WINDOW + WINDOW_BYTES
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))


def test_address_ranges_are_those_of_the_allocation(task_job: Job) -> None:
    _, program, _ = task_job
    held = program.do(ALLOCATE)
    found = program.do(
        "[[list(map(int, ok(cu.cuMemGetAddressRange(a + at)))) for at in (0, n // 2, n - 1)]"
        " for a, n in zip(held, sizes)]"
    )
    assert found == [[[a, n]] * 3 for a, n in zip(held, SIZES, strict=True)]


PAST = """
first = int(ok(cu.cuMemAlloc(100))); last = int(ok(cu.cuMemAlloc(5 * MIB)))
kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
gaps = [first + 100, last + 5 * MIB, 0x2F00_0000_0000]
[[r[0].name for r in (cu.cuMemGetAddressRange(a), cu.cuPointerGetAttribute(kind, a),
  cu.cuMemFree(a), cu.cuMemRetainAllocationHandle(a))]
 + [int(ok(cu.cuPointerGetAttributes(1, [kind], a))[0])] for a in gaps]
"""


def test_what_no_allocation_covers_is_no_memory(tmp_path: Path) -> None:
    """The rest of a block, and the window behind it, look as they do without the library."""
    found = []
    for environment in (
        lib.bare_environment(tmp_path),
        lib.intercepted(lib.bare_environment(tmp_path), tmp_path),
    ):
        with Program(environment) as program:
            program.do("start()")
            found.append(program.do(PAST))
    assert found[0] == found[1]


def test_pointer_attributes_are_those_of_cumemalloc(task_job: Job) -> None:
    _, program, _ = task_job
    held = program.do(ALLOCATE)
    names = ["CONTEXT", "RANGE_START_ADDR", "RANGE_SIZE", "DEVICE_ORDINAL", "MEMORY_TYPE",
             "DEVICE_POINTER", "IS_LEGACY_CUDA_IPC_CAPABLE", "ALLOWED_HANDLE_TYPES"]  # fmt: skip
    program.do(
        f"ids = [getattr(cu.CUpointer_attribute, 'CU_POINTER_ATTRIBUTE_' + n) for n in {names}]"
    )
    context = program.do("int(ok(cu.cuCtxGetCurrent()))")
    for index, (address, size) in enumerate(zip(held, SIZES, strict=True)):
        inside = address + size // 2
        want = [context, address, size, 0, 2, inside, 1, 0]
        one = program.do(
            f"[int(ok(cu.cuPointerGetAttribute(i, held[{index}] + sizes[{index}] // 2)))"
            " for i in ids]"
        )
        assert one == want
        # The raw call: the bindings do not convert every one of these in a list.
        several = program.do(
            f"kinds = (ctypes.c_int * len(ids))(*map(int, ids))\n"
            "values = [ctypes.c_uint64() for _ in ids]\n"
            "places = (ctypes.c_void_p * len(ids))(*[ctypes.addressof(v) for v in values])\n"
            "code = libcuda().cuPointerGetAttributes(len(ids), kinds, places,"
            f" ctypes.c_uint64({inside}))\n"
            "[code, [v.value for v in values]]"
        )
        assert several == [0, want]


ASK = """
kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
def ask(a):
    return cu.cuPointerGetAttribute(kind, a)[0].name
"""


@pytest.mark.parametrize("end", ["cuMemFree(x)", "cuDevicePrimaryCtxReset(dev)"])
def test_an_answer_is_forgotten_with_the_memory(end: str, task_job: Job) -> None:
    _, program, _ = task_job
    program.do(ASK + "dev = ok(cu.cuDeviceGet(0)); x = int(ok(cu.cuMemAlloc(8 * MIB)))")
    inside = "[ask(x + 3 * MIB), ask(x + 3 * MIB), ask(x + 8 * MIB - 1)]"
    assert program.do(inside) == ["CUDA_SUCCESS"] * 3
    program.do(f"ok(cu.{end})")
    assert program.do(inside) == ["CUDA_ERROR_INVALID_VALUE"] * 3
    if "Reset" in end:
        program.do("ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(dev))))")
    # Two pieces have the same addresses, and leave a gap at their end.
    program.do("x = int(ok(cu.cuMemAlloc(3 * MIB))); y = int(ok(cu.cuMemAlloc(4 * MIB)))")
    assert program.do("y - x == 4 * MIB")
    assert program.do("[ask(x + 3 * MIB - 1), ask(x + 3 * MIB), ask(y)]") == [
        *("CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS")
    ]


@pytest.mark.parametrize(("width", "height", "element"), [(1, 1, 4), (512, 3, 8), (513, 100, 16)])
def test_pitched_memory_is_as_wide_as_it_says(
    width: int, height: int, element: int, task_job: Job
) -> None:
    _, program, task = task_job
    address, pitch = program.do(
        f"list(map(int, ok(cu.cuMemAllocPitch({width}, {height}, {element}))))"
    )
    assert pitch % 512 == 0 and width <= pitch < width + 512
    assert program.do(f"int(ok(cu.cuMemGetAddressRange({address}))[1])") == pitch * height
    assert task.page.allocation_bytes == pitch * height
    program.do(f"ok(cu.cuMemFree({address}))")


@pytest.mark.parametrize(
    "call", ["cu.cuMemAlloc(0)", "cu.cuMemAllocPitch(0, 1, 4)", "cu.cuMemAllocPitch(4, 0, 4)",
             "cu.cuMemAllocPitch(4, 4, 3)"],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(call: str, task_job: Job) -> None:
    _, program, task = task_job
    program.do(f"refuses({call}, 'INVALID_VALUE')")
    assert task.page.allocations == 0


def test_only_what_was_allocated_can_be_freed_and_only_once(task_job: Job) -> None:
    _, program, task = task_job
    program.do(ALLOCATE)
    program.do("[refuses(cu.cuMemFree(a + n // 2), 'INVALID_VALUE')"
               " for a, n in zip(held, sizes) if n > 1]")  # fmt: skip
    program.do(f"refuses(cu.cuMemFree({WINDOW + (1 << 40)}), 'INVALID_VALUE')")
    assert task.page.allocations == len(SIZES)
    program.do("[ok(cu.cuMemFree(a)) for a in held]; ok(cu.cuMemFree(0))")
    program.do("[refuses(cu.cuMemFree(a), 'INVALID_VALUE') for a in held]")
    assert (task.page.allocations, task.page.allocation_bytes) == (0, 0)


@pytest.mark.parametrize("engine", [{}, {"FLOWGPU_REPLAY": "1"}], ids=["native", "replay"])
@pytest.mark.parametrize("size", [64 * 1024, MIB, GRANULE, 3 * MIB, 8 * MIB])
def test_memory_runs_out_where_it_does_without_the_library(
    size: int, engine: dict[str, str], tmp_path: Path
) -> None:
    """Each block is rounded to 2 MiB; blocks of small allocations have no rest for whole parts."""
    memory = 64 * MIB
    fill = f"""
free = ok(cu.cuMemGetInfo())[0]
held = []
while (result := cu.cuMemAlloc({size}))[0] == R.CUDA_SUCCESS:
    held.append(result[1])
refuses(result, "OUT_OF_MEMORY")
left = ok(cu.cuMemGetInfo())[0]
for pointer in held: ok(cu.cuMemFree(pointer))
[free, left, len(held)]
"""
    found = []
    for name in ("bare", "shim"):
        folder = tmp_path / name
        folder.mkdir()
        environment = lib.bare_environment(folder, MEMORY=str(memory))
        if name == "shim":
            environment = lib.intercepted(environment, folder) | engine
        with Program(environment) as program:
            program.do("start()")
            found.append(program.do(fill))
            # All of it can be had again.
            assert program.do(fill)[2] == found[-1][2]
    (bare_free, _, bare_count), (shim_free, left, count) = found
    assert shim_free == bare_free and left < max(size, GRANULE)
    taken = -(-size // GRANULE) * GRANULE if size >= GRANULE else GRANULE // (GRANULE // size)
    assert count == shim_free // GRANULE * GRANULE // taken
    lost = (taken - size) * count + GRANULE
    assert bare_count * size - count * size <= lost


def test_free_memory_goes_down_and_up_with_blocks(task_job: Job) -> None:
    _, program, _ = task_job
    before, total = program.do("list(ok(cu.cuMemGetInfo()))")
    assert 0 < before <= total
    before -= lib.ROOM_BYTES  # with the first memory, to the end of the context
    program.do(ALLOCATE)
    taken = before - program.do(FREE)
    assert sum(SIZES) <= taken <= sum(SIZES) + GRANULE * len(SIZES)
    program.do("[ok(cu.cuMemFree(a)) for a in held]")
    assert before - program.do(FREE) <= GRANULE  # one block is kept for small allocations


def test_memory_ends_with_its_context(task_job: Job) -> None:
    _, program, task = task_job
    before = program.do(FREE)
    program.do("first = [int(ok(cu.cuMemAlloc(n))) for n in (1, 4 * MIB)]")
    program.do("other = ok(cu.cuCtxCreate(None, 0, 0))")
    program.do(ALLOCATE)
    assert task.page.allocations == len(SIZES) + 2
    program.do("ok(cu.cuCtxDestroy(other))")
    assert task.page.allocations == 2
    program.do("ok(cu.cuMemsetD8(first[1], 1, 4 * MIB)); [ok(cu.cuMemFree(a)) for a in first]")
    program.do("start(); ok(cu.cuDevicePrimaryCtxRelease(0))")  # retained twice by now
    program.do("ok(cu.cuMemAlloc(100)); ok(cu.cuMemAlloc(7 * MIB))")
    program.do("ok(cu.cuDevicePrimaryCtxRelease(0))")
    assert (task.page.allocations, task.page.block_bytes) == (0, 0)
    program.do("start()")
    assert program.do(FREE) == before


def test_a_reset_of_the_primary_context_frees_its_memory(task_job: Job) -> None:
    _, program, task = task_job
    before = program.do(FREE)
    program.do(ALLOCATE)
    program.do("ok(cu.cuDevicePrimaryCtxReset(0))")
    assert (task.page.allocations, task.page.block_bytes) == (0, 0)
    program.do("start()")
    assert program.do(FREE) == before


def test_memory_from_cumemalloc_has_no_handle_of_its_own(task_job: Job) -> None:
    _, program, _ = task_job
    answer = program.do("cu.cuMemRetainAllocationHandle(int(ok(cu.cuMemAlloc(MIB))))[0].name")
    assert answer == "CUDA_ERROR_INVALID_VALUE"


def test_memory_that_is_not_the_windows_passes_and_is_counted(task_job: Job) -> None:
    _, program, task = task_job
    program.do("a = int(ok(cu.cuMemAllocAsync(3 * MIB, 0))); ok(cu.cuMemsetD8(a, 1, 3 * MIB))")
    assert not WINDOW <= program.do("a") < WINDOW + WINDOW_BYTES
    assert (task.page.foreign_bytes, task.page.allocations) == (3 * MIB, 0)
    program.do("ok(cu.cuMemFreeAsync(a, 0))")
    assert task.page.foreign_bytes == 0
    program.do("b = int(ok(cu.cuMemAllocAsync(100, 0))); ok(cu.cuMemFree(b))")
    assert task.page.foreign_bytes == 0


def test_each_device_has_a_window(tmp_path: Path) -> None:
    with lib.job(tmp_path, DEVICES="3") as (_, program, task):
        assert task.hello.device_count == 3
        for device in (2, 0, 1):
            program.do(f"start({device}); x = int(ok(cu.cuMemAlloc(100)))")
            base = WINDOW + device * WINDOW_BYTES
            assert base <= program.do("x") < base + WINDOW_BYTES
            attribute = "cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"
            assert program.do(f"ok(cu.cuPointerGetAttribute({attribute}, x))") == device
        ghost = lib.Ghost()
        lib.hand_over(task, ghost)
        assert sorted(row.device for row in ghost.rows.values()) == [0, 1, 2]
        assert lib.map_back(task, ghost).blocks == 3
        task.ok(lib.Message.OPEN)
        ghost.close()
        program.do("ok(cu.cuMemsetD8(x, 1, 100)); ok(cu.cuMemFree(x))")
