"""The ghost's end of its socket: commands are read, run by the program, and answered."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from coordinator.descriptors import lift_limits
from coordinator.device import CudaDriver
from coordinator.ghost import GhostProgram
from coordinator.ghost_commands import QUIT_SECONDS, Cancel, Command, Forget, Quit, parts_of
from coordinator.ghost_lines import read_lines, send_line
from coordinator.mover import NativeMover
from flowgpu import codec
from flowgpu.errors import is_internal, words_of
from flowgpu.host.native import Status
from flowgpu.image.space import is_full

LOGGED_SECONDS = 0.01


class Server:
    """Reads commands from the socket, runs them, and answers."""

    def __init__(self, connection: socket.socket, program: GhostProgram) -> None:
        self._connection = connection
        self._program = program
        self._send_lock = threading.Lock()
        self._ordered: queue.SimpleQueue[tuple[int, Command[Any]]] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until `quit` or the end of the socket."""
        threading.Thread(target=self._run_ordered, daemon=True).start()
        for fields, fds in read_lines(self._connection):
            number, kind = fields.pop("id"), Command.named[fields.pop("do")]
            if fds:
                fields["fds"] = fds
            command = codec.decode(kind, fields, kind.do)
            if isinstance(command, Quit):
                self._quit(number)
                return
            if kind.at_once:
                threading.Thread(target=self._handle, args=(number, command), daemon=True).start()
            else:
                self._ordered.put((number, command))

    def _quit(self, number: int) -> None:
        # The job may have ended, and its coordinator with it: then nobody else ends this process.
        signal.alarm(int(2 * QUIT_SECONDS))
        with contextlib.suppress(Exception):  # its end frees the rest
            self._program.run(Forget())
        self._answer({"id": number})
        began = time.monotonic()
        with contextlib.suppress(Exception):
            # Many threads unpin what one would hold up the next restore with.
            self._program.run(Cancel())
        print(f"unpinned {time.monotonic() - began:.3f} s", file=sys.stderr)

    def _run_ordered(self) -> None:
        while True:
            self._handle(*self._ordered.get())

    def _handle(self, number: int, command: Command[Any]) -> None:
        began = time.monotonic()
        fds: Sequence[int] = ()
        try:
            answer, fds = parts_of(self._program.run(command))
        except Exception as error:  # whatever it was, the coordinator is told and decides
            if is_internal(error):
                traceback.print_exc()
            kind = Status.NO_SPACE if is_full(error) else getattr(error, "status", type(error))
            answer = {
                "error": f"{command.do}: {words_of(error)}",
                "kind": kind.name if isinstance(kind, Enum) else kind.__name__,
            }
        finally:
            for fd in parts_of(command)[1]:
                os.close(fd)
        if (seconds := time.monotonic() - began) > LOGGED_SECONDS:
            print(f"{command.do} {seconds:.3f} s", file=sys.stderr)
        self._answer({"id": number, **answer}, fds)
        for fd in fds:
            os.close(fd)

    def _answer(self, answer: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        with self._send_lock:
            send_line(self._connection, answer, fds)


def serve(fd: int, program: GhostProgram) -> None:
    """Run `program` on the inherited socket `fd`, then end the process."""
    lift_limits()  # blocks travel, thousands of them at once
    try:
        Server(socket.socket(fileno=fd), program).run()
    except BrokenPipeError:
        pass
    sys.stderr.flush()
    # The driver's own teardown at exit takes long and can wait for work that is not ours; the
    # kernel frees all.
    os._exit(0)


def main(fd: int) -> None:
    """Be a ghost on the socket `fd`, to the end of the process."""
    with contextlib.suppress(ImportError):  # who asks for the driver is told
        import cuda.bindings.driver  # noqa: F401 - before anybody waits for it

    serve(fd, GhostProgram(CudaDriver, NativeMover))
