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
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import coordinator
from coordinator import faults, ghost_client, supervisor
from coordinator.keeper import Kept, keep
from coordinator.supervisor import Supervisor
from flowgpu import launch
from flowgpu.host import ptrace, sandbox
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
    ghost_client.subprocess = sandbox.subprocess = Forking
    Supervisor(spec, kept, GHOST).run()
    return 0


class Forked(subprocess.Popen[bytes]):
    """A ghost or a search for sandboxes, forked: all that it needs is loaded here."""

    def _execute_child(
        self,
        words: Sequence[str],
        executable: None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str,
        env: Mapping[str, str],
        startupinfo: None,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        *others: int,
    ) -> None:
        ready, closed = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(p2cread, 0)
            if c2pwrite != -1:
                os.dup2(c2pwrite, 1)
            become(words, cwd, env, pass_fds, own_session=bool(others[-2]))
        self._child_created = True
        os.close(closed)
        os.read(ready, 1)  # until what is not its own is closed there
        os.close(ready)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, *others[:2])


def become(
    words: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    *,
    own_session: bool,
) -> NoReturn:
    """Be what a new process with these words would be, to its end."""
    code = 1
    try:
        gc.freeze()  # or the end of the coordinator's objects closes descriptors of this process
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if own_session:
            os.setsid()
        else:
            os.setpgid(0, 0)
        call_me(words)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        # Another thread may have been at them.
        faults._lock = threading.Lock()
        faults._passed.clear()
        # One that was writing has left its lock in the streams.
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]
        first = 3
        for fd in sorted(pass_fds):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, 1 << 20)
        if pass_fds:
            ghost.run(*pass_fds)
        else:
            pids = [int(pid) for pid in words[len(sandbox.COMMAND) :]]
            if seconds := float(env.get("FAKE_SEARCH_SECONDS", "0")):
                stay_at(pids[-1], seconds)
            sandbox.main(pids)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


Forking = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
"""The module subprocess, for what is forked."""


def stay_at(pid: int, seconds: float) -> None:
    """Trace a process for so long; it runs."""
    if not (tracer := os.fork()):
        ptrace.ptrace(ptrace.SEIZE, pid)
        time.sleep(seconds)
        os._exit(0)
    os.waitpid(tracer, 0)


def call_me(words: Sequence[str]) -> None:
    """Have others find this process by its arguments, as far as they go where the old ones were."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, Path(words[0]).name.encode(), 0, 0, 0)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    raise SystemExit(main())
