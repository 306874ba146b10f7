"""A job whose control group has a limit of memory, as a container has: where a checkpoint or a
restore takes more than is left, the kernel ends what can be done without, and never the job."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowgpu import errors
from flowgpu.host import memory
from flowgpu.image.reader import Image
from flowgpu.jobs import RUNNING, Registry
from tests.emu.test_checkpoint import (
    FLOWGPU,
    RESERVED,
    ROOT,
    SECONDS,
    command,
    flowgpu,
    reserving,
    runs,
    runtime_dir,
    undisturbed,
)
from tests.unit.coordinator_job import children_like, wait_for

__all__ = ["runs", "runtime_dir"]  # fixtures
MIB = 1 << 20
EXIT_CODES = {kind.exit_code for kind in errors.all_errors()}
NO_LIMIT = {"memory.limit_in_bytes": "-1", "memory.max": "max"}
WORKLOAD = "nbody"  # it takes no more memory of its own from step to step
HELD = 200 * MIB  # by the job: the largest process is the one that the kernel ends by itself
HOLD = """
import os, runpy, sys
held = bytes(range(256)) * (int(sys.argv[1]) >> 8)
del sys.argv[:2]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Group:
    """A control group of memory, of either version of the kernel's interface."""

    def __init__(self, path: Path) -> None:
        """Make it below the one that this process is in. Raises OSError."""
        self.path = path
        path.mkdir()
        self._limit = next((name for name in NO_LIMIT if (path / name).exists()), None)
        if self._limit is None:
            path.rmdir()
            raise OSError("its memory cannot be limited")

    @contextlib.contextmanager
    def starts(self) -> Iterator[None]:
        """What this process starts meanwhile is in the group with all its memory, as it is itself:
        not where there is a limit.
        """
        (self.path / "cgroup.procs").write_text("0")
        try:
            yield
        finally:
            (self.path.parent / "cgroup.procs").write_text("0")

    def limit(self, more: int | None) -> None:
        """Leave it so many bytes, or all."""
        assert self._limit
        used = "memory.usage_in_bytes" if "limit" in self._limit else "memory.current"
        now = int((self.path / used).read_text())
        text = NO_LIMIT[self._limit] if more is None else str(now + more)
        (self.path / self._limit).write_text(text)

    @property
    def killed(self) -> int:
        """How many processes the kernel has ended for its memory."""
        events = "memory.oom_control" if "limit" in str(self._limit) else "memory.events"
        found = re.search(r"^oom_kill (\d+)", (self.path / events).read_text(), re.MULTILINE)
        assert found
        return int(found[1])

    @property
    def pids(self) -> list[int]:
        return [int(word) for word in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        def empty() -> bool:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            return not self.path.exists()

        wait_for(empty, "the end of the group's processes")


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    own, _ = next(memory.groups(), (None, ""))
    if own is None:
        pytest.skip("no control group of memory is mounted here")
    # The emulated device is in no group: what it has of jobs' memory would count as theirs.
    assert flowgpu("run", "--gpu", "emulated", "--", "true").returncode == 0
    name = re.sub(r"\W", "-", request.node.name)
    try:
        made = Group(own / f"flowgpu-test-{name}")
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield made
    made.limit(None)
    made.remove()


def _holding() -> list[str]:
    python, *words = command(WORKLOAD)
    return [python, "-c", HOLD, str(HELD), *words]


def _record(name: str) -> Any:
    return Registry().find(name)


def _load_all(run: Any) -> None:
    """Have its coordinator load what a checkpoint needs: by itself it does some time after the
    start, and takes more than is left to it then."""
    done = flowgpu("pause-and-dump", run.name, "--output", "/dev/null/image")
    assert done.returncode == errors.OutputUnusable.exit_code, done.stderr
    maps = Path(f"/proc/{_record(run.name).coordinator_pid}/maps")
    assert "_multiarray_umath" in maps.read_text()


def _tasks(name: str) -> set[int]:
    root = psutil.Process(_record(name).root_pid)
    return {process.pid for process in (root, *root.children(recursive=True))}


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_checkpoint_that_needs_more_than_is_left_is_refused_by_name(
    engine: str, group: Group, runs: Any, tmp_path: Path
) -> None:
    expected = undisturbed(WORKLOAD)
    with group.starts():
        run = runs(f"limited-{engine}", _holding(), "", "--engine", engine)
    run.wait_lines(5)
    _load_all(run)
    tasks = _tasks(run.name)
    for more in (8, 32, 100):  # for CRIU, a ghost, its arena
        group.limit(more * MIB)
        done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
        assert done.returncode == errors.NotEnoughMemory.exit_code, done.stderr
        assert str(group.path) in done.stderr
        assert f"and a checkpoint of job '{run.name}' needs" in done.stderr
        assert group.killed == 0
        assert not list(tmp_path.glob("image*"))
        group.limit(None)
        assert _tasks(run.name) == tasks
        run.wait_more(3)
    run.dump(tmp_path / "image")
    assert run.end() == 75
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert run.lines + restored.stdout.splitlines() == expected


def test_a_suspension_that_needs_more_than_is_left_is_refused_by_name(
    group: Group, runs: Any
) -> None:
    expected = undisturbed(WORKLOAD)
    with group.starts():
        run = runs("limited-suspension", _holding(), "", "--engine", "replay")
    run.wait_lines(5)
    _load_all(run)
    for more in (8, 32, 100):  # at all, for a ghost, for its arena
        group.limit(more * MIB)
        done = flowgpu("suspend", run.name)
        assert done.returncode == errors.NotEnoughMemory.exit_code, done.stderr
        assert f"and to suspend job '{run.name}' needs" in done.stderr
        assert group.killed == 0
        group.limit(None)
        assert _record(run.name).state == RUNNING
        run.wait_more(3)
    assert flowgpu("suspend", run.name).returncode == 0
    assert flowgpu("resume", run.name).returncode == 0
    assert run.end() == 0
    assert run.lines == expected


def test_what_is_reserved_and_not_written_needs_no_memory(group: Group, runs: Any) -> None:
    with group.starts():
        run = runs("reserves", reserving(), "", "--engine", "replay")
    run.wait_lines(5)
    _load_all(run)
    group.limit(800 * MIB)  # for the ghost, its arena and what may change meanwhile
    done = flowgpu("suspend", run.name, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpu_bytes_reserved"] >= RESERVED > 100 * report["gpu_bytes_stored"]
    assert flowgpu("resume", run.name).returncode == 0
    assert group.killed == 0
    assert run.end() == 0
    assert run.lines == undisturbed(WORKLOAD)


def test_a_restore_with_too_little_memory_leaves_nothing_and_the_image(
    group: Group, runs: Any, tmp_path: Path
) -> None:
    run = runs("limited-restore", _holding())
    run.wait_lines(5)
    image = tmp_path / "image"
    run.dump(image)
    assert run.end() == 75
    enter = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(group.path / "cgroup.procs")]
    for more in (120, 200):
        group.limit(more * MIB)
        done = subprocess.run(
            [*enter, *FLOWGPU, "restore", str(image)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode in EXIT_CODES and done.stdout == "", done.stderr
        assert group.killed > 0
        wait_for(lambda: not group.pids, "the end of what the restore had started")
        Image(image).verify()
    group.limit(None)
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    assert run.lines + restored.stdout.splitlines() == undisturbed(WORKLOAD)


def test_the_helpers_of_a_checkpoint_go_first(runs: Any, tmp_path: Path) -> None:
    run = runs("goes-first", _holding(), "", "--ghost", "warm")
    run.wait_lines(5)
    record = _record(run.name)
    wait_for(lambda: children_like(record.coordinator_pid, "coordinator.ghost"), "a warm ghost")
    own = Path("/proc/self/oom_score_adj").read_text()

    def adjustments(pids: Any) -> set[str]:
        return {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in pids}

    (ghost,) = children_like(record.coordinator_pid, "coordinator.ghost")
    wait_for(lambda: adjustments([ghost]) == {"1000\n"}, "the ghost's adjustment")
    assert adjustments([record.coordinator_pid, *_tasks(run.name)]) == {own}
