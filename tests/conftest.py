"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from flowgpu.host.criu import Criu
from tests.gpu import shared


def pytest_configure() -> None:
    """Signals have their defaults, in tests and in the programs that they start, and numpy no
    threads: there is nothing for them to do, and looking for it takes a tenth of all the time.
    No Python prepares for setup scripts, which takes a quarter of the time to start it. And none
    writes a line and its end in two pieces: who is killed or dumped between them has said half."""
    os.environ.pop("PYTHONUNBUFFERED", None)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    # A shell's `&` has the first two ignored, nohup the third.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)


# Outside of the test's time limit.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the real GPU for a test that needs it."""
    needs_it = item.get_closest_marker("gpu") is not None
    whole = item.get_closest_marker("whole_gpu") is not None
    with shared.gpu(whole) if needs_it else nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def criu() -> Criu:
    """The CRIU that `make setup` provides. A machine without one fails, it does not skip."""
    return Criu.locate()


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Where a folder for jobs can be made; the path of `tmp_path` may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="flowgpu-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"
