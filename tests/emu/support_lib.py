"""Cases of docs/reference/support.md: what each is, and how one is shown on a lane.

A body is a generator: it makes and uses its things, yields once, where the checkpoint is taken, and
uses them again. What it says must be the same whether there was a checkpoint or not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flowgpu.errors import DUMPED_EXIT, EngineUnusable, Unsupported
from tests.gpu.site import ROOT, Site
from tests.patience import SECONDS

Say = Callable[..., None]
Body = Callable[[Say], Iterator[None]]
Outcome = Literal["round-trips", "refused", "not supported"]
Engine = Literal["native", "replay"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
NOT_RUN = "not run"  # the outcome of a case that the machine has too few GPUs for


@dataclass(frozen=True)
class Case:
    """`kind`: what the page calls it; `emulated`: what becomes of it on the emulated GPU, with the
    engine native and with replay; `refusal`: what a refusal names, on any lane, `unsaved` and
    `native_unsaved` what one of the engine replay or native names.
    """

    kind: str
    body: Body
    emulated: tuple[Outcome, Outcome]
    devices: int = 1
    refusal: str = ""
    unsaved: str = ""
    native_unsaved: str = ""

    def outcome(self, engine: Engine) -> Outcome:
        """What becomes of it on the emulated GPU."""
        emulated = self.emulated[ENGINES.index(engine)]
        return "refused" if self._unsaved(engine) and emulated == "round-trips" else emulated

    def names(self, engine: Engine) -> str:
        """What a refusal names; empty if it must round-trip."""
        return self.refusal or self._unsaved(engine)

    def _unsaved(self, engine: Engine) -> str:
        return self.unsaved if engine == "replay" else self.native_unsaved


CASES: dict[str, Case] = {}


def case(
    kind: str,
    emulated: Outcome = "round-trips",
    emulated_replay: Outcome | None = None,
    *,
    devices: int = 1,
    refusal: str = "",
    unsaved: str = "",
    native_unsaved: str = "",
) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        outcomes = emulated, emulated_replay or emulated
        CASES[body.__name__] = Case(kind, body, outcomes, devices, refusal, unsaved, native_unsaved)
        return body

    return register


@dataclass(frozen=True)
class Shown:
    """What became of some cases. `words`: the refusal."""

    outcome: Outcome
    words: str = ""


class CaseFailed(AssertionError):
    """It neither round-trips nor is refused by name."""


class Program:
    """Cases as a job of the site, by a module that says `ready` and waits for a file."""

    def __init__(
        self,
        site: Site,
        folder: Path,
        names: Sequence[str],
        engine: Engine,
        module: str = "tests.emu.support_run",
    ) -> None:
        self.site, self.names = site, names
        self.go, self.out, self.err = (folder / word for word in ("go", "out", "err"))
        self.image = folder / "image"
        words = [sys.executable, "-m", module, str(self.go), *names]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = site.start(
                *("run", "--name", folder.name, "--gpu", site.kind, "--engine", engine),
                *("--", *words),
                stdout=out,
                stderr=err,
            )
        self.name = folder.name

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while "ready" not in self.lines():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise CaseFailed(f"{self.names} do not get ready: {self.err.read_text()}")
            time.sleep(0.01)

    def end(self) -> list[str]:
        """Let it go on; all that it has said."""
        self.go.touch()
        if self.process.wait(SECONDS) != 0:
            raise CaseFailed(f"{self.names}: {self.lines()} {self.err.read_text()}")
        return self.lines()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.site.call("kill", self.name)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(SECONDS)
            self.process.kill()
        self.process.wait()


def undisturbed(site: Site, folder: Path, names: Sequence[str], engine: Engine) -> list[str]:
    """What the cases say without a checkpoint."""
    folder.mkdir()
    program = Program(site, folder, names, engine)
    try:
        program.wait_ready()
        return program.end()
    finally:
        program.kill()


def show(site: Site, folder: Path, names: Sequence[str], engine: Engine) -> Shown:
    """Dump and restore the cases in one process. Raises CaseFailed."""
    expected = undisturbed(site, folder / "undisturbed", names, engine)
    if any("False" in line for line in expected):
        raise CaseFailed(f"{names} say {expected}")
    place = folder / "dumped"
    place.mkdir()
    program = Program(site, place, names, engine)
    try:
        program.wait_ready()
        words = ("--engine", engine, "--output", str(program.image), "--json")
        call = site.call("pause-and-dump", program.name, *words)
        if call.code in (Unsupported.exit_code, EngineUnusable.exit_code):
            if program.image.exists() or program.end() != expected:
                raise CaseFailed(f"{names} do not go on after {call.stderr}")
            # A phase that takes its time has said so first.
            lines = call.stderr.splitlines()
            (error,) = (line for line in lines if line.startswith("Error: "))
            return Shown("refused", error.removeprefix("Error: "))
        json.loads(call.succeeded().stdout)
        if program.process.wait(SECONDS) != DUMPED_EXIT:
            raise CaseFailed(f"{names}: the dumped job ended with {program.process.returncode}")
        program.go.touch()
        restored = site.call("restore", str(program.image)).succeeded()
        found = program.lines() + restored.stdout.splitlines()
        if found != expected:
            raise CaseFailed(f"{names}: {found} instead of {expected}")
        return Shown("round-trips")
    finally:
        program.kill()


def answers(site: Site, names: Sequence[str]) -> dict[str, str]:
    """What the driver, without FlowGPU, answers to cases that do not get ready; else `ready`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.emu.support_run", "-", *names],
        cwd=ROOT,
        env=site.plain_environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0:
        raise CaseFailed(done.stderr)
    pairs = (line.split() for line in done.stdout.splitlines())
    return {name: answer.removeprefix("CUDA_ERROR_") for name, answer in pairs}
