"""Jobs under a real HTCondor: evicted, held, on a machine that fails; they go on."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.condor.pool import JOB_SECONDS, Job, Pool, missing
from tests.emu.test_checkpoint import STEP_DELAY, STEPS, emulated_machine, undisturbed
from tests.ordinary_user import here, workload
from tests.unit.coordinator_job import wait_for
from tests.unit.criu_job import taken

absent = missing()
pytestmark = [
    pytest.mark.skipif(bool(absent), reason=f"HTCondor cannot run here: {', '.join(absent)}"),
    pytest.mark.timeout(4 * JOB_SECONDS),
]
COMMAND = shlex.join(workload("digits_mlp", **{"steps": STEPS, "step-delay": STEP_DELAY}))


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Lines of a run that nobody disturbed."""
    with emulated_machine():
        return undisturbed("digits_mlp")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


@pytest.fixture
def submit(pool: Pool) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def new(command: str = COMMAND, *options: str, user: str = "flowgpu-job", **macros: str) -> Job:
        made.append(Job(pool, command, *options, user=user, **macros))
        return made[-1]

    yield new
    for job in made:
        pool.run("condor_rm", job.id)
    wait_for(lambda: not pool.job_processes(), "the end of all jobs", JOB_SECONDS)


def test_a_job_that_saves_itself_at_times_goes_on_to_its_end(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = submit(every="4")
    job.wait_restored(2)
    assert job.events("001") == 1 and job.events("004") == 0  # in the same place
    job.ends_as(expected)


def test_a_job_that_is_told_to_leave_goes_on_in_another_folder(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = submit()
    job.wait_lines(3)
    (first,) = job.scratch()
    job.pool.ask("condor_vacate_job", job.id, user=job.user)
    job.wait_event("004")
    job.wait_restored(1)
    assert job.scratch() != [first]
    assert f"{here(first)}, where it was" in job.said.partition("it finds this folder at ")[2]
    job.ends_as(expected)


def test_a_job_leaves_its_machine_to_a_user_with_a_better_priority(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = submit()
    job.wait_lines(3)
    place = job.ad("RemoteHost")
    sleeps = ("executable = /bin/sleep", "arguments = 1000", "transfer_output_files =")
    there = f'requirements = Name == "{place}"'
    boss = submit("", *sleeps, there, user="flowgpu-boss")
    boss.wait_event("001")
    job.wait_event("004")
    job.wait_restored(1)
    assert job.ad("RemoteHost") != place
    job.ends_as(expected)


def held(submit: Callable[..., Job]) -> Job:
    """A job that was held after some steps: it is dumped, and nothing of it runs."""
    job = submit()
    job.wait_lines(3)
    job.pool.ask("condor_hold", job.id, user=job.user)
    job.wait_event("012")
    wait_for(lambda: not job.pool.job_processes(), "its end", JOB_SECONDS)
    return job


def test_a_job_that_was_held_goes_on_when_it_is_released(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = held(submit)
    assert 3 <= len(job.lines) < len(expected)
    job.pool.ask("condor_release", job.id, user=job.user)
    job.wait_restored(1)
    job.ends_as(expected)


def test_a_job_whose_process_id_is_taken_is_queued_until_it_is_free(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = held(submit)
    with taken(job.saved_pid()):
        job.pool.ask("condor_release", job.id, user=job.user)
        job.wait_event("001", 3)
    job.wait_restored(1)
    job.ends_as(expected)


def test_a_removed_job_leaves_nothing_that_runs(submit: Callable[..., Job]) -> None:
    job = submit()
    job.wait_lines(2)
    assert len(job.pool.job_processes()) > 4  # timeout, command, keeper, coordinator, job
    job.pool.ask("condor_rm", job.id, user=job.user)
    job.wait_event("009")
    wait_for(lambda: not job.pool.job_processes(), "its end", JOB_SECONDS)


def test_a_job_of_a_machine_that_fails_goes_on_from_what_it_had_saved(
    submit: Callable[..., Job], expected: list[str]
) -> None:
    job = submit(every="4")
    job.wait_restored(1)
    # First who would tell of the others' end.
    daemons = job.pool.daemons("condor_startd", "condor_starter")
    assert len(daemons) == 2
    for pid in (*daemons, *job.pool.job_processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait_event("001", 2)
    job.wait_restored(1)
    job.ends_as(expected)
