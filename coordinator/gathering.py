"""Work in the middle of CRIU's restore, once the sockets of TCP connections are there.

CRIU makes each socket in repair mode (tcp(7)), where it sends nothing, and lets it go at the end.
A socket that is let go asks the other end at once. Where there is none yet, the answer ends the
connection. So CRIU waits before that, in a script, until all nodes have made their sockets, and
these have again what they had sent (flowgpu/host/tcp_queues.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flowgpu.errors import FlowError
from flowgpu.launch import program

SCRIPT = "flowgpu-together"
VARIABLE = "FLOWGPU_TOGETHER"
LOOK_MS = 50


class Gathering:
    """What CRIU is to be told for it."""

    def __init__(self, folder: Path) -> None:
        self.script = program(SCRIPT)
        self.environment = {VARIABLE: str(folder)}


@contextlib.contextmanager
def gathering(folder: Path, wait: Callable[[], None]) -> Iterator[Gathering]:
    """Do `wait` when CRIU has come so far, and let it go on then. Raises what `wait` raises."""
    folder.mkdir(0o700)
    over = threading.Event()
    failures: list[Exception] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        ends = {}
        for name in ("ready", "go"):
            os.mkfifo(folder / name, 0o600)
            # Also for reading, so that it does not wait for the script.
            ends[name] = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, ends[name])

        def work() -> None:
            poll = select.poll()
            poll.register(ends["ready"], select.POLLIN)
            while not poll.poll(LOOK_MS):
                if over.is_set():
                    return
            try:
                wait()
            except Exception as error:  # CRIU must not wait for ever
                failures.append(error)
            os.write(ends["go"], b"stop\n" if failures else b"go\n")

        thread = threading.Thread(target=work, name="gathering")
        thread.start()
        try:
            yield Gathering(folder)
        except FlowError as error:
            raise next(iter(failures), error) from error
        finally:
            over.set()
            thread.join()
