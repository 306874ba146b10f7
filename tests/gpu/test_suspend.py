"""Every workload on a real GPU: suspended and resumed, it prints what it prints undisturbed.

FLOWGPU_TEST_GPU=emulated runs those that can on the emulated GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import test_checkpoint
from tests.gpu.catalogue import Workload
from tests.gpu.harness import Plan
from tests.gpu.site import Site
from tests.gpu.test_checkpoint import PLAN, WORKLOADS, Undisturbed, soaked

site, undisturbed = test_checkpoint.site, test_checkpoint.undisturbed

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500)]
CYCLES = 10


@pytest.mark.parametrize(
    ("workload", "engine"),
    [
        pytest.param(workload, engine, id=f"{workload.name}-{engine}")
        for workload in WORKLOADS
        for engine in workload.engines
    ],
)
def test_a_job_that_is_suspended_and_resumed_prints_the_same_lines(
    site: Site, undisturbed: Undisturbed, workload: Workload, engine: str, tmp_path: Path
) -> None:
    plan = Plan(**{**vars(PLAN), "suspend": True, "engine": engine, "dumps": CYCLES})
    outcome = soaked(site, undisturbed, workload, plan, tmp_path)
    assert outcome.identical
    assert {report["engine"] for report in outcome.dumps} == {engine, "none"}
