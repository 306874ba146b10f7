"""What bench/engine_steps.py reads in a coordinator's log."""

from __future__ import annotations

from bench.engine_steps import steps, table

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


def test_the_table_has_the_medians_of_each_engine() -> None:
    def row(engine: str, seconds: float) -> dict[str, object]:
        phases = {"strip": seconds / 10, "engine": seconds / 2}
        dump = {"pause_seconds": seconds, "phases": phases, "cpu_bytes": 3 << 20}
        return {
            "engine": engine,
            "dump": dump | {"image_bytes": 5 << 20},
            "restore": {"restore_seconds": 2 * seconds, "phases": phases},
        }

    found = [row("replay", 1.0), row("native", 4.0), row("replay", 9.0), row("replay", 2.0)]
    lines = [line.split() for line in table({"gpt2": found})]
    assert lines[1] == ["gpt2", "replay", "3", "2.00", "0.200", "4.00", "1.000", "3", "5"]
    assert lines[2] == ["gpt2", "native", "1", "4.00", "0.400", "8.00", "2.000", "3", "5"]
