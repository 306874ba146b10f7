"""Restores that fail after the job's files were cut: real coordinator and CRIU, fake GPU."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from flowgpu.errors import CutLeft, FlowError
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.launch import EngineChoice
from flowgpu.wire import Fault
from tests.patience import SECONDS
from tests.unit.coordinator_job import FAKES, Jobs, Running, wait_for

# Writes all the time, as no program that waits for the GPU could.
WRITER = """
import sys, time
log = open(sys.argv[1], "ab", 0)
while True:
    log.write(b"x" * 1024)
    time.sleep(0.0001)
"""


def dumped(
    jobs: Jobs, folder: Path, engine: EngineChoice = "native", images: int = 1
) -> tuple[Path, Path, bytes]:
    """The last image of a job that uses the GPU and writes a log, the log, and all it held."""
    log = folder / "log"
    log.touch()
    writer = shlex.join([sys.executable, "-c", WRITER, str(log)])
    task = shlex.join([sys.executable, str(FAKES / "task.py"), "3"])
    # What is restored writes to the log before it is given its memory, and so before that fails.
    script = f"{writer} & FAKE_TASK_GROWS={shlex.quote(str(log))} {task} & wait"
    job = jobs.run(["/bin/sh", "-c", script], engine=engine)
    job.wait_line("step 3")
    wait_for(lambda: log.stat().st_size, "the log")
    store = Store(folder / "store")
    store.path.mkdir()
    for _ in range(images):
        base = store.newest(job.spec.id)
        image = store.next_image()
        job.dump(image, leave_running=True, **({"base": str(base)} if base else {}))
    size = log.stat().st_size
    wait_for(lambda: log.stat().st_size > size, "more in the log")
    job.ask("kill")
    job.end()
    return image, log, log.read_bytes()


def parts(image: Path) -> list[Path]:
    return sorted(image.parent.glob(f"{image.name}.cut-*"))


def failed(again: Running) -> FlowError:
    with pytest.raises(FlowError) as caught:
        again.ask("wait-restored")
    again.process.wait(SECONDS)
    return caught.value


@pytest.mark.parametrize(
    ("engine", "images"), [("native", 1), ("native", 2), ("replay", 1)], ids=str
)
def test_files_are_cut_whatever_form_the_image_has(
    jobs: Jobs, tmp_path: Path, engine: EngineChoice, images: int
) -> None:
    image, log, data = dumped(jobs, tmp_path, engine, images)
    manifest = Image(image).manifest
    assert (manifest.version, manifest.engine) == (4 if images > 1 else 2, engine)
    (known,) = manifest.open_files
    assert (known.path, 0 < known.bytes < len(data)) == (str(log), True)
    again = jobs.restore(image)
    report = again.ask("wait-restored")
    cut = len(data) - known.bytes
    assert report["cut_files"] == [{"path": str(log), "bytes": known.bytes, "cut_bytes": cut}]
    assert report["cut_folder"] == str(parts(image)[0])
    wait_for(lambda: log.stat().st_size > known.bytes, "more in the log")
    again.kill()


@pytest.mark.parametrize("fault", [Fault.CRIU_RESTORE, Fault.FILL])
def test_files_are_whole_again_after_a_restore_that_failed(
    jobs: Jobs, tmp_path: Path, fault: Fault
) -> None:
    image, log, data = dumped(jobs, tmp_path)
    error = failed(jobs.restore(image, coordinator_env={"FLOWGPU_FAULT": fault}))
    assert f"fault injected at {fault}" in str(error)
    assert log.read_bytes() == data
    assert parts(image) == []
    again = jobs.restore(image)
    (cut,) = again.ask("wait-restored")["cut_files"]
    assert (cut["path"], cut["bytes"] + cut["cut_bytes"]) == (str(log), len(data))


def test_what_a_job_wrote_to_in_the_moment_that_it_ran_is_named(jobs: Jobs, tmp_path: Path) -> None:
    image, log, data = dumped(jobs, tmp_path)
    error = failed(jobs.restore(image, coordinator_env={"FLOWGPU_FAULT": Fault.MAPBACK}))
    (folder,) = parts(image)
    assert isinstance(error, CutLeft)
    assert f"fault injected at {Fault.MAPBACK}" in str(error)
    size = log.stat().st_size
    (part,) = folder.glob("0000-*")
    before = len(data) - part.stat().st_size
    assert error.fields["files"] == f"{log} (it has {size} bytes now, not {before})"
    assert error.fields["folder"] == str(folder)
    assert data[:before] + part.read_bytes() == data
    # The image is as it was, and so cuts the rest.
    again = jobs.restore(image)
    report = again.ask("wait-restored")
    assert report["cut_files"] == [{"path": str(log), "bytes": before, "cut_bytes": size - before}]
    assert len(parts(image)) == 2
