"""Drawn programs of driver calls: every driver that we have answers them alike.

FLOWGPU_PROGRAMS is how many are drawn; `make test-programs` draws many, and others each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowgpu.wire import Engine
from tests.emu.intercept_lib import ROOT, bare_environment, intercepted
from tests.emu.program_checkpoints import Checkpoints
from tests.emu.program_compare import described, difference
from tests.emu.program_gen import BYTES, STARTS, THEMES, build, names_of
from tests.emu.program_graphs import GRAPHS
from tests.emu.program_kept import ASKED, KEPT
from tests.emu.program_results import Count, keep
from tests.emu.program_run import CRASHED, FAILED, HUNG
from tests.emu.record_programs import read, recordings

ENGINES = (Engine.NATIVE, Engine.REPLAY)
MANY = os.environ.get("FLOWGPU_PROGRAMS")
DEVICE_UNAVAILABLE = 46  # the device's process has ended
# What a driver says of a function whose module was unloaded is what it finds in freed memory.
NOT_AT_EVERY_STEP = ("parameter",)
# The real driver compiles a library when it is first used, the emulated one when it is loaded.
LATER = ("library",)


class Lane:
    """A process that runs programs on one driver."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.emu.program_run"],
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, program: list[Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()

    def receive(self) -> list[Any]:
        """A trace in which nothing was wrong with the driver as a whole."""
        assert self.process.stdout
        trace: list[Any] = json.loads(self.process.stdout.readline())
        wrong = {CRASHED, HUNG, FAILED} & {word for word in trace if isinstance(word, str)}
        assert not wrong, trace[-3:]
        assert [DEVICE_UNAVAILABLE] not in trace, "the device ended"
        return trace

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@contextmanager
def lanes(folder: Path, engine: Engine = Engine.NATIVE) -> Iterator[tuple[Lane, Lane, Checkpoints]]:
    """The emulated driver, and the same behind the intercept library; each its own device."""
    environments = []
    for name in ("bare", "behind"):
        (folder / name).mkdir()
        environments.append(bare_environment(folder / name))
        environments[-1].pop("FLOWGPU_EMU_WRITE_LOG")
    bare, behind = environments[0], intercepted(environments[1], folder)
    if engine is Engine.REPLAY:
        behind["FLOWGPU_REPLAY"] = "1"
    with closing(Checkpoints(folder, engine)) as checkpoints:
        behind["FLOWGPU_TEST_CHECKPOINT"] = str(checkpoints.path)
        with closing(Lane(bare)) as one, closing(Lane(behind)) as other:
            yield one, other, checkpoints


def steps() -> st.SearchStrategy[list[tuple[str, bytes]]]:
    """Mostly about one thing."""
    everything = sorted({name for theme in THEMES for name in names_of(theme)})

    def of(theme: str) -> st.SearchStrategy[list[tuple[str, bytes]]]:
        names = st.sampled_from(names_of(theme) * 3 + everything)
        return st.lists(st.tuples(names, st.binary(max_size=BYTES)), min_size=1, max_size=20)

    return st.sampled_from(sorted(THEMES)).flatmap(of)


def names(drawn: list[tuple[str, bytes]]) -> list[str]:
    return [name for name, _ in drawn]


def unlike(bare: Lane, behind: Lane, checkpoints: Checkpoints, program: list[Any]) -> str:
    """What the two answer differently, or what was refused that should not; empty: nothing."""
    for lane in (bare, behind):
        lane.send(program)
    one, other = bare.receive(), behind.receive()
    if difference(program, one, other) is not None:
        return described(program, one, other)
    refused = checkpoints.take_unexpected()
    return f"{refused}: {program}" if refused else ""


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name.lower())
def test_neither_the_intercept_library_nor_a_checkpoint_changes_an_answer(
    engine: Engine, tmp_path: Path
) -> None:
    count = Count()
    with lanes(tmp_path, engine) as (bare, behind, checkpoints):

        @settings(
            max_examples=int(MANY or (600 if engine is Engine.NATIVE else 200)),
            derandomize=MANY is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, len(STARTS) - 1), steps(), st.integers(0, 20))
        def check(start: int, drawn: list[tuple[str, bytes]], at: int) -> None:
            program = build(start, drawn)
            # What hypothesis draws depends on the modules that are loaded: hardly any checkpoint
            # (2 of 200 programs), or many. So each program has one more.
            if not {*NOT_AT_EVERY_STEP} & {*names(drawn)}:
                program.insert(at, ["checkpoint"])
            assert not unlike(bare, behind, checkpoints, program)
            count.add(program, names(drawn))

        check()
        # 3 to 6 % with native, 5 to 8 % with replay: what is drawn differs, as above.
        assert checkpoints.share_refused() < (0.08 if engine is Engine.NATIVE else 0.11)
        # 72 to 91 %: those of programs that do not get to cuInit do not count.
        assert checkpoints.done > 0.65 * count.programs
        keep("at a drawn step", engine.name.lower(), count, checkpoints.done)


def test_cuda_may_end_and_be_made_anew_after_every_step(tmp_path: Path) -> None:
    count = Count()
    with lanes(tmp_path, Engine.REPLAY) as (bare, behind, checkpoints):

        @settings(
            max_examples=int(MANY or 600) // 5,
            derandomize=MANY is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, len(STARTS) - 1), steps())
        def check(start: int, drawn: list[tuple[str, bytes]]) -> None:
            program = build(start, [step for step in drawn if step[0] not in NOT_AT_EVERY_STEP])
            whole = [step for one in program for step in (one, ["checkpoint"])]
            assert not unlike(bare, behind, checkpoints, whole)
            count.add(program, names(drawn))

        check()
        # 7 to 21 %: what is refused once is mostly refused until the program's end.
        assert checkpoints.share_refused() < 0.25
        assert checkpoints.done > 8 * count.programs  # of 11 to 12
        keep("after every step", "replay", count, checkpoints.done)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name.lower())
def test_kept_programs_are_answered_alike(engine: Engine, tmp_path: Path) -> None:
    with lanes(tmp_path, engine) as (bare, behind, checkpoints):
        for program in [*KEPT.values(), *ASKED]:
            assert not unlike(bare, behind, checkpoints, program)


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
def test_the_emulated_driver_answers_as_the_recorded_one(path: Path, tmp_path: Path) -> None:
    recorded = read(path)
    wrong = []
    with lanes(tmp_path) as (bare, _, _):
        for program, real in zip(recorded["programs"], recorded["traces"], strict=True):
            bare.send(program)
            trace = bare.receive()
            at = difference(program, real, trace)
            if at is not None and program[at][0] not in LATER:
                wrong.append(described(program, real, trace))
    assert not wrong, "\n".join(wrong)


def test_programs_of_a_theme_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "recorded.json"
    words = ["--seed", "3", "--count", "4", "--theme", "graphs", "--out", str(file), str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.emu.record_programs", *words],
        env=bare_environment(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.startswith("4 of 4 programs on "), done.stdout
    recorded = read(file)
    assert [len(recorded[key]) for key in ("programs", "traces")] == [4, 4]
    steps_of_graphs = [
        step for program in recorded["programs"] for step in program if step[0] in GRAPHS
    ]
    assert len(steps_of_graphs) > 10
