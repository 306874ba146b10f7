"""What bench/engine_steps.py reads in a coordinator's log."""

from __future__ import annotations

from bench.engine_steps import steps

LOG = """checkpoint: strip (good)
task 933: STRIP: variables 9.0 ms, free 52.2 ms
fault: none
task 933: STRIP: variables 45.3 ms, stop threads 1.5 ms, free 52.2 ms
task 933: REBUILD: cuInit 10.5 ms, settings and variables 73.8 ms
"""


def test_the_last_steps_that_a_log_tells_of() -> None:
    assert steps(LOG, "STRIP") == {"variables": 45.3, "stop threads": 1.5, "free": 52.2}
    assert steps(LOG, "REBUILD") == {"cuInit": 10.5, "settings and variables": 73.8}
    assert steps("checkpoint: strip (good)\n", "STRIP") == {}
