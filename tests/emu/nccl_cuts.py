"""Cuts through a running program of NCCL ranks, without a checkpoint around them.

After each cut every GPU must become idle by itself, with the program's threads stopped at their
next operation; then they are let on. The lines of the program must be those of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.communicators import Communicators, make_cut, open_all
from coordinator.cut import Cut
from flowgpu.launch import emulated_driver
from tests.emu import intercept_lib as lib
from tests.patience import SECONDS


@dataclass
class Ranks:
    """Programs, and what each has said."""

    programs: list[subprocess.Popen[str]]
    pages: dict[int, Communicators]
    lines: list[list[str]] = field(default_factory=list)

    def running(self) -> bool:
        return all(program.poll() is None for program in self.programs)

    def idle(self) -> bool:
        """Asks every GPU to become idle; False: a program has ended meanwhile."""
        for program in self.programs:
            assert program.stdin
            try:
                program.stdin.write("\n")
                program.stdin.flush()
            except BrokenPipeError:
                return False
        answers = [self._answered(rank) for rank in range(len(self.programs))]  # of each
        return all(answers)

    def _answered(self, rank: int) -> bool:
        program = self.programs[rank]
        assert program.stdout
        deadline = time.monotonic() + SECONDS
        while (line := program.stdout.readline()) != "idle\n":
            assert time.monotonic() < deadline, f"rank {rank}'s GPU does not become idle"
            if not line:
                return False
            self.lines[rank].append(line)
        return True

    def end(self) -> list[str]:
        """All lines, once all programs have ended."""
        for rank, program in enumerate(self.programs):
            assert program.stdout
            self.lines[rank] += program.stdout.readlines()
            assert program.wait(SECONDS) == 0, "".join(self.lines[rank])
        return sorted(line for lines in self.lines for line in lines if line != "idle\n")


def environment(folder: Path) -> dict[str, str]:
    found = lib.intercepted(lib.bare_environment(folder), folder)
    return found | {"LD_LIBRARY_PATH": str(emulated_driver().parent), "PYTHONUNBUFFERED": "1"}


@contextmanager
def ranks(count: int, steps: int, folder: Path) -> Iterator[Ranks]:
    """The program of nccl_program.py, each rank connected."""
    command = [sys.executable, "-m", "tests.emu.nccl_program", str(count), str(steps), str(folder)]
    with lib.Coordinator(folder / "task.sock") as coordinator:
        programs = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment(folder),
                cwd=lib.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            connections = [coordinator.accept() for _ in programs]
            pages = {one.hello.pid: one.nccl for one in connections if one.nccl is not None}
            assert len(pages) == count
            yield Ranks(programs, pages, [[] for _ in programs])
        finally:
            for program in programs:
                program.kill()
                program.wait()
                for stream in (program.stdin, program.stdout):
                    assert stream
                    with suppress(BrokenPipeError):
                        stream.close()


def undisturbed(count: int, steps: int, folder: Path) -> list[str]:
    with ranks(count, steps, folder) as found:
        for program in found.programs:
            assert program.stdin
            program.stdin.close()
        return found.end()


def campaign(
    count: int, steps: int, folder: Path, cuts: int, seed: int = 1
) -> tuple[list[str], list[Cut], list[float]]:
    """At most so many cuts; the lines, the cuts, and the seconds of each."""
    random_ = random.Random(seed)
    made: list[Cut] = []
    seconds: list[float] = []
    with ranks(count, steps, folder) as found:
        while len(made) < cuts and found.running():
            time.sleep(random_.random() * 0.03)
            began = time.monotonic()
            cut = make_cut(found.pages, began + SECONDS)
            seconds.append(time.monotonic() - began)
            before = [page.view().issued for page in found.pages.values()]
            if not found.idle():
                break
            assert before == [page.view().issued for page in found.pages.values()]
            made.append(cut)
            open_all(found.pages)
        open_all(found.pages)
        return found.end(), made, seconds


if __name__ == "__main__":
    os.makedirs(sys.argv[4], exist_ok=True)
    folder = Path(sys.argv[4])
    lines, made, seconds = campaign(int(sys.argv[1]), int(sys.argv[2]), folder, int(sys.argv[3]))
    seconds.sort()
    print(len(made), "cuts; median", seconds[len(seconds) // 2], "most", seconds[-1])
    print("grown", sum(cut.grown > 0 for cut in made), "forced", sum(cut.forced for cut in made))
    print("behind at most", max(cut.first_behind for cut in made), len(lines), "lines")
