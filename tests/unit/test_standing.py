"""What CRIU is told of processes that stand still (native/pages/standing.h), instead of asking the
kernel. Needs root, as CRIU does, and Linux 6.7."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from criu_job import Job

from flowgpu import launch
from flowgpu.host.pages import MEMORY_LIBRARY, STANDING, PageServer
from flowgpu.host.proctree import resume_tree, tree_pids
from flowgpu.host.standstill import Standstill
from tests.unit.test_early_pages import RUNS, Build, program, track
from tests.unit.test_pages import StartJob, start

PROCESS = struct.Struct("=6Q")
REGION = struct.Struct("=3Q")
TRACKED, WRITTEN, PRESENT, SWAPPED = 1, 2, 8, 16
# Asks as CRIU does: opens what a folder of /proc has, and scans pages.
ASKS = """
import ctypes, json, os, struct, sys
libc = ctypes.CDLL(None)
folder = os.open(f"/proc/{sys.argv[1]}", os.O_PATH)
smaps = libc.openat64(folder, b"smaps", os.O_RDONLY)
pages = libc.openat64(folder, b"pagemap", os.O_RDONLY)
text = b""
while part := os.read(smaps, 1 << 20):
    text += part
found = []
for start, end, wanted in json.loads(sys.argv[2]):
    regions = (ctypes.c_uint64 * 6)()
    words = 96, 0, start, end, 0, ctypes.addressof(regions), 2, 0, 0x24, 0x24, 0x18, wanted
    request = ctypes.create_string_buffer(struct.pack("=12Q", *words))
    count = libc.ioctl(pages, ctypes.c_ulong(0xC0606610), request)
    found.append([count, struct.unpack("=12Q", request.raw[:96])[4], *regions[: 3 * max(count, 0)]])
print(json.dumps([text.decode(), found]))
"""


@contextmanager
def stopped(job: Job, server: PageServer) -> Iterator[None]:
    """The job's tree stands still, and the server has looked at it."""
    still = Standstill(job.pid, 10.0, stopped=server.look)
    try:
        os.set_blocking(server.descriptors[2], True)
        yield
    finally:
        still.finish()
        still.end()


def told(server: PageServer) -> dict[int, tuple[str, int, list[tuple[int, ...]]]]:
    """Each process's list of mappings, kinds of pages that are told apart, and its regions."""
    assert os.read(server.descriptors[2], 1) == b"\x01"
    data = os.pread(server.descriptors[1], 1 << 26, 0)
    found = {}
    for n in range(int.from_bytes(data[:8], "little")):
        pid, at, size, regions, count, kinds = PROCESS.unpack_from(data, 8 + n * PROCESS.size)
        rows = [REGION.unpack_from(data, regions + i * REGION.size) for i in range(count)]
        found[pid] = data[at : at + size].decode(), kinds, rows
    return found


def without_counts(smaps: str) -> list[str]:
    """Mappings with what is set of them: not how much of each is where."""
    return re.findall(r"^(?:[0-9a-f]+-.*|VmFlags:.*)$", smaps, re.MULTILINE)


@pytest.mark.parametrize("passes", [0, 1])
def test_the_list_of_mappings_is_the_kernels(
    start: StartJob, program: Build, tmp_path: Path, passes: int
) -> None:
    """Also where mappings come and go between the making of its parts and the standstill."""
    for number in range(4):
        job = start(RUNS, program("busy_memory"), str(tmp_path / f"file-{number}"), "forks")
        assert job.line() == "ready"
        server = track(job, tmp_path)
        try:
            for _ in range(passes):
                server.again(60)
            with stopped(job, server):
                found = told(server)
                assert sorted(found) == sorted(tree_pids(job.pid))
                for pid, (text, _, _) in found.items():
                    smaps = Path(f"/proc/{pid}/smaps").read_text()
                    assert without_counts(text) == without_counts(smaps)
                    assert text.count("\nRss:") == smaps.count("\nRss:") > 20
        finally:
            server.close()
        job.end_tree()


def test_another_program_in_the_process_is_noticed(
    start: StartJob, program: Build, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"echo first; read line < {gate}; exec {program('busy_memory')} {tmp_path / 'file'}"
    job = start(RUNS, "/bin/sh", "-c", script)
    assert job.line() == "first"
    server = track(job, tmp_path)
    try:
        server.again(60)
        gate.write_text("go\n")
        assert job.line() == "ready"
        with stopped(job, server):
            text, _, _ = told(server)[job.pid]
            assert without_counts(text) == without_counts(
                Path(f"/proc/{job.pid}/smaps").read_text()
            )
    finally:
        server.close()


def test_criu_gets_what_is_told_and_the_kernels_answer_where_nothing_is(
    start: StartJob, tmp_path: Path
) -> None:
    """Regions are cut at the ends that are asked for, and as many come as there is room for."""
    pid = os.getpid()
    regions = [
        (0x10000, 0x14000, PRESENT),
        (0x20000, 0x21000, SWAPPED | WRITTEN),
        (0x30000, 0x31000, PRESENT | WRITTEN),
    ]
    text = b"told of this process\n"
    rows = b"".join(REGION.pack(*region) for region in regions)
    at = 8 + PROCESS.size
    data = struct.pack("=Q", 1) + PROCESS.pack(pid, at + len(rows), len(text), at, 3, 0x9B)
    asked = [(0x12000, 0x20800, 0x18), (0x10000, 0x40000, 0x18), (0x22000, 0x30000, 0x18)]

    def answers(there: bytes) -> list[object]:
        file = os.memfd_create("told")
        os.write(file, data + rows + text)
        hears, says = os.pipe()
        os.write(says, there)
        os.close(says)
        done = subprocess.run(
            [sys.executable, "-c", ASKS, str(pid), json.dumps(asked)],
            env=os.environ
            | {
                "LD_PRELOAD": str(launch.library_dir() / MEMORY_LIBRARY),
                STANDING: f"{file} {hears}",
            },
            pass_fds=(file, hears),
            capture_output=True,
            text=True,
            check=True,
        )
        os.close(file)
        os.close(hears)
        found: list[object] = json.loads(done.stdout)
        return found

    assert answers(b"\x01") == [
        text.decode(),
        [
            [2, 0x20800, 0x12000, 0x14000, PRESENT, 0x20000, 0x20800, SWAPPED],
            [2, 0x21000, 0x10000, 0x14000, PRESENT, 0x20000, 0x21000, SWAPPED],
            [0, 0x30000],
        ],
    ]
    for nothing in (b"", b"\x00"):  # the server has ended, or says that it has none
        smaps, found = answers(nothing)
        assert "VmFlags" in str(smaps)
        assert found == [[0, end] for _, end, _ in asked]
