"""Train uninterrupted, train again with a checkpoint and a restore in the middle, and compare.

``python -m workloads.demo`` prints one table and fails unless every step after the restore gave
the same bits as the uninterrupted run: loss, weights, momentum and data set.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# The exit code of `flowgpu run` when the job was dumped away.
DUMPED_EXIT = 75
CALL_TIMEOUT = 300.0
# Rows of the table at either end and on either side of the pause.
SHOWN_ENDS, SHOWN_AROUND = 2, 3


class DemoError(Exception):
    """The demo could not be carried out; the message says where and why."""


@dataclass
class Run:
    """The step lines of one run: value by step, and the digest of the last line."""

    steps: dict[int, str] = field(default_factory=dict)
    done: str | None = None

    def add(self, line: str) -> None:
        """Take one output line; other lines than the workload's are ignored.

        Raises DemoError when a step comes a second time with another value.
        """
        words = line.split()
        if len(words) == 3 and words[0] == "step" and words[1].isdigit():
            step = int(words[1])
            if self.steps.setdefault(step, words[2]) != words[2]:
                raise DemoError(f"step {step} was printed twice, with different values")
        elif len(words) == 2 and words[0] == "done":
            self.done = words[1]


@dataclass(frozen=True)
class Comparison:
    """What comparing two runs found; steps are counted from the first one after the pause."""

    last_before: int
    compared: int
    different: list[int]
    missing: list[int]
    done_equal: bool

    @property
    def equal(self) -> bool:
        return self.done_equal and not self.different and not self.missing and self.compared > 0


def compare(plain: Run, paused: Run, last_before: int) -> Comparison:
    """Compare all steps; ``last_before`` is the last step printed before the pause."""
    missing = [step for step in plain.steps if step not in paused.steps]
    missing += [step for step in paused.steps if step not in plain.steps]
    shared = plain.steps.keys() & paused.steps.keys()
    return Comparison(
        last_before=last_before,
        compared=sum(1 for step in shared if step > last_before),
        different=sorted(step for step in shared if plain.steps[step] != paused.steps[step]),
        missing=sorted(missing),
        done_equal=plain.done is not None and plain.done == paused.done,
    )


def shown_steps(steps: list[int], last_before: int, different: list[int]) -> list[int]:
    """Return the steps that the table shows: the ends, those around the pause, and differences."""
    chosen = set(steps[:SHOWN_ENDS]) | set(steps[-SHOWN_ENDS:]) | set(different[:SHOWN_AROUND])
    chosen |= set(range(last_before - SHOWN_AROUND + 1, last_before + SHOWN_AROUND + 1))
    return sorted(chosen & set(steps))


def loss_text(value: str | None) -> str:
    """Return the loss of a ``<loss>/<digest>`` value to 9 digits, with the digest's beginning."""
    if value is None:
        return "-"
    loss, _, digest = value.partition("/")
    return f"{float.fromhex(loss):.9f}  {digest[:8]}"


class Cli:
    """Calls FlowGPU's command line as a user would."""

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command that prints one JSON object; raise DemoError unless it succeeds."""
        try:
            result = subprocess.run(
                [*self.command, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                timeout=CALL_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"flowgpu {arguments[0]} took over {CALL_TIMEOUT:.0f} s") from None
        if result.returncode != 0:
            raise DemoError(f"flowgpu {arguments[0]} ended with exit code {result.returncode}")
        try:
            answer = json.loads(result.stdout)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise DemoError(f"flowgpu {arguments[0]} did not print one JSON object")
        return answer


class Follower:
    """Reads the output of a started command in a thread, line by line."""

    def __init__(self, process: subprocess.Popen[str], run: Run) -> None:
        self.process, self.run = process, run
        self.error: DemoError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                try:
                    self.run.add(line)
                except DemoError as error:
                    self.error = error
                self._changed.notify_all()

    def wait_for_step(self, step: int) -> None:
        """Return when the step was printed; raise DemoError when the command ends before."""
        deadline = time.monotonic() + CALL_TIMEOUT
        with self._changed:
            while step not in self.run.steps:
                if not self._thread.is_alive() or time.monotonic() > deadline:
                    raise DemoError(f"the job ended or stood still before step {step}")
                self._changed.wait(0.1)

    def finish(self) -> int:
        """Wait for the end of the output and return the command's exit code."""
        self._thread.join(CALL_TIMEOUT)
        if self._thread.is_alive():
            raise DemoError(f"the job did not end within {CALL_TIMEOUT:.0f} s")
        code = self.process.wait(CALL_TIMEOUT)
        if self.error is not None:
            raise self.error
        return code


@contextmanager
def following(cli: Cli, run: Run, *arguments: str) -> Iterator[Follower]:
    """Start a command and follow its output; end it if the caller leaves early."""
    process = cli.start(*arguments)
    try:
        yield Follower(process, run)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class Settings:
    name: str
    gpu: str
    steps: int
    pause_after: int
    step_delay: float
    image: Path

    def job(self, *, delay: float) -> list[str]:
        program = [sys.executable, "workloads/digits_mlp.py", "--steps", str(self.steps)]
        return [*program, "--step-delay", str(delay)]


@dataclass(frozen=True)
class Story:
    """All that the demo has to tell."""

    plain: Run
    paused: Run
    comparison: Comparison
    pause: dict[str, Any]
    restore: dict[str, Any]


def run_plain(cli: Cli, settings: Settings) -> Run:
    run = Run()
    name = f"{settings.name}-plain"
    command = ["run", "--name", name, "--gpu", settings.gpu, "--", *settings.job(delay=0)]
    with following(cli, run, *command) as follower:
        code = follower.finish()
    if code != 0 or run.done is None:
        raise DemoError(f"the uninterrupted run ended with exit code {code}")
    return run


def run_paused(cli: Cli, settings: Settings) -> tuple[Run, int, dict[str, Any], dict[str, Any]]:
    """Return the run with a checkpoint, its last step before, and what pause and restore said."""
    run, name = Run(), settings.name
    job = settings.job(delay=settings.step_delay)
    with following(cli, run, "run", "--name", name, "--gpu", settings.gpu, "--", *job) as follower:
        follower.wait_for_step(settings.pause_after)
        image = str(settings.image)
        pause = cli.json("pause-and-dump", name, "--output", image, "--json")
        code = follower.finish()
    if code != DUMPED_EXIT:
        raise DemoError(f"the paused job ended with exit code {code}, not {DUMPED_EXIT}")
    if run.done is not None:
        raise DemoError("the job was done before the pause took effect")
    last_before = max(run.steps)
    restore = cli.json("restore", image, "--detach", "--json")
    with following(cli, run, "logs", str(restore.get("job", name)), "--follow") as follower:
        code = follower.finish()
    if code != 0:
        raise DemoError(f"flowgpu logs ended with exit code {code}")
    return run, last_before, pause, restore


def tell(console: Console, story: Story) -> None:
    """Print the table and the sentences below it."""
    comparison, pause = story.comparison, story.pause
    table = Table("step", "uninterrupted: loss, state", "with checkpoint: loss, state", "equal")
    steps = sorted(story.plain.steps.keys() | story.paused.steps.keys())
    previous = -1
    for step in shown_steps(steps, comparison.last_before, comparison.different):
        if step > previous + 1:
            table.add_row("...", "...", "...", "")
        plain, paused = story.plain.steps.get(step), story.paused.steps.get(step)
        mark = "[green]yes[/]" if plain == paused else "[red]NO[/]"
        table.add_row(
            str(step),
            loss_text(plain),
            loss_text(paused),
            mark,
            end_section=step in (comparison.last_before, steps[-1]),
        )
        previous = step
    console.print(table)
    console.print(
        f"paused after step {comparison.last_before}: {pause['pause_seconds']:.2f} s pause, "
        f"{pause['total_seconds']:.2f} s in all, image {pause['image_bytes'] / 2**20:.1f} MiB, "
        f"job ended with exit code {DUMPED_EXIT}; "
        f"restored in {story.restore['restore_seconds']:.2f} s",
        highlight=False,
    )
    console.print(f"GPU: {pause['gpu']}, engine: {pause['engine']}", highlight=False)
    if comparison.equal:
        console.print(
            f"[green]all {comparison.compared} steps after the restore are equal to the bit[/]",
            highlight=False,
        )
        return
    console.print(
        f"[red]different: {comparison.different or 'none'}, missing: "
        f"{comparison.missing or 'none'}, final digest equal: {comparison.done_equal}[/]",
        highlight=False,
    )


def settings_of(arguments: argparse.Namespace, folder: Path) -> Settings:
    image = arguments.output or folder / "image"
    return Settings(
        name=arguments.name,
        gpu=arguments.gpu,
        steps=arguments.steps,
        pause_after=arguments.steps // 4,
        step_delay=arguments.step_delay,
        image=image.resolve(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workloads.demo", description=__doc__)
    parser.add_argument("--gpu", choices=("auto", "nvidia", "emulated"), default="auto")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    # Long enough that the checkpoint finds the job running also where a step takes microseconds.
    parser.add_argument("--step-delay", type=float, default=0.05, help="seconds between steps")
    parser.add_argument("--name", default="demo", help="name of the job")
    parser.add_argument("--output", type=Path, help="keep the image in this folder")
    parser.add_argument(
        "--cli",
        type=shlex.split,
        default=[sys.executable, "-m", "flowgpu"],
        help="command that starts FlowGPU",
    )
    arguments = parser.parse_args()
    cli = Cli(arguments.cli)
    folder = Path(tempfile.mkdtemp(prefix="flowgpu-demo-"))
    try:
        settings = settings_of(arguments, folder)
        plain = run_plain(cli, settings)
        paused, last_before, pause, restore = run_paused(cli, settings)
        story = Story(plain, paused, compare(plain, paused, last_before), pause, restore)
        tell(Console(), story)
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if story.comparison.equal else 1


if __name__ == "__main__":
    sys.exit(main())
