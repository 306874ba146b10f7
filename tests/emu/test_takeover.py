"""The coordinator of a job is killed, and another one takes the job over."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.client import Connection, what_became
from flowgpu.errors import CoordinatorGone, CoordinatorReplaced, CriuFailed, FlowError, JobLost
from flowgpu.host import ptrace
from flowgpu.host.criu import Criu
from flowgpu.image.reader import Image
from flowgpu.jobs import Job, Registry, start_time
from flowgpu.launch import EngineChoice
from tests.emu import test_checkpoint
from tests.emu.test_checkpoint import Run, command, flowgpu
from tests.faults.lanes import TASKS, lane
from tests.patience import SECONDS
from tests.unit.coordinator_job import Jobs, Running, wait_for
from tests.unit.criu_job import DYING

runtime_dir, runs = test_checkpoint.runtime_dir, test_checkpoint.runs


# A running job


def kill_coordinator(name: str) -> Job:
    """Kill it and wait for the next; gives the record as it was before."""
    directory = Registry().dir(Registry().find(name).id)
    before = directory.read()
    os.kill(before.coordinator_pid, signal.SIGKILL)
    wait_for(lambda: directory.read().coordinator_pid != before.coordinator_pid, "another one")
    assert directory.read().live
    return before


def test_a_job_that_loses_two_coordinators_is_as_an_undisturbed_one(
    runs: Any, tmp_path: Path
) -> None:
    words = {"steps": 60, "step-delay": 0.06}
    run: Run = runs("taken-over", command("segments", **words), "", "--engine", "replay")
    run.wait_lines(5)
    for more in (3, 8):
        kill_coordinator(run.name)
        run.wait_lines(len(run.lines) + more)
    assert flowgpu("logs", run.name).stdout.splitlines()[:5] == run.lines[:5]
    run.dump(tmp_path / "image")
    assert run.end() == 75
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    undisturbed = flowgpu("run", "--", *command("segments", **words | {"step-delay": 0}))
    assert run.lines + restored.stdout.splitlines() == undisturbed.stdout.splitlines()


def test_a_restored_job_is_taken_over_and_can_be_killed(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("restored", command("segments", steps=2000))
    run.wait_lines(3)
    run.dump(tmp_path / "image")
    run.end(hurry=False)
    log = Registry().dir(Registry().find(run.name).id).output_log
    assert flowgpu("restore", tmp_path / "image", "--detach").returncode == 0
    record = kill_coordinator(run.name)
    said = log.read_text()
    wait_for(lambda: len(log.read_text()) > len(said), "more output")
    assert flowgpu("kill", run.name).returncode == 0
    wait_for(lambda: not start_time(record.keeper_pid), "the end of the keeper")
    ended = Registry().find(run.name)
    assert (ended.state, ended.exit_code) == ("exited", 128 + signal.SIGKILL)


def test_a_job_that_ends_without_a_coordinator_has_its_output_and_exit_code(
    runs: Any, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    words = f"echo begin; until test -e {stop}; do sleep 0.01; done; echo end; exit 7"
    run: Run = runs("ended", ["/bin/sh", "-c", words])
    run.wait_lines(1)
    record = Registry().find(run.name)
    os.kill(record.keeper_pid, signal.SIGSTOP)
    os.kill(record.coordinator_pid, signal.SIGKILL)
    stop.touch()
    wait_for(lambda: not start_time(record.root_pid), "the end of the job")
    os.kill(record.keeper_pid, signal.SIGCONT)
    assert run.end() == 7
    assert run.lines == ["begin", "end"]
    assert Registry().find(run.name).exit_code == 7


def test_no_line_is_lost_or_torn_when_much_is_said(runs: Any) -> None:
    words = "i=0; while [ $i -lt 60 ]; do seq -f %020g 4000; seq 1500 >&2; i=$((i+1))"
    words += "; until [ $i -lt 50 -o -e $WORKLOAD_HURRY ]; do sleep 0.01; done; done"
    run: Run = runs("talkative", ["/bin/sh", "-c", words])
    for count in (20_000, 100_000):
        run.wait_lines(count)
        kill_coordinator(run.name)
    assert run.end() == 0
    assert run.lines == [f"{n:020}" for n in range(1, 4001)] * 60
    assert run.out.with_suffix(".err").read_text().split() == [*map(str, range(1, 1501))] * 60


# A checkpoint


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs whose first coordinator is killed at a point of a checkpoint."""
    with lane("emulated", tmp_path_factory.mktemp("jobs")) as found:
        found.coordinator = (sys.executable, "-P", "-m", "tests.faults.dying")
        yield found


TASK = "FAKE_TASK_NAME={} " + " ".join(TASKS["emulated"])
ONE, TWO = f"exec env {TASK.format('a')}", f"{TASK.format('a')} & {TASK.format('b')} & wait"


def dump_and_die(
    jobs: Jobs,
    image: Path,
    point: str,
    words: str = TWO,
    engine: EngineChoice = "native",
    **options: Any,
) -> tuple[Running, FlowError]:
    """A job whose coordinator dies in a checkpoint, and what has become of it."""
    job = jobs.run(["/bin/sh", "-c", words], coordinator_env={"DIE_AT": point}, engine=engine)
    names = "ab" if words == TWO else "a"
    wait_for(lambda: all(f"{name}step 3" in job.lines for name in names), "the tasks")
    with Connection(job.directory.control_socket, "it") as connection:
        connection.send("pause-and-dump", output=str(image), **options)
        with pytest.raises(CoordinatorGone):
            connection.result()
        return job, what_became(connection)


def steps(job: Running, name: str) -> int:
    """How far a task is; it has counted without a gap."""
    # Whole lines: the last one may be half written.
    said = re.findall(f"^{name}(.*)\n", job.directory.output_log.read_text(), re.MULTILINE)
    assert said == [f"step {n}" for n in range(1, len(said) + 1)]
    return len(said)


@pytest.mark.parametrize(
    ("point", "engine"),
    [("prepare", "native"), ("gate", "replay")],
)
def test_a_checkpoint_that_has_no_memory_yet_costs_nothing(
    jobs: Jobs, tmp_path: Path, point: str, engine: EngineChoice
) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", point, engine=engine)
    assert isinstance(became, CoordinatorReplaced), job.log
    assert os.listdir(tmp_path) == []
    assert job.record.state == "running"
    goes_on_and_is_dumped(jobs, job, tmp_path / "image", engine)


WITH_THE_MEMORY = ("handover", "copy_start", "detach", "strip", "criu_dump", "copy_wait", "commit")


def goes_on_and_is_dumped(
    jobs: Jobs, job: Running, image: Path, engine: EngineChoice = "native"
) -> None:
    """Both tasks count on, with all of their memory, and an image of them does too."""
    for name in "ab":
        count = steps(job, name)
        wait_for(lambda: steps(job, name) > count, "another step")  # noqa: B023
    # Three each, and in prepared tasks the variables of their module.
    assert job.dump(image)["allocations"] == (8 if engine == "replay" else 6)
    assert job.record.state == "dumped"
    again = jobs.restore(image)
    wait_for(lambda: len(again.lines) > 4, "steps of the restored job")
    for name in "ab":
        assert steps(again, name) > 3
    again.kill()


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("point", WITH_THE_MEMORY)
def test_a_coordinator_that_dies_with_the_memory_costs_nothing(
    jobs: Jobs, tmp_path: Path, point: str, engine: EngineChoice
) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", point, engine=engine)
    assert isinstance(became, CoordinatorReplaced), job.log
    assert os.listdir(tmp_path) == []
    assert job.record.state == "running"
    goes_on_and_is_dumped(jobs, job, tmp_path / "image", engine)


def criu_that_dies(monkeypatch: pytest.MonkeyPatch, folder: Path, at: int) -> Path:
    """Coordinators have a CRIU of which the first dump is killed at a call of ptrace(2). Gives what
    is there once it was."""
    once, program = folder / "once", folder / "criu"
    dies = f"env LD_PRELOAD={DYING} DIES_AT={at} DIES_OF={ptrace.CONT}"
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = dump ] && mkdir {once} && exec {dies} {Criu.locate().program} "$@"\n'
        f'exec {Criu.locate().program} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("FLOWGPU_CRIU", str(program))
    return once


@pytest.mark.parametrize("at", [10, 12])
def test_one_that_is_killed_with_criu_costs_nothing(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """CRIU's code is at work in a task then."""
    once, output = criu_that_dies(monkeypatch, tmp_path, at), tmp_path / "output"
    output.mkdir()
    job, became = dump_and_die(jobs, output / "image", "criu")
    assert once.exists()
    assert isinstance(became, CoordinatorReplaced), job.log
    assert os.listdir(output) == []
    goes_on_and_is_dumped(jobs, job, output / "image")


@pytest.mark.parametrize("point", ["mapback", "commit,mapback", "strip,mapback,mapback", "open"])
def test_nor_does_one_that_dies_while_it_gives_the_memory_back(
    jobs: Jobs, tmp_path: Path, point: str
) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", point, leave_running=True)
    assert isinstance(became, CoordinatorReplaced), job.log
    goes_on_and_is_dumped(jobs, job, tmp_path / "image")


@pytest.mark.parametrize("point", WITH_THE_MEMORY)
def test_one_that_dies_while_tasks_keep_their_memory_costs_nothing(
    jobs: Jobs, tmp_path: Path, point: str
) -> None:
    image = tmp_path / "image"
    job, became = dump_and_die(jobs, image, point, engine="replay", leave_running=True)
    assert isinstance(became, CoordinatorReplaced), job.log
    assert os.listdir(tmp_path) == []
    assert job.record.state == "running"
    goes_on_and_is_dumped(jobs, job, image, "replay")  # though nothing was in custody


def test_memory_that_nobody_has_ends_the_job_by_name(jobs: Jobs, tmp_path: Path) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", "alone")
    assert isinstance(became, JobLost)
    job.process.wait(SECONDS)
    assert (job.record.state, job.record.exit_code) == ("exited", JobLost.exit_code)
    assert not start_time(job.record.root_pid)
    assert os.listdir(tmp_path) == []


def test_a_coordinator_that_dies_behind_a_running_job_leaves_it_running(
    jobs: Jobs, tmp_path: Path
) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", "commit", ONE, leave_running=True)
    assert isinstance(became, CoordinatorReplaced)
    assert os.listdir(tmp_path) == []
    count = steps(job, "a")
    wait_for(lambda: steps(job, "a") > count, "another step")
    job.kill()


def test_processes_without_cuda_go_on_after_their_dump(jobs: Jobs, tmp_path: Path) -> None:
    words = "i=0; while :; do i=$((i+1)); echo astep $i; sleep 0.01; done"
    job, became = dump_and_die(jobs, tmp_path / "image", "commit", words)
    assert isinstance(became, CoordinatorReplaced)
    assert os.listdir(tmp_path) == []
    count = steps(job, "a")
    wait_for(lambda: steps(job, "a") > count, "another step")
    assert job.dump(tmp_path / "image")["allocations"] == 0


# A line for each word that has come over a connection to itself.
TALKS = """
import itertools, socket, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
other, _ = server.accept()
for number in itertools.count(1):
    client.send(b"word")
    assert other.recv(9) == b"word"
    print("astep", number, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("point", ["criu_dump", "commit"])
def test_connections_go_on_after_a_dump_whose_coordinator_dies(
    jobs: Jobs, tmp_path: Path, point: str
) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    words = f"exec {sys.executable} {tmp_path / 'talks.py'}"
    job, became = dump_and_die(jobs, tmp_path / "image", point, words)
    assert isinstance(became, CoordinatorReplaced)
    count = steps(job, "a")
    wait_for(lambda: steps(job, "a") > count, "another step")
    job.dump(tmp_path / "image")
    again = jobs.restore(tmp_path / "image")
    wait_for(lambda: len(again.lines) > 4, "steps of the restored job")
    again.kill()


@pytest.mark.parametrize("at", [6, 8, 10])
def test_connections_go_on_after_criu_was_killed(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    criu_that_dies(monkeypatch, tmp_path, at)
    output = tmp_path / "output"
    (tmp_path / "talks.py").write_text(TALKS)
    job = jobs.run([sys.executable, str(tmp_path / "talks.py")])
    wait_for(lambda: "astep 3" in job.lines, "the job")
    with pytest.raises(CriuFailed):
        job.dump(output)
    count = steps(job, "a")
    wait_for(lambda: steps(job, "a") > count, "another step")
    job.dump(output)
    job.kill()


def test_a_job_is_known_as_dumped_once_its_image_is_whole(jobs: Jobs, tmp_path: Path) -> None:
    job, became = dump_and_die(jobs, tmp_path / "image", "kill", ONE)
    assert isinstance(became, CoordinatorGone)
    job.process.wait(SECONDS)
    assert (job.record.state, job.record.image) == ("dumped", str(tmp_path / "image"))
    Image(tmp_path / "image").verify()
    again = jobs.restore(tmp_path / "image")
    wait_for(lambda: len(again.lines) > 4, "steps of the restored job")
    assert steps(again, "a") > 3
    again.kill()


@pytest.mark.parametrize(("engine", "point"), [("native", "mapback"), ("replay", "open")])
def test_nothing_is_left_of_a_restore_whose_coordinator_dies_with_the_job_let_go(
    jobs: Jobs, tmp_path: Path, engine: EngineChoice, point: str
) -> None:
    job = jobs.run(["/bin/sh", "-c", ONE], engine=engine)
    wait_for(lambda: "astep 3" in job.lines, "the task")
    job.dump(tmp_path / "image")
    again = jobs.restore(tmp_path / "image", coordinator_env={"DIE_AT": point})
    wait_for(lambda: again.record.state == "dumped", "the end of the restore")
    assert again.record.root_pid
    wait_for(lambda: not Path(f"/proc/{again.record.root_pid}").exists(), "the end of the task")
    last = jobs.restore(tmp_path / "image")
    wait_for(lambda: len(last.lines) > 4, "steps of the restored job")
    assert steps(last, "a") > 3
    last.kill()
