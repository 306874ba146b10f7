"""Runs drawn programs, each in a child of its own, and tells what the driver answered.

python -m tests.emu.program_run        programs on stdin, traces on stdout, one a line
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from tests.emu.program_arrays import ArrayOperations
from tests.emu.program_graphs import GraphOperations
from tests.emu.program_lib import SUCCESS, Trace, library
from tests.emu.program_memory import MemoryOperations
from tests.emu.program_words import WordOperations

SECONDS = 20.0  # for one program
# Instead of an operation's trace; nothing comes after it. FAILED: this interpreter is wrong.
CRASHED, HUNG, FAILED = "crashed", "hung", "failed"


class Interpreter(ArrayOperations, MemoryOperations, GraphOperations, WordOperations):
    def op_checkpoint(self) -> Trace:
        """The memory goes away and comes back, where somebody listens who sees to it."""
        path = os.environ.get("FLOWGPU_TEST_CHECKPOINT")
        if path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.connect(path)
                listener.sendall(str(os.getpid() if self.started else 0).encode())
                failed = listener.recv(200).decode()
            if failed:
                return [failed]
        return [SUCCESS]

    def step(self, operation: list[Any]) -> Trace:
        name, *values = operation
        trace: Trace = getattr(self, f"op_{name}")(*values)
        return trace


def in_child(driver: ctypes.CDLL, program: list[Any], out: int) -> None:
    interpreter = Interpreter(driver)
    for operation in program:
        trace = interpreter.step(operation)
        os.write(out, json.dumps(trace).encode() + b"\n")
        if operation[0] == "checkpoint" and trace != [SUCCESS]:
            raise RuntimeError(trace[0])  # every further call may wait for ever


def run(driver: ctypes.CDLL, program: list[Any], seconds: float = SECONDS) -> list[Any]:
    """One trace an operation, as far as the program came. This process must not use the driver."""
    source, out = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(source)
            in_child(driver, program, out)
            code = 0
        except BaseException as error:
            print(f"{program}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(out)
    data, hung = collect(source, time.monotonic() + seconds)
    os.close(source)
    if hung:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    trace: list[Any] = [json.loads(line) for line in data.decode().splitlines()]
    if len(trace) < len(program):
        trace.append(HUNG if hung else CRASHED if os.WIFSIGNALED(status) else FAILED)
    return trace


def collect(source: int, deadline: float) -> tuple[bytes, bool]:
    """What comes until the end, or whole lines of it until the deadline."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([source], [], [], left)[0]:
            more = os.read(source, 1 << 16)
            if not more:
                return data, False
            data += more
    return data[: data.rfind(b"\n") + 1], True


def main() -> None:
    driver = library()
    for line in sys.stdin:
        print(json.dumps(run(driver, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
