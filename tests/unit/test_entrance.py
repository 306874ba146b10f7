"""Who passes the entrance of a job, and when it is shut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.entrance import BEGINNING, PASSING, Entrance

# This process does as native/intercept/entrance.cpp; a line on standard input is its HELLO.
PROCESS = f"""
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print("comes", flush=True)
fcntl.lockf(file, fcntl.LOCK_SH, 1, {PASSING})
fcntl.lockf(file, fcntl.LOCK_SH, 1, {BEGINNING})
fcntl.lockf(file, fcntl.LOCK_UN, 1, {PASSING})
print("has passed", flush=True)
sys.stdin.readline()
os.close(file)
print("is connected", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as running:
        try:
            assert said(running) == "comes"
            yield running
        finally:
            running.kill()


def said(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().rstrip("\n")


def tell(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")


@pytest.fixture
def entrance(tmp_path: Path) -> Iterator[Entrance]:
    made = Entrance(tmp_path / "entrance")
    made.make()
    yield made
    made.open()


def soon() -> float:
    return time.monotonic() + 0.05


def late() -> float:
    return time.monotonic() + 60


def test_it_is_shut_when_all_who_have_passed_are_connected(
    entrance: Entrance, tmp_path: Path
) -> None:
    with process(tmp_path / "entrance") as one:
        assert said(one) == "has passed"
        with pytest.raises(TimeoutError, match=f"process {one.pid} begins to use the GPU"):
            entrance.shut(soon())
        tell(one)
        assert said(one) == "is connected"
        entrance.shut(soon())


def test_who_has_passed_and_ends_is_not_waited_for(entrance: Entrance, tmp_path: Path) -> None:
    with process(tmp_path / "entrance") as one:
        assert said(one) == "has passed"
        one.kill()
        entrance.shut(late())


def test_nobody_passes_until_it_is_open_again(entrance: Entrance, tmp_path: Path) -> None:
    entrance.shut(soon())
    with process(tmp_path / "entrance") as one:
        waits = Path(f"/proc/{one.pid}/syscall")
        while not waits.read_text().startswith("72 "):  # fcntl(2)
            time.sleep(0.002)
        entrance.shut(soon())  # who waits has not passed
        entrance.open()
        assert said(one) == "has passed"


def test_it_is_open_after_the_end_of_who_has_shut_it(tmp_path: Path) -> None:
    words = (
        "import pathlib, sys; from coordinator.entrance import Entrance; "
        "it = Entrance(pathlib.Path(sys.argv[1])); it.make(); it.shut(0); print('shut')"
    )
    path = tmp_path / "entrance"
    done = subprocess.run([sys.executable, "-c", words, path], capture_output=True, text=True)
    assert done.stdout == "shut\n"
    with process(path) as one:
        assert said(one) == "has passed"
