"""Jobs whose processes begin and end while they are dumped and restored."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.host.proctree import children, is_stopped
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry, start_time
from tests.emu.test_checkpoint import ROOT, Run, flowgpu, runs, runtime_dir
from tests.unit.coordinator_job import wait_for

PROGRAM = [sys.executable, str(ROOT / "tests" / "emu" / "workers_task.py")]
FCNTL = "72"  # its number among system calls
ENGINES = ("native", "replay")
PHASES = ("prepare", "gate", "handover", "strip", "capture")
STEPS = ("fill", "criu", "engine", "mapback")  # of a restore; the first two side by side


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    return "--engine", request.param


@contextmanager
def at_phase(
    run: Run, phase: str, act: Callable[[], None], phases: Sequence[str] = PHASES
) -> Iterator[None]:
    """Meanwhile the coordinator is stopped at the beginning of that phase, and goes on after
    `act`."""
    number = phases.index(phase) + 1
    setting = run.out.with_suffix(".fault")
    setting.write_text(f"phase_stop:{number}")
    acted = threading.Event()

    def watch() -> None:
        wait_for(lambda: is_stopped(coordinator(run)), "its stop")
        try:
            act()
            acted.set()
        finally:
            os.kill(coordinator(run), signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    thread.join()
    assert acted.is_set()
    setting.write_text("")


def coordinator(run: Run) -> int:
    return Registry().find(run.name).coordinator_pid


def end(pid: int) -> None:
    """Its parent may be stopped: then it stays, as a zombie."""
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not start_time(pid), "its end")


def started(runs: Any, name: str, kind: str, *options: str, tmp_path: Path) -> Run:
    """It goes on until it is hurried."""
    (tmp_path / f"{name}.fault").touch()
    run: Run = runs(name, [*PROGRAM, kind], f"@{tmp_path / name}.fault", *options)
    # A line may come word by word.
    wait_for(lambda: re.search("^ready.*\n", run.out.read_text(), re.MULTILINE), "the program")
    return run


def workers(run: Run) -> list[int]:
    return [int(word) for word in run.lines[0].split()[1:]]


def test_a_sweep_is_dumped_again_and_again(
    runs: Any, tmp_path: Path, engine: tuple[str, str]
) -> None:
    """Its checkpoints meet processes in their start, in cuInit, in exit() and between."""
    run = started(runs, f"sweep-{engine[1]}", "sweep", *engine, tmp_path=tmp_path)
    for number in range(4):
        run.dump(tmp_path / f"image{number}", "--leave-running", *engine)
    assert run.end() == 0
    _, ready, trials, last = run.lines
    assert ready == "ready" and trials.count("'0: ") == trials.count("'") / 2 == 3
    for number in (0, 3):
        done = flowgpu("restore", tmp_path / f"image{number}")
        assert (done.returncode, done.stdout.splitlines()) == (0, [trials, last]), done.stderr


@pytest.mark.parametrize("phase", PHASES)
def test_a_task_that_ends_in_a_checkpoint_is_no_part_of_it(
    runs: Any, tmp_path: Path, engine: tuple[str, str], phase: str
) -> None:
    run = started(runs, f"ends-{engine[1]}-{phase}", "keeper", *engine, tmp_path=tmp_path)
    first, second = workers(run)
    with at_phase(run, phase, lambda: end(first)):
        run.dump(tmp_path / "image", "--leave-running", *engine)
    assert [task.pid for task in Image(tmp_path / "image").manifest.tasks] == [second]
    assert run.end() == 0
    assert run.lines[1] == "worker 0 ended -9"
    assert len(run.lines) == 3 and run.lines[2].startswith("worker 1 ended 0 ")
    done = flowgpu("restore", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == run.lines[-len(done.stdout.splitlines()) :]
    assert run.lines[2] in done.stdout


def test_a_process_does_not_begin_to_use_the_gpu_in_a_checkpoint(
    runs: Any, tmp_path: Path, engine: tuple[str, str]
) -> None:
    """It waits, is a part of the image as it is, and begins when it is restored."""
    run = started(runs, f"begins-{engine[1]}", "keeper", *engine, tmp_path=tmp_path)
    root = Registry().find(run.name).root_pid

    def spawn() -> None:
        run.hurrying.with_suffix(".spawn").touch()
        wait_for(lambda: len(children(root)) == 3, "a third worker")
        (new,) = set(children(root)) - set(workers(run))
        wait_for(lambda: Path(f"/proc/{new}/syscall").read_text().split()[0] == FCNTL, "its wait")

    with at_phase(run, "capture", spawn):
        run.dump(tmp_path / "image", *engine)
    assert run.end() == 75
    assert len(Image(tmp_path / "image").manifest.tasks) == 2
    for _ in range(2):
        done = flowgpu("restore", tmp_path / "image")
        assert done.returncode == 0, done.stderr
        said = [line.split() for line in done.stdout.splitlines()]
        assert [words[:4] for words in said] == [["worker", str(n), "ended", "0"] for n in range(3)]
        sums = [words[4:] for words in said]
        # The third one says its first sum as well.
        assert sums[0] == sums[1] == sums[2][1:]


@pytest.mark.parametrize("live", [False, True], ids=["dumped", "left running"])
def test_a_task_that_ends_in_a_restore_is_an_end_like_any_other(
    runs: Any, tmp_path: Path, engine: tuple[str, str], live: bool
) -> None:
    """It is killed when the tree is there and before a thread of it runs."""
    run = started(runs, f"ends-again-{engine[1]}-{live:d}", "keeper", *engine, tmp_path=tmp_path)
    first, _ = workers(run)
    run.dump(tmp_path / "image", *["--leave-running"] * live, *engine)
    assert len(Image(tmp_path / "image").manifest.tasks) == 2
    if live:
        flowgpu("kill", run.name)
    run.end()
    for _ in range(2):
        with at_phase(run, "mapback", lambda: end(first), STEPS):
            fault = {"FLOWGPU_FAULT": f"@{run.out.with_suffix('.fault')}"}
            done = flowgpu("restore", tmp_path / "image", env=fault)
        assert done.returncode == 0, done.stderr
        killed, other = done.stdout.splitlines()
        assert killed == "worker 0 ended -9"
        assert other.startswith("worker 1 ended 0 ")


@pytest.mark.parametrize("live", [False, True], ids=["dumped", "left running"])
def test_a_job_that_ends_in_its_restore_has_its_last_words_and_exit_code(
    runs: Any, tmp_path: Path, engine: tuple[str, str], live: bool
) -> None:
    """A watchdog ends it in its first moments."""
    run = started(runs, f"watched-{engine[1]}-{live:d}", "watched", *engine, tmp_path=tmp_path)
    run.dump(tmp_path / "image", *["--leave-running"] * live, *engine)
    assert run.end() == (5 if live else 75)
    for _ in range(2):
        done = flowgpu("restore", tmp_path / "image")
        assert (done.returncode, done.stdout) == (5, "last words\n"), done.stderr


def test_a_process_that_holds_a_device_for_a_moment_is_waited_for(
    runs: Any, tmp_path: Path, engine: tuple[str, str]
) -> None:
    """A job's nvidia-smi does so: it uses the GPU but not through FlowGPU."""
    device = f"/dev/nvidia-moment-{os.getpid()}"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 229))
    except PermissionError as error:
        pytest.skip(f"no device can be made: {error.strerror}")
    try:
        moments = f"while :; do (exec 3<>{device}; sleep 0.1); sleep 0.1; done & exec "
        words = ["/bin/sh", "-c", f'{moments} "$@"', "sh", *PROGRAM, "keeper"]
        run: Run = runs(f"moments-{engine[1]}", words, "", *engine)
        run.wait_lines(1)
        for number in range(3):
            run.dump(tmp_path / f"image{number}", "--leave-running", *engine)
        assert run.end() == 0
        done = flowgpu("restore", tmp_path / "image2")
        assert (done.returncode, done.stdout.splitlines()) == (0, run.lines[1:]), done.stderr
    finally:
        os.unlink(device)
