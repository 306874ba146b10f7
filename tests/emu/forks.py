"""Runs cases one after the other, each in a fork of a process that has loaded what they need.

    python -m tests.emu.forks MODULE

To start Python and load the driver's bindings takes several times as long as a case. Each line of
standard input is a case's name and variables of its own in JSON. Each answer is its exit code and
what it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]


class Forks:
    """The cases of a module, in the environment with which their process starts."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._words = [sys.executable, "-m", "tests.emu.forks", module]
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str, variables: Mapping[str, str]) -> tuple[int, str]:
        """The exit code of a case that sees these variables as well, and what it said."""
        self._process = self._process or subprocess.Popen(
            self._words,
            env=self._environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        print(json.dumps([name, dict(variables)]), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self.close()
            raise AssertionError(f"{name} does not end, or has ended more than itself")
        code, said = json.loads(answer)
        return code, said

    def close(self) -> None:
        """End it, and a case that is under way. The next case starts another."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        self._process = None


@contextlib.contextmanager
def forks(module: str, environment: Mapping[str, str]) -> Iterator[Forks]:
    with contextlib.closing(Forks(module, environment)) as cases:
        yield cases


def main() -> None:
    module = import_module(sys.argv[1])
    nothing = os.open(os.devnull, os.O_RDWR)
    for line in sys.stdin:
        name, variables = json.loads(line)
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if not child:
                os.dup2(nothing, 0)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ.update(variables)
                module.run(name)
                return  # its process ends as that of any program
            _, status = os.waitpid(child, 0)
            said.seek(0)
            text = said.read().decode(errors="replace")
        print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


if __name__ == "__main__":
    main()
