"""Whose the memory in an image is: bench/cpu_memory.py, and what it reads of CRIU's files."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from bench.cpu_memory import HANDLES, by_owner, of_image, owner
from flowgpu.host import criu_images
from flowgpu.host.criu import Criu
from flowgpu.host.criu_images import SavedMapping
from tests.unit.criu_job import COUNTER, Job

PAGE = mmap.PAGESIZE
# Eight pages where handles would lie, of which some are written to: one run of them crosses the
# border to the second half, which is a mapping of its own, since the first may only be read.
MEMORY = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
size = 8 * {PAGE}
address = libc.mmap(ctypes.c_void_p({HANDLES.start}), ctypes.c_size_t(size), 3, 0x100022, -1, 0)
assert address == {HANDLES.start}
for page in (1, 2, 3, 4, 7):
    ctypes.memset(address + page * {PAGE}, 7, 1)
assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size // 2), 1) == 0
"""


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "driver"),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.580.159.04", "driver"),
        ("/opt/flowgpu/lib/intercept/libcuda.so.1", "flowgpu"),
        ("/opt/flowgpu/lib/libflowgpu_memstub.so", "flowgpu"),
        ("/opt/torch/lib/libtorch_cuda.so", "program"),
        ("", "program"),
    ],
)
def test_a_file_is_its_owners(path: str, whose: str) -> None:
    assert owner(path, 1 << 46) == whose


def test_memory_right_behind_a_library_is_the_librarys() -> None:
    library = "/usr/lib/libcuda.so.1"
    found = by_owner(
        [
            SavedMapping(0x1000, 0x3000, library, 100),
            SavedMapping(0x3000, 0x5000, "", 20),
            SavedMapping(0x6000, 0x7000, "", 3),
            SavedMapping(0x7000, 0x8000, "", 4),
        ]
    )
    assert found == {"driver": 120, "program": 7}


def test_every_page_of_an_image_is_of_one_mapping(tmp_path: Path) -> None:
    folder = tmp_path / "criu"
    folder.mkdir()
    job = Job(MEMORY + COUNTER)
    try:
        job.number()
        Criu.locate().dump(job.pid, folder)
    finally:
        job.close()
    found = criu_images.saved_mappings(folder, job.pid)
    stored = (folder / criu_images.page_runs(folder / f"pagemap-{job.pid}.img")[0]).stat().st_size
    assert sum(one.bytes for one in found) == stored
    middle = HANDLES.start + 4 * PAGE
    assert [one for one in found if one.start in HANDLES] == [
        SavedMapping(HANDLES.start, middle, "", 3 * PAGE),
        SavedMapping(middle, middle + 4 * PAGE, "", 2 * PAGE),
    ]
    assert of_image(tmp_path) == {"flowgpu": 5 * PAGE, "program": stored - 5 * PAGE}
