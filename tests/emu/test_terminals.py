"""A job on a terminal goes on in another; a terminal of its own goes on with it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT
from flowgpu.jobs import Registry
from tests.emu.gpu_job import GPU, said_across_a_restore
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu, runtime_dir
from tests.unit.coordinator_job import wait_for

__all__ = ["runtime_dir"]

# Counts until a file is there, and says whether its output is a terminal.
COUNTING = (
    GPU
    + """
print("terminal", os.isatty(1))
count = 0
while not os.path.exists(sys.argv[1]):
    print("line", count)
    count += 1
    time.sleep(0.05)
print("gpu", gpu())
"""
)


class Terminal:
    """A terminal on which a command runs, and what it has shown there."""

    def __init__(self, *words: object) -> None:
        self._master, slave = os.openpty()
        self.shown = ""
        self._bytes = b""
        self.process = subprocess.Popen(
            [*FLOWGPU, *map(str, words)],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={key: os.environ[key] for key in os.environ if key != "PYTHONUNBUFFERED"},
            start_new_session=True,
        )
        os.close(slave)

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self._read(), text, SECONDS)

    def end(self) -> int:
        """The command's exit code. Nobody has the terminal open afterwards."""
        code = self.process.wait(SECONDS)
        self.close()
        return code

    def close(self) -> None:
        if self._master >= 0:
            self.process.kill()
            self.process.wait()
            self._read()
            os.close(self._master)
            self._master = -1

    def numbers(self) -> list[int]:
        """Numbers of the lines that it has shown, in their order."""
        return [int(number) for number in re.findall(r"^line (\d+)$", self.shown, re.MULTILINE)]

    def _read(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self._bytes += os.read(self._master, 1 << 16)
            except OSError:  # the command has ended
                break
        # What is read may end within a letter, or within the end of a line.
        self.shown = self._bytes.decode(errors="ignore").replace("\r\n", "\n")
        return self.shown


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def on_terminal(*words: object) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield on_terminal
    for shown in opened:
        shown.close()


def test_a_job_of_one_terminal_goes_on_in_another(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    image, end = tmp_path / "image", tmp_path / "end"
    words = ["--gpu", "emulated", "--name", "on-tty", "--", sys.executable, "-c", COUNTING, end]
    first = terminal("run", *words)
    try:
        first.wait_for("line 3\n")  # as it says it, no full buffer later
        done = flowgpu("pause-and-dump", "on-tty", "--output", image)
        assert done.returncode == 0, done.stderr
        assert first.end() == DUMPED_EXIT
        second = terminal("restore", image)
        second.wait_for("line ")
        end.touch()
        second.wait_for("gpu True\n")
        assert second.end() == 0
    finally:
        flowgpu("kill", "on-tty")
    assert first.shown.startswith("terminal False\n")  # docs/limits.md
    numbers = first.numbers() + second.numbers()
    assert numbers == list(range(len(numbers)))
    logged = [line for line in flowgpu("logs", "on-tty").stdout.splitlines() if "line" in line]
    assert logged == [f"line {number}" for number in numbers]


# A child on a terminal of the job's own, as script(1) and tmux have them.
OWN_TERMINAL = (
    GPU
    + """
import pty, termios
# Other programs take the lowest number that is free.
lower = [fd for _ in range(20) for fd in os.openpty()]
child, master = pty.fork()
if child == 0:
    os.execvp("sh", ["sh", "-c", "read word; tty -s && echo got $word; stty size"])
for fd in lower:
    os.close(fd)
def name():
    return "/dev/pts/%d" % struct.unpack("I", fcntl.ioctl(master, 0x80045430, bytes(4)))  # TIOCGPTN
its_name = name()
open(sys.argv[2], "w").write(its_name)
until(lambda: b"read word" in open(f"/proc/{child}/cmdline", "rb").read())
fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 17, 71, 0, 0))
went()
os.write(master, b"word\\n")
said = b""
while b"71" not in said:
    said += os.read(master, 100)
print(said.split())
print("child", os.waitpid(child, 0)[1])
print("gpu", gpu(), name() == its_name)
"""
)


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("taken", [False, True])
def test_a_terminal_of_the_jobs_own_goes_on(engine: str, taken: bool, tmp_path: Path) -> None:
    name, others = tmp_path / "name", ExitStack()

    def take() -> None:
        while taken and not Path(name.read_text()).exists():
            for fd in os.openpty():
                others.callback(os.close, fd)

    with others:
        said = said_across_a_restore(
            "own-tty", OWN_TERMINAL, tmp_path, str(name), engine=engine, between=take
        )
    words = [b"word", b"got", b"word", b"17", b"71"]
    assert said == ["ready", str(words), "child 0", "gpu True True"]


def test_a_job_with_numbers_of_its_own_is_taken_over_and_dumped_again(tmp_path: Path) -> None:
    name, go, out = tmp_path / "name", tmp_path / "go", tmp_path / "out"
    words = ["--gpu", "emulated", "--name", "own-ttys", "--", sys.executable, "-c", OWN_TERMINAL]
    with ExitStack() as others, open(out, "wb") as output:
        others.callback(flowgpu, "kill", "own-ttys")
        job = others.enter_context(
            subprocess.Popen([*FLOWGPU, "run", *words, go, name], cwd=ROOT, stdout=output)
        )
        wait_for(lambda: "ready" in out.read_text(), "ready", SECONDS)
        assert flowgpu("pause-and-dump", "own-ttys", "--output", tmp_path / "first").returncode == 0
        assert job.wait(SECONDS) == DUMPED_EXIT
        while not Path(name.read_text()).exists():
            for fd in os.openpty():
                others.callback(os.close, fd)
        taken = os.stat(name.read_text())
        assert flowgpu("restore", "--detach", tmp_path / "first").returncode == 0
        directory = Registry().dir(Registry().find("own-ttys").id)
        before = directory.read()
        its = Path(f"/proc/{before.root_pid}/root{name.read_text()}")
        assert its.exists() and its.stat().st_dev != taken.st_dev
        os.kill(before.coordinator_pid, signal.SIGKILL)
        wait_for(lambda: directory.read().coordinator_pid != before.coordinator_pid, "another one")
        done = flowgpu("pause-and-dump", "own-ttys", "--output", tmp_path / "second")
        assert done.returncode == 0, done.stderr
        go.touch()
        restored = flowgpu("restore", tmp_path / "second")
        assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines()[-1] == "gpu True True"
