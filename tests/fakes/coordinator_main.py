"""The real coordinator with the ghost of tests/fakes/ghost.py, which needs no CUDA.

    coordinator_main.py --spec-fd N      one, as `python -m coordinator` is
    coordinator_main.py --channel N      forks one for each request (tests/unit/coordinator_job.py)

To load Python and all that a checkpoint needs takes longer than most of what tests do with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pkgutil
import selectors
import socket
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import coordinator
from coordinator import supervisor
from coordinator.keeper import Kept, keep
from coordinator.supervisor import Supervisor
from flowgpu import launch
from flowgpu.launch import Spec


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
    ghost = Path(__file__).with_name("ghost.py")
    Supervisor(spec, kept, [sys.executable, "-P", str(ghost)]).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
