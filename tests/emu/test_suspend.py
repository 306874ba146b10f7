"""A job gives its GPU back and keeps its processes: `flowgpu suspend`, `resume` and `swap`.

The same bodies serve for a real GPU in tests/gpu.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowgpu import timeline
from flowgpu.client import Connection, what_became
from flowgpu.errors import (
    CoordinatorGone,
    CoordinatorReplaced,
    JobEnded,
    NothingToSuspend,
    NotSuspended,
    ResumeFailed,
    Suspended,
)
from flowgpu.image.reader import Image
from flowgpu.jobs import DUMPED, EXITED, RUNNING, SUSPENDED, Registry, start_time
from flowgpu.launch import EngineChoice
from flowgpu.report.page import answer
from flowgpu.report.source import of_job
from flowgpu.timeline import COORDINATOR, GHOST, MOVE
from tests.emu import test_checkpoint
from tests.emu.test_checkpoint import FLOWGPU, Run, command, flowgpu, undisturbed
from tests.emu.test_takeover import TASK, kill_coordinator, steps
from tests.faults.lanes import lane
from tests.patience import SECONDS
from tests.unit.coordinator_job import Jobs, Running, wait_for

runtime_dir, runs = test_checkpoint.runtime_dir, test_checkpoint.runs

FREE = """
from cuda.bindings import driver as cu
assert cu.cuInit(0)[0] == 0
assert cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
print(cu.cuMemGetInfo()[1])
"""


def free_bytes() -> int:
    """What a program that comes now finds free of the GPU."""
    done = flowgpu(
        "run", "--gpu", "emulated", "--engine", "native", "--", sys.executable, "-c", FREE
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module", autouse=True)
def empty(runtime_dir: Path) -> int:
    """Free bytes of a GPU that nobody uses."""
    return free_bytes()


def ask(verb: str, *words: object) -> dict[str, Any]:
    done = flowgpu(verb, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def suspend(run: Run, *options: str) -> dict[str, Any]:
    return ask("suspend", run.name, *options)


def resume(run: Run, *options: str) -> dict[str, Any]:
    return ask("resume", run.name, *options)


def wait_warm(run: Run) -> None:
    """Wait until its ghost has contexts."""
    log = Registry().dir(Registry().find(run.name).id).coordinator_log
    wait_for(lambda: "has contexts on GPUs" in log.read_text(), "the warm ghost", SECONDS)


def state(run: Run) -> str:
    return Registry().find(run.name).state


def stands(run: Run) -> None:
    """It says nothing more, however long somebody waits. What it has said before may come late, as
    it passes through two processes."""
    for _ in range(3):
        before = run.lines
        time.sleep(0.5)
        if run.lines == before:
            return
    pytest.fail("it goes on")


CYCLED = [
    *(("native", workload, "") for workload in ("segments", "processes", "sharing")),
    *(("replay", workload, "") for workload in ("modules", "graphs", "threads", "forker")),
    *(("replay", workload, "") for workload in ("stream_ordered", "textures", "sharing")),
    *(("replay", workload, "--keep-context") for workload in ("graphs", "stream_ordered")),
    ("native", "sharing", "--keep-context"),
]


@pytest.mark.parametrize(("engine", "workload", "keep"), CYCLED)
def test_a_suspended_job_goes_on_as_an_undisturbed_one(
    engine: str, workload: str, keep: str, runs: Any
) -> None:
    name = f"{engine}-{workload.replace('_', '-')}{keep[:3]}"
    run = runs(name, command(workload), "", "--engine", engine)
    run.wait_lines(5)
    for _ in range(2):
        found = suspend(run, *([keep] if keep else []))
        assert (found["engine"], state(run)) == ("none" if keep else engine, SUSPENDED)
        stands(run)
        resume(run)
        assert state(run) == RUNNING
        run.wait_more(2)
    assert run.end() == 0
    assert run.lines == undisturbed(workload)


def ghosts(run: Run) -> list[psutil.Process]:
    """Those of its coordinator that live."""
    coordinator = psutil.Process(Registry().find(run.name).coordinator_pid)
    found = []
    for one in coordinator.children():
        with contextlib.suppress(psutil.Error):
            if "coordinator.ghost_main" in one.cmdline():
                found.append(one)
    return found


def test_a_ghost_is_ready_for_the_resume_and_for_the_next_suspension(runs: Any) -> None:
    run = runs("ready", command("segments"), "")
    run.wait_lines(2)
    before: list[psutil.Process] = []

    def one_alone() -> bool:
        """What was ready has served, and ends behind the command."""
        now = ghosts(run)
        return len(now) == 1 and now[0] not in before

    for verb in (suspend, resume, suspend, resume):
        before = ghosts(run)
        verb(run)
        wait_for(one_alone, "another ghost, and the end of the one before", SECONDS)
    ghosts(run)[0].kill()
    suspend(run)
    ghosts(run)[0].kill()
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


def test_with_contexts_kept_the_ghost_of_the_suspension_does_the_resume(runs: Any) -> None:
    run = runs("stays", command("segments"), "", "--engine", "replay")
    run.wait_lines(2)
    suspend(run)
    resume(run)
    (before,) = ghosts(run)[-1:]
    suspend(run, "--keep-context")
    assert ghosts(run) == [before]
    resume(run)
    wait_for(lambda: before not in ghosts(run), "its end, when its contexts are not needed")
    suspend(run, "--keep-context")
    ghosts(run)[0].kill()
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_a_suspension_and_a_resume_leave_a_timeline(verb: str, runs: Any) -> None:
    run = runs(f"timeline-{verb}", command("segments"), "", "--engine", "replay")
    run.wait_lines(2)
    found = suspend(run)
    if verb == "resume":
        found = resume(run)
    operation = timeline.read(Registry().dir(Registry().find(run.name).id).timeline)
    assert operation is not None
    assert operation.kind == {"suspend": "suspension", "resume": "resume"}[verb]
    assert operation.result == found
    (move,) = operation.timeline.find(GHOST, MOVE)
    assert move.bytes > 0
    steps = [span for span in operation.timeline.spans if span.track == COORDINATOR]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(steps))
    assert answer(of_job(run.name, Registry())).startswith(
        "The job stood still for" if verb == "suspend" else "The resume took"
    )


@pytest.mark.parametrize("ghost", ["auto", "warm"])
@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_suspended_job_leaves_nothing_on_the_gpu(
    engine: str, ghost: str, runs: Any, empty: int
) -> None:
    options = ("--engine", engine, "--ghost", ghost)
    run = runs(f"empty-{engine}-{ghost}", command("segments"), "", *options)
    run.wait_lines(5)
    used = empty - free_bytes()
    found = suspend(run)
    assert used > found["gpu_bytes_freed"] > 0
    # The device hears of the end of a process a little later.
    wait_for(lambda: free_bytes() == empty, "the memory")
    # Another job has the GPU meanwhile.
    assert flowgpu("run", "--", *command("segments", **{"step-delay": 0})).returncode == 0
    resume(run)
    assert free_bytes() < empty - found["gpu_bytes_freed"]
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


def test_with_its_context_kept_a_job_gives_all_blocks_back(runs: Any) -> None:
    # The ghost that stays has a context too: here it is there from the start.
    run = runs("kept", command("segments"), "", "--engine", "replay", "--ghost", "warm")
    run.wait_lines(5)
    wait_warm(run)
    before = free_bytes()
    found = suspend(run, "--keep-context")
    wait_for(lambda: free_bytes() >= before + found["gpu_bytes_freed"], "the blocks' memory")
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


@pytest.mark.timeout(600)  # forty commands
def test_twenty_cycles_change_no_line_and_keep_the_memory_that_is_there(runs: Any) -> None:
    run = runs("cycles", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    for number in range(20):
        found = suspend(run, *(["--keep-context"] if number % 3 == 2 else []))
        kept = resume(run, *(["--drop"] if number == 9 else []))["host_bytes"]
        assert kept == (0 if number == 9 else found["host_bytes"])
        assert Registry().find(run.name).host_bytes == kept
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


# One thread uses the GPU, another only counts, and says whether a file is there.
TWO_THREADS = r"""
import os, sys, threading, time
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
address = int(ok(cu.cuMemAlloc(1 << 20)))
ok(cu.cuMemsetD8(address, 7, 1 << 20))
def count():
    while not os.path.exists(os.environ["WORKLOAD_HURRY"]):
        what = "told" if os.path.exists(sys.argv[1]) else "cpu"
        os.write(1, f"{what}\n".encode())  # in one piece, beside the other thread's
        time.sleep(0.02)
thread = threading.Thread(target=count)
thread.start()
while thread.is_alive():
    data = bytearray(1)
    ok(cu.cuMemcpyDtoH(data, address, 1))
    os.write(1, f"gpu {data[0]}\n".encode())
    time.sleep(0.02)
"""


def test_threads_that_do_not_use_the_gpu_run_on(runs: Any, tmp_path: Path) -> None:
    tells = tmp_path / "tells"
    words = [sys.executable, "-c", TWO_THREADS, str(tells)]
    run = runs("two", words, "", "--engine", "replay")

    def said(what: str) -> int:
        return sum(line.startswith(what) for line in run.lines)

    wait_for(lambda: said("gpu") > 3, "the GPU's thread")
    suspend(run)
    # All that was said before the suspension comes before this.
    tells.touch()
    wait_for(lambda: said("told"), "the CPU's thread")
    gpu, told = said("gpu"), said("told")
    wait_for(lambda: said("told") > told + 10, "the CPU's thread")
    assert said("gpu") == gpu
    resume(run)
    wait_for(lambda: said("gpu") > gpu + 3, "the GPU's thread again")
    assert run.end() == 0
    assert {line for line in run.lines if line.startswith("gpu")} == {"gpu 7"}


# A child that begins to use the GPU when it is told to, and a parent that never does.
LATE_CHILD = """
import os, subprocess, sys, time
child = '''
from cuda.bindings import driver as cu
assert cu.cuInit(0)[0] == 0
assert cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
assert cu.cuMemAlloc(1 << 20)[0] == 0
'''
def begin(name):
    subprocess.run([sys.executable, "-c", child], check=True)
    print("child", name, flush=True)
begin("before")
going = subprocess.Popen([sys.executable, "-c", child + "import time; time.sleep(600)"])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("begins", flush=True)
begin("meanwhile")
going.kill()
"""


def test_a_process_that_begins_to_use_the_gpu_waits_for_the_resume(
    runs: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = runs("late", [sys.executable, "-c", LATE_CHILD, str(go)], "", "--engine", "replay")
    run.wait_lines(1)
    wait_for(lambda: flowgpu("suspend", run.name).returncode == 0, "a process with the GPU")
    go.touch()
    run.wait_lines(2)
    stands(run)
    kill_coordinator(run.name)
    stands(run)
    resume(run)
    wait_for(lambda: run.process.poll() is not None, "the end")
    assert run.end() == 0
    assert run.lines == ["child before", "begins", "child meanwhile"]


def test_a_suspended_job_that_is_stopped_as_well_waits_for_both(runs: Any) -> None:
    run = runs("stopped", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    suspend(run)
    flowgpu("kill", "--signal", "STOP", run.name)
    kill_coordinator(run.name)
    wait_for(lambda: state(run) == SUSPENDED, "a suspended job")
    failed = flowgpu("resume", run.name)
    assert failed.returncode == ResumeFailed.exit_code and "SIGSTOP" in failed.stderr
    flowgpu("kill", "--signal", "CONT", run.name)
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


def test_a_job_without_a_gpu_has_nothing_to_suspend(runs: Any) -> None:
    run = runs("cpu", ["/bin/sh", "-c", "echo begun; sleep 600"])
    run.wait_lines(1)
    assert flowgpu("suspend", run.name).returncode == NothingToSuspend.exit_code
    assert state(run) == RUNNING


def test_what_a_suspended_job_cannot_do_is_refused_by_name(runs: Any, tmp_path: Path) -> None:
    run = runs("names", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    assert flowgpu("resume", run.name).returncode == NotSuspended.exit_code
    suspend(run)
    assert flowgpu("suspend", run.name).returncode == Suspended.exit_code
    image = ("--output", tmp_path / "image", "--leave-running")
    assert flowgpu("pause-and-dump", run.name, *image).returncode == Suspended.exit_code
    store = ("--store", tmp_path / "store", "--every", 1, "--count", 1)
    assert flowgpu("checkpoint", run.name, *store).returncode == Suspended.exit_code
    row = next(row for row in json.loads(flowgpu("ps", "--json").stdout) if row["name"] == run.name)
    assert row["state"] == "suspended" and row["host_bytes"] > 0
    assert "suspended (" in flowgpu("ps").stdout
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


# Its end, and an image of it


def test_a_suspended_job_can_be_killed(runs: Any) -> None:
    run = runs("killed", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    before = suspend(run)["host_bytes"]
    assert before > 0
    root = Registry().find(run.name).root_pid
    assert flowgpu("kill", run.name).returncode == 0
    assert run.end(hurry=False) == 128 + signal.SIGKILL
    assert not start_time(root)
    assert state(run) == EXITED


@pytest.mark.parametrize(("engine", "workload"), [("native", "sharing"), ("replay", "textures")])
def test_a_suspended_job_is_dumped_and_restored(
    engine: str, workload: str, runs: Any, tmp_path: Path
) -> None:
    name = f"evicted-{engine}"
    run = runs(name, command(workload), "", "--engine", engine)
    run.wait_lines(5)
    suspend(run)
    run.dump(tmp_path / "image")
    assert run.end(hurry=False) == 75
    assert state(run) == DUMPED
    Image(tmp_path / "image").verify()
    if engine == "replay":
        told = ask("inspect", tmp_path / "image", "--record")["record"]
        assert all(one["objects"] for one in told) and told
    assert flowgpu("restore", tmp_path / "image", "--detach").returncode == 0
    # What is restored is as any other job.
    ask("suspend", name)
    again = flowgpu("pause-and-dump", name, "--output", tmp_path / "again", "--compress")
    assert again.returncode == 0, again.stderr
    run.hurry()
    restored = flowgpu("restore", tmp_path / "again")
    log = (tmp_path / "again" / "output.log").read_text().splitlines()
    assert log + restored.stdout.splitlines() == undisturbed(workload)


def test_a_suspended_job_whose_dump_fails_stays_suspended(runs: Any, tmp_path: Path) -> None:
    run = runs("undumped", command("segments"), "commit:1", "--engine", "replay")
    run.wait_lines(5)
    suspend(run)
    image = tmp_path / "image"
    assert flowgpu("pause-and-dump", run.name, "--output", image).returncode != 0
    assert state(run) == SUSPENDED and not image.exists()
    stands(run)
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


# Failures


def failing(fault: str, runs: Any, folder: Path) -> tuple[Run, Path]:
    """A job with that fault, and the file that can take it away."""
    setting = folder / "fault"
    setting.write_text(f"{fault}:1")
    run = runs(f"failed-{fault.replace('_', '-')}", command("segments"), f"@{setting}")
    run.wait_lines(3)
    return run, setting


@pytest.mark.parametrize(
    "fault",
    ["export", "gate", "handover", "copy_start", "strip", "detach", "copy_wait", "ghost_death"],
)
def test_a_suspension_that_fails_leaves_the_job_running(
    fault: str, runs: Any, tmp_path: Path
) -> None:
    run, setting = failing(fault, runs, tmp_path)
    assert flowgpu("suspend", run.name).returncode != 0
    setting.write_text("")
    assert state(run) == RUNNING
    run.wait_more(3)
    suspend(run)
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


@pytest.mark.parametrize("options", [(), ("--keep-context",)])
def test_who_ends_in_a_suspension_is_left_out_of_it(
    options: tuple[str, ...], runs: Any, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    setting.write_text("phase_stop:4")  # where STRIP begins: the copy of its memory is under way
    words = shlex.join(command("segments"))
    both = ["/bin/sh", "-c", f"{words} >&2 & {words}; wait"]
    run = runs(f"one-ends-{len(options)}", both, f"@{setting}")
    run.wait_lines(3)
    job = Registry().find(run.name)
    wait_for(lambda: run.out.with_suffix(".err").read_text().count("\n") > 3, "the other")
    asked = subprocess.Popen([*FLOWGPU, "suspend", run.name, *options], stderr=subprocess.PIPE)
    coordinator = psutil.Process(job.coordinator_pid)
    wait_for(lambda: coordinator.status() == psutil.STATUS_STOPPED, "the phase")
    psutil.Process(job.root_pid).children()[0].kill()
    coordinator.send_signal(signal.SIGCONT)
    _, said = asked.communicate(timeout=SECONDS)
    assert asked.returncode == 0, said
    assert state(run) == SUSPENDED
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


SHELL_GOES_ON = "{}; echo between; while [ ! -e $WORKLOAD_HURRY ]; do sleep 0.1; done"


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("options", [(), ("--keep-context",)])
def test_what_ends_in_its_suspension_is_not_called_suspended(
    shell: bool, options: tuple[str, ...], runs: Any, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    setting.write_text("phase_stop:2")  # where GATE begins
    name = f"ends-{len(options)}-{shell}"
    words = command("segments")
    if shell:
        words = ["/bin/sh", "-c", SHELL_GOES_ON.format(shlex.join(words))]
    run = runs(name, words, f"@{setting}")
    run.wait_lines(3)
    job = Registry().find(run.name)
    asked = subprocess.Popen([*FLOWGPU, "suspend", run.name, *options], stderr=subprocess.PIPE)
    coordinator = psutil.Process(job.coordinator_pid)
    wait_for(lambda: coordinator.status() == psutil.STATUS_STOPPED, "the gate's time")
    root = psutil.Process(job.root_pid)
    user = root.children()[0] if shell else root
    user.kill()
    wait_for(lambda: not start_time(user.pid), "the end of what uses the GPU")
    coordinator.send_signal(signal.SIGCONT)
    _, said = asked.communicate(timeout=SECONDS)
    wanted = NothingToSuspend if shell else JobEnded
    assert asked.returncode == wanted.exit_code, said
    assert shell or b"ended by itself during its suspension" in said
    if shell:
        assert state(run) == RUNNING
        assert run.end() == 0
    else:
        assert run.end() == 128 + signal.SIGKILL


@pytest.mark.parametrize("fault", ["fill", "rebuild", "ghost_read"])
def test_a_resume_that_fails_leaves_the_job_suspended(
    fault: str, runs: Any, tmp_path: Path
) -> None:
    run, setting = failing(fault, runs, tmp_path)
    suspend(run)
    failed = flowgpu("resume", run.name)
    assert failed.returncode == ResumeFailed.exit_code, failed.stderr
    setting.write_text("")
    assert state(run) == SUSPENDED
    stands(run)
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


# Takes all memory of the GPU, also what becomes free later.
HOLDS = """
import os, time
from cuda.bindings import driver as cu
assert cu.cuInit(0)[0] == 0
assert cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
holds = False
while not os.path.exists(os.environ["WORKLOAD_HURRY"]):
    if cu.cuMemAlloc(8 << 20)[0] == 0:
        continue
    if not holds:
        print("holds", flush=True)
    holds = True
    time.sleep(0.01)
"""


def test_a_gpu_that_is_full_leaves_the_job_suspended(runs: Any, empty: int) -> None:
    run = runs("waits", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    suspend(run)
    other = runs("holds", [sys.executable, "-c", HOLDS])
    other.wait_lines(1)
    failed = flowgpu("resume", run.name)
    assert failed.returncode == ResumeFailed.exit_code and "OUT_OF_MEMORY" in failed.stderr
    other.end()
    wait_for(lambda: free_bytes() == empty, "the memory")
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


# Who is killed


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_suspended_job_outlives_its_coordinators(engine: str, runs: Any, tmp_path: Path) -> None:
    run = runs(f"outlives-{engine}", command("segments"), "", "--engine", engine)
    run.wait_lines(3)
    suspend(run)
    for _ in range(2):
        kill_coordinator(run.name)
        wait_for(lambda: state(run) == SUSPENDED, "a suspended job")
        stands(run)
    resume(run)
    run.wait_more(2)
    suspend(run, "--keep-context")
    kill_coordinator(run.name)
    wait_for(lambda: state(run) == SUSPENDED, "a suspended job")
    resume(run)
    run.wait_more(2)
    suspend(run)
    kill_coordinator(run.name)
    wait_for(lambda: state(run) == SUSPENDED, "a suspended job")
    run.dump(tmp_path / "image")
    assert run.end() == 75
    restored = flowgpu("restore", tmp_path / "image")
    assert run.lines + restored.stdout.splitlines() == undisturbed("segments")


def test_a_suspended_job_outlives_its_keeper(runs: Any) -> None:
    run = runs("unkept", command("segments"), "", "--engine", "replay")
    run.wait_lines(3)
    suspend(run)
    keeper = Registry().find(run.name).keeper_pid
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not start_time(keeper), "the keeper's end")
    resume(run)
    assert run.end() == 0
    assert run.lines == undisturbed("segments")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Jobs whose first coordinator is killed at a point of a suspension or a resume."""
    with lane("emulated", tmp_path_factory.mktemp("jobs")) as found:
        found.coordinator = (sys.executable, "-P", "-m", "tests.faults.dying")
        yield found


TWO = f"{TASK.format('a')} & {TASK.format('b')} & wait"


def begin(jobs: Jobs, point: str, engine: EngineChoice) -> Running:
    job = jobs.run(["/bin/sh", "-c", TWO], coordinator_env={"DIE_AT": point}, engine=engine)
    wait_for(lambda: all(f"{name}step 3" in job.lines for name in "ab"), "the tasks")
    return job


def tell(job: Running, verb: str) -> None:
    with Connection(job.directory.control_socket, "it") as connection:
        connection.send(verb)
        connection.result()


def dies(job: Running, verb: str) -> None:
    """The coordinator that is asked is killed, and another is there."""
    with Connection(job.directory.control_socket, "it") as connection:
        connection.send(verb)
        with pytest.raises(CoordinatorGone):
            connection.result()
        assert isinstance(what_became(connection), CoordinatorReplaced), job.log


def both_go_on(job: Running) -> None:
    for name in "ab":
        count = steps(job, name)
        wait_for(lambda: steps(job, name) > count, "another step")  # noqa: B023


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize(
    "point", ["prepare", "gate", "handover", "copy_start", "strip", "copy_wait"]
)
def test_a_coordinator_that_dies_in_a_suspension_costs_nothing(
    jobs: Jobs, point: str, engine: EngineChoice
) -> None:
    job = begin(jobs, point, engine)
    dies(job, "suspend")
    assert job.record.state == RUNNING
    both_go_on(job)
    tell(job, "suspend")
    assert job.record.state == SUSPENDED
    tell(job, "resume")
    both_go_on(job)
    job.kill()


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("point", ["fill", "rebuild", "mapback", "open"])
def test_a_coordinator_that_dies_in_a_resume_costs_nothing(
    jobs: Jobs, point: str, engine: EngineChoice
) -> None:
    job = begin(jobs, point, engine)
    tell(job, "suspend")
    dies(job, "resume")
    if point in ("fill", "rebuild"):
        assert job.record.state == SUSPENDED
        tell(job, "resume")
    assert job.record.state == RUNNING
    both_go_on(job)
    tell(job, "suspend")
    tell(job, "resume")
    both_go_on(job)
    job.kill()


# Two jobs


def test_two_jobs_take_turns_on_a_gpu(runs: Any) -> None:
    words = {name: command(name) for name in ("segments", "graphs")}
    first, second = (runs(name, words[name], "", "--engine", "replay") for name in words)
    first.wait_lines(3)
    second.wait_lines(3)
    assert flowgpu("swap", first.name, second.name).returncode == NotSuspended.exit_code
    assert state(first) == RUNNING
    suspend(second)
    for out, into in ((first, second), (second, first), (first, second)):
        found = ask("swap", out.name, into.name)
        assert (found["out"]["job"], found["in"]["job"]) == (out.name, into.name)
        assert (state(out), state(into)) == (SUSPENDED, RUNNING)
        stands(out)
        into.wait_more(2)
    assert flowgpu("swap", first.name, second.name).returncode == Suspended.exit_code
    resume(first)
    for run in (first, second):
        assert run.end() == 0
        assert run.lines == undisturbed(run.name)


def test_a_swap_whose_second_job_cannot_come_leaves_the_first_running(runs: Any) -> None:
    first = runs("stays", command("segments"), "", "--engine", "replay")
    second = runs("cannot", command("graphs"), "fill:1", "--engine", "replay")
    first.wait_lines(3)
    second.wait_lines(3)
    suspend(second)
    assert flowgpu("swap", first.name, second.name).returncode == ResumeFailed.exit_code
    assert (state(first), state(second)) == (RUNNING, SUSPENDED)
    first.wait_more(2)
    ask("swap", first.name, second.name)
    resume(first)
    assert (first.end(), second.end()) == (0, 0)
    assert first.lines == undisturbed("segments") and second.lines == undisturbed("graphs")
