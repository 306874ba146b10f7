"""A program built with nvcc whose managed variables the host and its kernels write goes on in an
image, before and after a reset of its device."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emu.intercept_lib import PROGRAMS
from tests.gpu.job import Job
from tests.gpu.site import Site

SECONDS, STEPS = 120.0, 400

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site("nvidia") as made:
        yield made


@pytest.mark.parametrize(
    ("code", "moment", "looks"),
    [
        ("compute_90", 10, "last"),
        ("compute_90", STEPS // 2 + 10, "first"),
        ("sm_90", 10, "first"),
        ("sm_90", STEPS // 2 + 10, "last"),
    ],
)
def test_a_program_of_the_runtimes_with_managed_variables_goes_on_in_an_image(
    site: Site, code: str, moment: int, looks: str, tmp_path: Path
) -> None:
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    nvcc = shutil.which("nvcc", path=f"{toolkit}:{os.environ['PATH']}")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    program = tmp_path / "program"
    target = f"arch=compute_90,code={code}"
    source = str(PROGRAMS / "managed_variables.cu")
    subprocess.run([nvcc, "-gencode", target, source, "-o", str(program)], check=True)
    name = f"variables-{code}-{moment}"
    job = Job(site, name, [str(program), str(STEPS), looks], tmp_path)
    deadline = time.monotonic() + SECONDS
    job.start(deadline)
    assert job.wait_step(moment, deadline)
    # Where this engine cannot save it, the dump says why; that of `auto` says what native cannot.
    report = job.dump(tmp_path / "image", deadline, options=("--engine", "replay"))
    assert report is not None and report["engine"] == "replay"
    restored = site.call("restore", str(tmp_path / "image"), seconds=SECONDS)
    assert restored.succeeded().stdout.splitlines()[-1].split() == ["done", str(3 + 201 * STEPS)]
