"""Jobs under a real Slurm: preempted, out of time, on a node that is drained; they go on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowgpu.image.store import Store
from flowgpu.jobs import Registry, is_process
from flowgpu.launch import emulator_socket
from tests.emu import node_program
from tests.emu.test_checkpoint import (
    SECONDS,
    STEPS,
    emulated_machine,
    end_emulator,
    flowgpu,
    undisturbed,
)
from tests.slurm.cluster import ROOT, Cluster, missing
from tests.slurm.job import Job, cluster
from tests.unit.coordinator_job import wait_for

PROGRAM = Path(node_program.__file__)
absent = missing()
pytestmark = [
    pytest.mark.skipif(bool(absent), reason=f"Slurm is not installed: {', '.join(absent)}"),
    pytest.mark.timeout(4 * SECONDS),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Path]:
    """A runtime folder, and an emulated GPU that is there before the jobs, as a real one is."""
    with emulated_machine() as base:
        assert flowgpu("run", "--gpu", "emulated", "--", "true").returncode == 0
        yield base


@pytest.fixture(scope="module")
def expected(machine: Path) -> list[str]:
    """Lines of a run that nobody disturbed."""
    return undisturbed("digits_mlp")


@pytest.fixture(scope="module")
def slurm(machine: Path) -> Iterator[Cluster]:
    with cluster(nodes=2) as found:
        yield found


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def new(*options: str) -> Job:
        made.append(Job(slurm, tmp_path, *options))
        return made[-1]

    yield new
    for job in made:
        slurm.ask("scancel", job.number)


def preempted(job: Job, expected: list[str]) -> None:
    """A job of the partition `high` takes the place of this one, which goes on afterwards."""
    slurm, go = job.slurm, job.folder / "go"
    job.wait_more(3)
    node = slurm.job(job.number)["NodeList"]
    words = ("--parsable", "-p", "high", f"--nodelist={node}", "--gres=gpu:1", "--mem=500")
    wait = f"while [ ! -e {go} ]; do sleep 0.1; done"
    other = slurm.ask("sbatch", *words, f"--output={job.folder}/other", "--wrap", wait).strip()
    slurm.wait_state(other, "RUNNING")
    # It may begin again on another node right away.
    wait_for(lambda: "the same command goes on from it" in job.said, "the dump", SECONDS)
    assert len(job.lines) < len(expected)
    go.touch()
    wait_for(lambda: f"restored job-{job.number}" in job.said, "the restore", SECONDS)
    job.ends_as(expected, restarts=1)


def test_a_preempted_job_is_requeued_and_goes_on_to_its_end(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = submit()
    preempted(job, expected)
    assert job.lines == expected


@pytest.fixture
def apart(machine: Path) -> Iterator[str]:
    """What makes a host of each node, as far as FlowGPU sees: the shell's words for that."""
    bases = [Path(f"{machine}-node{number}") for number in range(2)]
    for base in bases:
        done = flowgpu(
            "run", "--gpu", "emulated", "--", "true", env={"FLOWGPU_RUNTIME_DIR": str(base)}
        )
        assert done.returncode == 0, done.stderr
    # The names of the nodes lead nowhere here.
    yield f"export FLOWGPU_RUNTIME_DIR={machine}-$SLURMD_NODENAME SLURM_STEP_NODELIST=127.0.0.1"
    for base in bases:
        end_emulator(emulator_socket(base))
        shutil.rmtree(base, ignore_errors=True)


def test_a_preempted_job_of_two_nodes_goes_on_on_both(
    slurm: Cluster, apart: str, tmp_path: Path
) -> None:
    rank = 'exec "$0" "$1" "$2" $SLURM_PROCID 2 "$3"'
    words = ("bash", "-c", rank, sys.executable, str(PROGRAM), str(tmp_path), str(STEPS))
    job = Job(slurm, tmp_path, "-N2", script="nodes.sh", words=words, every="600", first=apart)
    go = tmp_path / "go"
    try:
        job.wait_more(6)
        wait = f"while [ ! -e {go} ]; do sleep 0.1; done"
        other = ("--parsable", "-p", "high", "--nodelist=node1", "--mem=500", "--gres=gpu:1")
        number = slurm.ask("sbatch", *other, f"--output={tmp_path}/other", "--wrap", wait).strip()
        slurm.wait_state(number, "RUNNING")
        wait_for(lambda: job.said.count("goes on from it") == 2, "the dump of both", SECONDS)
        go.touch()
        wait_for(lambda: job.said.count(f"restored job-{job.number}") == 2, "both again", SECONDS)
        job.hurrying.touch()
        assert slurm.wait_state(job.number, "COMPLETED")["Restarts"] == "1", job.said
    finally:
        slurm.ask("scancel", job.number)
    lines = [line for of_rank in node_program.expected(2, STEPS) for line in (*of_rank, "done")]
    assert sorted(job.lines) == sorted(lines), job.said


def test_a_job_requeues_itself_where_slurm_does_not(expected: list[str], tmp_path: Path) -> None:
    with cluster(nodes=1, without=("RequeueExit", "CliFilterPlugins")) as slurm:
        job = Job(slurm, tmp_path, script="requeue.sh")
        preempted(job, expected)
    assert job.lines == expected


def test_a_job_that_is_told_of_its_time_limit_goes_on_in_another_turn(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    """Slurm tells it up to a minute earlier than asked for: at once here, after its first steps."""
    job = submit("--time=2", "--signal=B:URG@110")
    job.wait_more(1)
    wait_for(lambda: "the same command goes on from it" in job.said, "the dump", SECONDS)
    assert len(job.lines) < len(expected)
    job.ends_as(expected, restarts=1)


def test_a_job_leaves_a_node_that_is_drained(
    submit: Callable[..., Job], slurm: Cluster, expected: list[str]
) -> None:
    job = submit()
    job.wait_more(3)
    here = slurm.job(job.number)["NodeList"]
    (other,) = {*slurm.nodes} - {here}
    slurm.ask("scontrol", "update", f"NodeName={here}", "State=DRAIN", "Reason=repair")
    try:
        slurm.ask("scancel", "--batch", "--signal=URG", job.number)
        wait_for(lambda: f"restored job-{job.number}" in job.said, "the restore", SECONDS)
        wait_for(lambda: slurm.job(job.number)["JobState"] == "RUNNING", "the job", SECONDS)
        assert slurm.job(job.number)["NodeList"] == other
        job.ends_as(expected, restarts=1)
    finally:
        slurm.bring_back(here)


def test_a_job_of_a_node_that_fails_goes_on_from_its_last_periodic_image(
    submit: Callable[..., Job], slurm: Cluster, expected: list[str]
) -> None:
    job = submit()
    images = Store(job.folder / "images" / f"job-{job.number}")
    wait_for(lambda: len(images.names()) >= 2, "two images", SECONDS)
    here = slurm.job(job.number)["NodeList"]
    slurm.ask("scontrol", "update", f"NodeName={here}", "State=DOWN", "Reason=fire")
    try:
        wait_for(lambda: f"restored job-{job.number}" in job.said, "the restore", SECONDS)
        job.hurrying.touch()
        slurm.wait_state(job.number, "COMPLETED")
    finally:
        slurm.bring_back(here)
    # What it had said after that image comes again.
    again = [number for number, line in enumerate(job.lines) if job.lines.index(line) < number]
    assert [line for number, line in enumerate(job.lines) if number not in again] == expected
    assert again == [*range(again[0], again[-1] + 1)] if again else True


def test_the_time_from_a_preemption_to_the_next_step_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "preempt.json"
    words = ("--gpu", "emulated", "--job", "digits_mlp", "--rounds", "2", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "bench.preempt", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["kind"] == "preempt" and len(document["rows"]) == 2
    for row in document["rows"]:
        assert row["total"] == pytest.approx(row["flowgpu"] + row["slurm"])
        assert row["flowgpu"] == pytest.approx(row["dump"] + row["again"])
        assert min(row["slurm"], row["pause"], row["again"]) > 0
        assert row["dump"] > row["pause"]
    assert done.stdout.startswith("digits_mlp: seconds from the request")


def test_a_cancelled_job_leaves_nothing_that_runs(
    submit: Callable[..., Job], slurm: Cluster
) -> None:
    job = submit()
    job.wait_more(2)
    record = Registry().find(f"job-{job.number}")
    slurm.ask("scancel", job.number)
    slurm.wait_state(job.number, "CANCELLED")
    processes = (
        (record.root_pid, record.root_start),
        (record.coordinator_pid, record.coordinator_start),
        (record.keeper_pid, record.keeper_start),
    )
    for pid, start in processes:
        wait_for(lambda pid=pid, start=start: not is_process(pid, start), "its end", SECONDS)
    assert not any(is_process(pid, start) for pid, start in processes)
