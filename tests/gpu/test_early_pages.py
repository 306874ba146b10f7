"""Pages that are copied while a job runs, where a GPU writes them: what it writes is compared.

The job copies to the host all the time, and checks each word of what it has got before. `pytest -s`
shows how much had to be mended: that was written behind the write protection.
FLOWGPU_TEST_GPU=emulated runs the same on the emulated GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.launch import GpuKind
from tests.gpu.site import Site
from tests.unit.coordinator_job import wait_for

KIND: GpuKind = "emulated" if os.environ.get("FLOWGPU_TEST_GPU") == "emulated" else "nvidia"
SECONDS, DUMPS = 100.0, 5

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import ctypes, sys
from pathlib import Path
import numpy
from cuda.bindings import driver as cu

def ok(result):
    assert int(result[0]) == 0, result
    return result[-1] if len(result) > 1 else None

memory, ready, end = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
size, parts = 64 << 20, 4
device = ok(cu.cuMemAlloc(size))
if memory == "pinned":
    hosts = [int(ok(cu.cuMemHostAlloc(size, 0))) for _ in range(parts)]
else:
    buffers = [ctypes.create_string_buffer(size) for _ in range(parts)]
    hosts = [ctypes.addressof(buffer) for buffer in buffers]
stream = ok(cu.cuStreamCreate(1))
number, written = 0, {}
while not end.exists():
    number += 1
    host = hosts[number % parts]
    ok(cu.cuMemsetD32Async(device, number, size // 4, stream))
    ok(cu.cuMemcpyDtoHAsync(host, device, size, stream))
    ok(cu.cuStreamSynchronize(stream))
    written[number % parts] = number
    for place, wanted in written.items():
        found = numpy.frombuffer((ctypes.c_char * size).from_address(hosts[place]), numpy.uint32)
        assert (found == wanted).all(), (place, wanted, found[found != wanted][:4])
    if number == 2 * parts:
        ready.touch()
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(KIND) as made:
        yield made


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_what_a_copy_writes_is_seen_or_compared(memory: str, site: Site, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ready, end, name = tmp_path / "ready", tmp_path / "end", f"early-{memory}"
    words = ["run", "--name", name, "--gpu", KIND, "--engine", "replay", "--"]
    words += [sys.executable, str(program), memory, str(ready), str(end)]
    with (tmp_path / "log").open("wb") as said:
        process = site.start(*words, stdout=said, stderr=said)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, "the job", SECONDS)
        for number in range(DUMPS):
            image = site.images / f"{name}-{number}"
            options = ("--output", str(image), "--leave-running", "--engine", "replay", "--json")
            report = site.call("pause-and-dump", name, *options).json()
            assert report["rung"] == "early-pages", report["rung_reason"]
            print(memory, {k: v for k, v in report.items() if k.endswith("_seconds")})
            if number < DUMPS - 1:
                subprocess.run(["rm", "-r", str(image)], check=True)
        log = site.registry.dir(site.registry.find(name).id).coordinator_log.read_text()
        found = re.findall(r"early_bytes=(\d+), compared_bytes=(\d+), mended_bytes=(\d+)", log)
        print(memory, "early, compared, mended:", found)
        assert len(found) == DUMPS
        end.touch()
        assert process.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            site.call("kill", name)
            process.wait(SECONDS)
    # The copy checks itself: what it finds is what its last copy to the host wrote.
    end.unlink()
    with (tmp_path / "restored").open("wb") as said:
        process = site.start("restore", str(image), stdout=said, stderr=said)
    time.sleep(1.0)
    end.touch()
    assert process.wait(SECONDS) == 0, (tmp_path / "restored").read_text()
