"""Ranks of NCCL on two GPUs and more: dumped and restored, or left running, they print what they
print undisturbed, with the communicators that they had or with new ones. What all of them have is
in an image once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.replicas import measured
from flowgpu.launch import EngineChoice
from tests.gpu.catalogue import Workload, catalogue
from tests.gpu.harness import Baseline, Plan, Soak, baseline_of
from tests.gpu.site import Site

PLAN = Plan(dumps=5, work_seconds=10.0, job_seconds=20.0, deadline=300.0)
BASELINE_SECONDS = 150.0
WORKLOADS = [one for one in catalogue().values() if one.gpus > 1 and not one.heavy]

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site("nvidia") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Baseline]:
    """Baselines by workload: each is run once for all its tests."""
    return {}


@pytest.mark.parametrize("communicators", ["keep", "rebuild"])
@pytest.mark.parametrize("leave_running", [False, True], ids=["restored", "left-running"])
@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_ranks_print_the_same_lines(
    workload: Workload,
    engine: EngineChoice,
    leave_running: bool,
    communicators: str,
    site: Site,
    undisturbed: dict[str, Baseline],
    tmp_path: Path,
) -> None:
    if lacking := workload.missing():
        pytest.skip(f"{lacking} is not here")
    plan = Plan(
        **{
            **vars(PLAN),
            "leave_running": leave_running,
            "engine": engine,
            "communicators": communicators,
        }
    )
    if workload.name not in undisturbed:
        undisturbed[workload.name] = baseline_of(site, workload, plan, BASELINE_SECONDS)
    outcome = Soak(site, workload, undisturbed[workload.name], plan, tmp_path).run()
    assert not outcome.problems
    assert outcome.identical
    assert [dump["engine"] for dump in outcome.dumps] == [engine] * PLAN.dumps
    assert all(dump["phases"]["cut"] < 1.0 for dump in outcome.dumps)


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_the_image_of_data_parallel_ranks_has_one_replica(
    engine: EngineChoice, site: Site, tmp_path: Path
) -> None:
    workload = catalogue()["gpt2_xl_ddp"]
    if lacking := workload.missing():
        pytest.skip(f"{lacking} is not here")
    found = measured(site, 2, engine, tmp_path)
    # Activations and buffers of NCCL differ.
    assert found["gpu_bytes_stored"] <= 1.1 * found["gpu_bytes_of_one"]
    assert found["image_bytes"] <= 1.1 * found["gpu_bytes_of_one"] + found["cpu_bytes"] + (64 << 20)
    if found["linked"]:
        assert found["gpu_bytes_read"] == found["gpu_bytes_stored"]
        assert found["gpu_bytes_passed"] >= 0.9 * found["gpu_bytes_replicated"]
    assert found["cut_seconds"] < 1.0
