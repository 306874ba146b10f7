"""Signals that would tell a parent that we have stopped its child.

Most programs ask what has become of a child (waitpid(2)), and one that runs again has not been
stopped. Some believe the signal: script(1) then stops itself, and nobody lets it go on.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Container, Sequence
from contextlib import suppress

from flowgpu.host import inject, ptrace
from flowgpu.host.inject import Caller
from flowgpu.host.proctree import PROC, children, thread_state
from flowgpu.host.settings import callers

CHILD = 1 << signal.SIGCHLD - 1
RT_SIGTIMEDWAIT = 128  # asm/unistd_64.h
STOP_SECONDS = 1.0


def is_told(pid: int) -> bool:
    """True if a signal of a child waits for the process, and none for its first thread alone."""
    signals = _signals(pid)
    return bool(signals["ShdPnd"] & CHILD) and not signals["SigPnd"] & CHILD


def _signals(pid: int) -> dict[str, int]:
    """Sets of signals by their names in /proc/PID/status; empty ones where the process is gone."""
    found = dict.fromkeys(("SigPnd", "ShdPnd", "SigBlk", "SigCgt"), 0)
    with suppress(OSError):
        text = (PROC / str(pid) / "status").read_text(errors="replace")
        for line in text.splitlines():
            name, _, value = line.partition(":\t")
            if name in found:
                found[name] = int(value, 16)
    return found


def forget(pid: int, caller: Caller, kept: Container[int]) -> None:
    """Take it from the stopped process, by its thread; not if it is about one of `kept`, whom
    somebody else has stopped. Raises OSError."""
    for number, code, child, status in ptrace.pending_signals(caller.thread):
        stopped = number == signal.SIGCHLD and code == os.CLD_STOPPED and status == signal.SIGSTOP
        if stopped and child not in kept:
            with caller.memory(struct.pack("=Qqq", CHILD, 0, 0)) as memory:
                caller.call(RT_SIGTIMEDWAIT, memory.at, 0, memory.at + 8, 8)
            # The kernel keeps one signal for all children: the end of one came to nothing.
            if any(thread_state(one, one) == "Z" for one in children(pid)):
                os.kill(pid, signal.SIGCHLD)


def forget_all(pids: Sequence[int], kept: Container[int]) -> None:
    """Do so in a restored tree, whose processes CRIU has let go stopped."""
    _wait_stopped(pids)
    for pid in pids:
        signals = _signals(pid)
        if not (signals["SigBlk"] | signals["SigCgt"]) & CHILD:
            continue
        with suppress(OSError):  # one of 32 bits can make no call; another was killed
            for child in children(pid):
                # It may look stopped a moment before its parent is told. Who traces it waits.
                with suppress(OSError), inject.seized(child, [child]):
                    pass
            if is_told(pid):
                for _, caller in callers([pid], [pid]):
                    forget(pid, caller, kept)
    _wait_stopped(pids)  # a thread that is traced no more runs for a moment


def _wait_stopped(pids: Sequence[int]) -> None:
    with suppress(TimeoutError):
        for pid in pids:
            inject.wait_stopped(pid, time.monotonic() + STOP_SECONDS)
