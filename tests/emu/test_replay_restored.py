"""Round trips of driver calls through images: dumped by the replay engine, and restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT
from flowgpu.image.reader import Image
from flowgpu.launch import GpuKind
from tests.emu.replay_cases import ANY
from tests.emu.replay_run import CASES
from tests.emu.support_lib import SECONDS, Program
from tests.emu.test_replay import LANES
from tests.gpu.site import Site
from tests.gpu.slots import seeing


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("devices", sorted({case.devices for case in CASES}))
def test_what_was_made_or_set_is_there_in_a_restored_job(
    devices: int, lane: GpuKind, tmp_path: Path
) -> None:
    """All cases that take so many GPUs are one job, and each calls the functions that it names."""
    real = lane == "nvidia"
    cases = [c for c in CASES if c.devices == devices and not (real and c.emulated_only)]

    def started(site: Site, folder: str) -> Program:
        (tmp_path / folder).mkdir()
        names = [case.name for case in cases]
        return Program(site, tmp_path / folder, names, "replay", "tests.emu.replay_run")

    with seeing(lane, devices), Site(lane) as site:
        program = started(site, "undisturbed")
        try:
            program.wait_ready()
            undisturbed = program.end()
        finally:
            program.kill()
        program = started(site, "dumped")
        try:
            program.wait_ready()
            words = ("--engine", "replay", "--output", str(program.image))
            site.call("pause-and-dump", program.name, *words).succeeded()
            assert program.process.wait(SECONDS) == DUMPED_EXIT
            assert Image(program.image).manifest.engine == "replay"
            program.go.touch()
            restored = site.call("restore", str(program.image)).succeeded()
        finally:
            program.kill()
    assert [*program.lines(), *restored.stdout.splitlines()] == undisturbed
    said = [json.loads(line) for line in restored.stdout.splitlines()]
    assert [one["case"] for one in said] == [case.name for case in cases]
    for case, one in zip(cases, said, strict=True):
        assert set(case.families) <= set(one["called"]), case.name
        assert one["after"] == one["before"], case.name
        parts = {"after": case.asks, "last": case.last, "ended": {} if real else case.ended}
        for part, asks in parts.items():
            for question, expected in asks.items():
                assert expected is ANY or one[part][question] == expected, (case.name, question)
