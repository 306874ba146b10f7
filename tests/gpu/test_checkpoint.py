"""Every workload on a real GPU: dumped and restored, it prints what it prints undisturbed.

FLOWGPU_TEST_GPU=emulated runs those that can on the emulated GPU. `campaign.py` does the same with
more dumps, several workloads at once and a table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowgpu.launch import GpuKind
from tests.gpu.catalogue import Workload, choose
from tests.gpu.harness import Baseline, Outcome, Plan, Soak, baseline_of
from tests.gpu.site import Site

KIND: GpuKind = "emulated" if os.environ.get("FLOWGPU_TEST_GPU") == "emulated" else "nvidia"
PLAN = Plan(dumps=3, work_seconds=5.0, job_seconds=10.0, deadline=200.0)
BASELINE_SECONDS = 150.0
WORKLOADS = choose("all", KIND)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500)]
Undisturbed = dict[str, Baseline]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A machine without the GPU fails, it does not skip."""
    with Site(KIND) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """Baselines by workload: each is run once for all its tests."""
    return {}


def soaked(
    site: Site, undisturbed: Undisturbed, workload: Workload, plan: Plan, evidence: Path
) -> Outcome:
    """Dumped and restored by `plan`; problems are said."""
    lacking = workload.missing()
    if lacking:
        pytest.skip(f"{lacking} is not here")
    if workload.name not in undisturbed:
        undisturbed[workload.name] = baseline_of(site, workload, plan, BASELINE_SECONDS)
    outcome = Soak(site, workload, undisturbed[workload.name], plan, evidence).run()
    assert not outcome.problems
    return outcome


# Jobs are prepared for both engines: replay saves all of these, and `auto` prefers it.
ENGINES = ["replay"] * PLAN.dumps


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_job_that_is_dumped_and_restored_prints_the_same_lines(
    site: Site, undisturbed: Undisturbed, workload: Workload, tmp_path: Path
) -> None:
    outcome = soaked(site, undisturbed, workload, PLAN, tmp_path)
    assert outcome.identical
    assert [dump["engine"] for dump in outcome.dumps] == ENGINES


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_job_left_running_and_its_last_image_print_the_same_lines(
    site: Site, undisturbed: Undisturbed, workload: Workload, tmp_path: Path
) -> None:
    plan = replace(PLAN, leave_running=True)
    outcome = soaked(site, undisturbed, workload, plan, tmp_path)
    assert outcome.identical
    assert [dump["engine"] for dump in outcome.dumps] == ENGINES


# Inference, which writes little of what it has in use; training, which writes nearly all of it.
RECOPIED = [
    workload for workload in WORKLOADS if workload.name in ("qwen2", "gpt2", "digits_mlp", "nbody")
]


@pytest.mark.parametrize("leave_running", [False, True], ids=["ended", "left-running"])
@pytest.mark.parametrize("workload", RECOPIED, ids=lambda workload: workload.name)
def test_a_job_that_is_copied_before_the_pause_prints_the_same_lines(
    site: Site, undisturbed: Undisturbed, workload: Workload, leave_running: bool, tmp_path: Path
) -> None:
    plan = replace(PLAN, leave_running=leave_running, mode="recopy")
    outcome = soaked(site, undisturbed, workload, plan, tmp_path)
    assert outcome.identical
    assert [dump["mode"] for dump in outcome.dumps] == ["recopy"] * PLAN.dumps
