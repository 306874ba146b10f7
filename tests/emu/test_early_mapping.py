"""A restore by the engine replay: tasks map their memory while the ghost still copies into it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.process import alive
from flowgpu.errors import ImageDamaged
from flowgpu.host.proctree import fd_targets
from flowgpu.image import layout
from flowgpu.image.reader import Image
from tests.emu.test_takeover import TWO, steps
from tests.faults.lanes import lane
from tests.patience import SECONDS
from tests.unit.coordinator_job import Jobs, Running, wait_for


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with lane("emulated", tmp_path_factory.mktemp("jobs"), "replay") as found:
        found.coordinator = (sys.executable, "-P", "-m", "tests.faults.late_fill")
        yield found


def blocks_at(pid: int) -> int:
    """Blocks that a task has mapped: it keeps a descriptor of each."""
    return sum("flowgpu-emu-mem" in target for _, target in fd_targets(pid))


def restored_and_mapped(jobs: Jobs, image: Path, copying: Path) -> Running:
    """A restore whose copy begins when `copying` is there; both tasks have mapped already."""
    job = jobs.run(["/bin/sh", "-c", TWO])
    wait_for(lambda: all(f"{name}step 3" in job.lines for name in "ab"), "the tasks")
    assert job.dump(image)["engine"] == "replay"
    assert job.end() == 75
    manifest = Image(image).manifest
    (gpu,) = manifest.gpus
    owners = [block.task for block in gpu.blocks]
    wanted = {task.pid: owners.count(number) for number, task in enumerate(manifest.tasks)}
    assert len(wanted) == 2 and all(wanted.values())
    again = jobs.restore(image, ghost_env={"FILL_AFTER": str(copying)})
    wait_for(lambda: {pid: blocks_at(pid) for pid in wanted} == wanted, "mapped memory")
    assert again.lines == [] and not copying.exists()
    return again


def test_tasks_map_their_memory_before_the_copy_begins(jobs: Jobs, tmp_path: Path) -> None:
    again = restored_and_mapped(jobs, tmp_path / "image", tmp_path / "go")
    (tmp_path / "go").touch()
    assert again.ask("wait-restored")["phases"].keys() >= {"mapback", "copy", "open"}
    for name in "ab":
        count = steps(again, name)
        wait_for(lambda: steps(again, name) > count, "another step")  # noqa: B023


def test_damage_that_is_found_behind_that_leaves_no_process_and_is_named(
    jobs: Jobs, tmp_path: Path
) -> None:
    again = restored_and_mapped(jobs, tmp_path / "image", tmp_path / "go")
    data = tmp_path / "image" / layout.gpu_data(0)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "go").touch()
    with pytest.raises(ImageDamaged, match=rf"chunk \d+ of \S*{data.name} is damaged"):
        again.ask("wait-restored")
    again.process.wait(SECONDS)
    assert (again.lines, again.record.state) == ([], "dumped")
    assert not any(map(alive, Image(tmp_path / "image").manifest.pids))
    # Nothing that is left is in the way of another one.
    data.write_bytes(whole)
    last = jobs.restore(tmp_path / "image", ghost_env={"FILL_AFTER": str(tmp_path / "go")})
    wait_for(lambda: len(last.lines) > 4, "steps of the restored job")
    assert steps(last, "a") > 3
