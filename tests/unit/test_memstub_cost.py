"""What the memory stub costs a program."""

from __future__ import annotations

import json
import subprocess

import pytest

from flowgpu import launch

NS_PER_EVENT = 200.0
NS_PER_COLD_EVENT = 2000.0


@pytest.mark.timeout(600)
def test_an_event_costs_little() -> None:
    program = launch.library_dir().parent / "bin" / "bench_memstub"
    hot = ("live_4000", "live_60000", "two_threads", "cold")
    cold = ("cold_mean", "coldest", "coldest_mean")
    limits = dict.fromkeys(hot, NS_PER_EVENT) | dict.fromkeys(cold, NS_PER_COLD_EVENT)
    measured: dict[str, float] = {}
    # Other tests, which use the same caches, only add to what it costs.
    for _ in range(3):
        done = subprocess.run(
            [program, launch.memory_stub()], capture_output=True, text=True, check=True
        )
        run = json.loads(done.stdout)
        assert set(run) == set(limits)
        measured = {name: min(run[name], measured.get(name, run[name])) for name in limits}
        if all(measured[name] < limits[name] for name in limits):
            break
    assert all(measured[name] > 0 for name in hot[:3]), measured
    assert all(measured[name] < limits[name] for name in limits), measured
