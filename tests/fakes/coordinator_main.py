"""The real coordinator with the ghost of tests/fakes/ghost.py, which needs no CUDA.

    coordinator_main.py --spec-fd N      one, as `python -m coordinator` is
    coordinator_main.py --channel N      forks one for each request (tests/unit/coordinator_job.py)

To load Python and all that a checkpoint needs takes longer than most of what tests do with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import coordinator
from coordinator import faults, ghost_client, supervisor
from coordinator.keeper import Kept, keep
from coordinator.supervisor import Supervisor
from flowgpu import launch
from flowgpu.launch import Spec
from tests.fakes import ghost

GHOST = [sys.executable, "-P", ghost.__file__]
PR_SET_NAME = 15


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-fd", type=int)
    parser.add_argument("--channel", type=int)
    arguments = parser.parse_args()
    if arguments.channel is not None:
        return serve(socket.socket(fileno=arguments.channel))
    return coordinator_of(arguments.spec_fd)


def coordinator_of(spec_fd: int) -> int:
    with os.fdopen(spec_fd, "rb") as source:
        spec = Spec.from_json(source.read())
    return keep(lambda kept: coordinate(spec, kept), spec.job_dir)


def serve(channel: socket.socket) -> int:
    """Each request is an environment, with a spec, a log, and where the exit code goes. The answer
    is the process id. In a child, this gives what its process is to end with."""
    for module in pkgutil.iter_modules(coordinator.__path__, "coordinator."):
        if module.name not in ("coordinator.__main__", "coordinator.ghost_main"):
            import_module(module.name)
    ready = selectors.DefaultSelector()
    ready.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.data:
                child, code = key.data
                _, status = os.waitpid(child, 0)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(code, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(code)
                ready.unregister(key.fd)
                os.close(key.fd)
                continue
            text, fds, _, _ = socket.recv_fds(channel, 1 << 20, 3)
            if not text:
                return 0
            spec, log, code = fds
            if not (child := os.fork()):
                ready.close()
                channel.detach()
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.dup2(spec, 3)
                os.closerange(4, 1 << 16)
                os.setsid()
                os.environ.clear()
                os.environ.update(json.loads(text))
                return coordinator_of(3)
            os.close(spec)
            os.close(log)
            ready.register(os.pidfd_open(child), selectors.EVENT_READ, (child, code))
            channel.send(b"%d" % child)


def coordinate(spec: Spec, kept: Kept) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG)
    # The task's library in this setting is Python code: any file has a digest.
    launch.intercept_library = lambda: Path(__file__)
    # What comes when the program runs already.
    if seconds := os.environ.get("FAKE_LATE_START"):
        supervisor.lift_limits = lambda: time.sleep(float(seconds))
    # A helper thread that fails as none should.
    if reason := os.environ.get("FAKE_FAILING_THREAD"):
        Supervisor._load = lambda self: exec(f"raise RuntimeError({reason!r})")
    ghost_client.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedGhost})
    Supervisor(spec, kept, GHOST).run()
    return 0


class ForkedGhost(subprocess.Popen[bytes]):
    """A ghost that its coordinator has forked: all that it needs is loaded."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: object
    ) -> None:
        (self._channel,) = pass_fds
        self._environment = env
        super().__init__(words)

    def _execute_child(self, words: Sequence[str], *_: Any) -> None:
        ready, closed = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._become(words)
        self._child_created = True
        os.close(closed)
        os.read(ready, 1)  # until what is not the ghost's is closed there
        os.close(ready)

    def _become(self, words: Sequence[str]) -> None:
        """Be what a new process with these words would be, to its end."""
        code = 1
        try:
            gc.freeze()  # or the end of the coordinator's objects closes descriptors of the ghost
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            call_me(words)
            os.chdir("/")
            os.environ.clear()
            os.environ.update(self._environment)
            # Another thread may have been at them.
            faults._lock = threading.Lock()
            faults._passed.clear()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.closerange(3, self._channel)
            os.closerange(self._channel + 1, 1 << 20)
            ghost.run(self._channel)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def call_me(words: Sequence[str]) -> None:
    """Have others find this process by its arguments, which are shorter than those it had."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, Path(words[0]).name.encode(), 0, 0, 0)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = "\0".join(words).encode()
    assert len(text) < end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    raise SystemExit(main())
