"""What every workload shares: its options, its output lines and how it fails.

Output contract, relied on by the tests and the demo:

- ``step <i> <value>`` after each step, flushed; ``<value>`` is one word: a digest of the whole
  state, ``<loss>/<digest>`` with the loss as an exact hexadecimal float, or ``<loss>`` alone;
- ``done <digest>`` at the end, a digest of all step lines;
- exit code 0; or 1 with ``failed: <reason>`` on stderr when the program's own check fails.

The lines are bit-identical from run to run on one device. Nothing here opens a file, a socket
or a terminal, so that the program can be dumped by CRIU at any moment.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray


class VerifyError(Exception):
    """The program's own check found a wrong result."""


@dataclass(frozen=True)
class Options:
    steps: int
    seed: int
    step_delay: float
    device: int
    scale: str

    @property
    def big(self) -> bool:
        return self.scale == "big"


def parser(description: str, *, steps: int) -> argparse.ArgumentParser:
    """Return the common option parser; ``steps`` is this program's default."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--steps", type=int, default=steps, help="steps to run")
    result.add_argument("--seed", type=int, default=0, help="seed of all generated data")
    result.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep a step")
    result.add_argument("--device", type=int, default=0, help="device ordinal")
    result.add_argument(
        "--scale",
        choices=("small", "big"),
        default="small",
        help="small suits the emulated GPU, big a real one",
    )
    return result


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        steps=arguments.steps,
        seed=arguments.seed,
        step_delay=arguments.step_delay,
        device=arguments.device,
        scale=arguments.scale,
    )


def parse(description: str, *, steps: int) -> Options:
    """Parse the common options of a program that has no others."""
    return options_of(parser(description, steps=steps).parse_args())


def digest(*chunks: bytes | NDArray[Any]) -> str:
    """Return XXH3-128 over the contiguous chunks in order, as 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def verify(condition: bool, reason: str) -> None:
    """Raise VerifyError with the reason unless the condition holds."""
    if not condition:
        raise VerifyError(reason)


def say(line: str) -> None:
    """In one piece, whatever PYTHONUNBUFFERED says: who is killed has passed on whole lines."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


LAST_STEPS, LOOK_SECONDS = 5, 0.01
"""With WORKLOAD_HURRY set, a program that is slowed down makes its first quarter of steps without
delay, and its last ones when that file is there."""


class Report:
    """Prints the step lines and the last line."""

    def __init__(self, options: Options) -> None:
        self._delay = options.step_delay
        self._first = options.steps // 4
        self._last = options.steps - LAST_STEPS
        self._hurry = os.environ.get("WORKLOAD_HURRY", "")
        self._all = xxhash.xxh3_128()

    def step(self, index: int, state: str, *, loss: float | None = None) -> None:
        self._line(index, state if loss is None else f"{loss.hex()}/{state}")

    def loss(self, index: int, loss: float) -> None:
        """Print a step whose whole state would cost too much to digest: its loss alone."""
        self._line(index, loss.hex())

    def _line(self, index: int, value: str) -> None:
        line = f"step {index} {value}"
        self._all.update(line.encode() + b"\n")
        say(line)
        if self._delay > 0 and not os.path.exists(self._hurry):
            if not self._hurry or index >= self._first:
                time.sleep(self._delay)
            # However slow the machine is, who looks at this program finds it running.
            while self._hurry and index >= self._last and not os.path.exists(self._hurry):
                time.sleep(LOOK_SECONDS)

    def done(self) -> None:
        say(f"done {self._all.hexdigest()}")


def fail(reason: str) -> NoReturn:
    print(f"failed: {reason}", file=sys.stderr, flush=True)
    sys.exit(1)


def guarded(main: Callable[[], None]) -> None:
    """Run main; a failed check ends the process with exit code 1 and its reason."""
    try:
        main()
    except VerifyError as error:
        fail(str(error))
