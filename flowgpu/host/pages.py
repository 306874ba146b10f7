"""Receive the pages of a CRIU dump with native/pages, which is faster than CRIU's own writing.

    server = PageServer.start(images, tree_pids(root))     # while the job runs; PagesUnavailable
    server.wait_ready(seconds)                             # its files have their pages by then
    criu.start_dump(root, images, pages=server).wait()
    server.stats()
    server.close()                                         # always

The images are those that CRIU itself writes, without pages of zeros in private anonymous mappings,
which a restore makes by itself.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowgpu import launch
from flowgpu.host.proctree import end_before_others, how_ended, memory_sizes

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""More only wait for memory, and the copy from the GPU is at work at the same time."""
SOCKET_BYTES = 64 << 20
"""What may be under way, so that CRIU need not wait for each page to be taken."""
END_SECONDS = 5.0
_CRIU_IS_GONE = 3
NONE: Mapping[int, int] = {}
MEMORY_LIBRARY = "libflowgpu_criu.so"
STANDING = "FLOWGPU_STANDING"
"""Descriptors by which it hears of processes that stand still (native/pages/standing.h), so that
CRIU sends no pages that the server copies."""
# socket(7): past the system's limit, with CAP_NET_ADMIN.
_SO_SNDBUFFORCE = 32


class PagesUnavailable(Exception):
    """There is no server; a dump without one works."""


@dataclass(frozen=True)
class PageStats:
    """What a server received: sizes in bytes, `zero_bytes` of them left out, `still_bytes` of them
    copied by itself.

    `early_bytes` were copied before; of those some were compared, and some of them mended.
    `inherited` has the bytes, by process id, that are in the file of its parent alone.
    `seconds` begin with CRIU's first message; for `tail_seconds` of them CRIU had sent all.
    """

    files: int
    bytes: int
    zero_bytes: int
    entries: int
    still_bytes: int
    copied_twice: int
    early_bytes: int
    compared_bytes: int
    mended_bytes: int
    inherited: dict[str, int]
    preparing_seconds: float
    seconds: float
    tail_seconds: float


def own_bytes(pid: int) -> int:
    """Bytes of a process that a dump may have to write; 0 when it is gone."""
    return memory_sizes(pid).get("RssAnon", 0)


class _Telling:
    """The channel by which CRIU's library hears what the server has found out: a file, and a pipe
    that says that the file is there."""

    def __init__(self) -> None:
        self.file = os.memfd_create("flowgpu-standing")
        heard, self.says = os.pipe2(os.O_CLOEXEC)
        self.ends = self.file, heard

    def handed_over(self) -> None:
        """The server has its end: that of a server that has gone says so."""
        os.close(self.says)

    def close(self) -> None:
        """Let go of what CRIU has."""
        for fd in self.ends:
            os.close(fd)


class PageServer:
    """One server for one dump into one folder."""

    def __init__(
        self,
        images_dir: Path,
        process: subprocess.Popen[bytes],
        end: socket.socket,
        telling: _Telling,
        *,
        early: bool,
    ) -> None:
        self.early = early
        """True if the server copies pages while their processes run; the kernel tells it of
        changes."""
        self._images_dir = images_dir
        self._process = process
        self._criu_end = end
        self._telling: _Telling | None = telling
        telling.handed_over()
        self._said = b""
        self._complete = False

    @staticmethod
    def start(
        images_dir: Path,
        pids: Sequence[int],
        *,
        tracked: Mapping[int, int] = NONE,
        threads: int | None = None,
    ) -> PageServer:
        """Begin to make a file for the pages of each process. Raises PagesUnavailable.

        The server copies the pages of `tracked` processes now; each has a userfaultfd by its id.
        """
        workers = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        images_dir.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        telling = _Telling()
        with ours:
            # What is sent counts for the sender's buffer.
            with suppress(PermissionError):
                theirs.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, SOCKET_BYTES)
            program = str(launch.program("flowgpu-pages"))
            tells = telling.file, telling.says
            words = [program, *map(str, (ours.fileno(), images_dir, workers, *tells))]
            words += [f"{pid}:{own_bytes(pid)}" for pid in pids if pid not in tracked]
            words += [f"{pid}:0:{fd}" for pid, fd in tracked.items()]
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(ours.fileno(), *tracked.values(), *tells),
                    process_group=0,
                )
            except OSError as error:
                theirs.close()
                telling.handed_over()
                telling.close()
                raise PagesUnavailable(f"{program}: {error.strerror}") from error
        end_before_others(process.pid)
        return PageServer(images_dir, process, theirs, telling, early=bool(tracked))

    @property
    def socket(self) -> int:
        """The descriptor by which CRIU sends pages."""
        return self._criu_end.fileno()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors that CRIU gets."""
        return (self.socket, *(self._telling.ends if self._telling else ()))

    @property
    def environment(self) -> dict[str, str]:
        """What CRIU's library is told (native/pages/criu_memory.cpp)."""
        return {
            "LD_PRELOAD": str(launch.library_dir() / MEMORY_LIBRARY),
            STANDING: " ".join(map(str, self.descriptors[1:])),
        }

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def has_ended(self) -> bool:
        """True once the server is gone."""
        return self._process.poll() is not None

    def wait_ready(self, seconds: float) -> None:
        """Wait until the files are made. Raises PagesUnavailable, with the server ended."""
        line = self._line(seconds)
        if line != "ready":
            reason = "it takes too long to start" if line is None else self.failure()
            self.close()
            raise PagesUnavailable(reason or "it does not start")

    def again(self, seconds: float) -> None:
        """Copy what tracked processes have written since, and be ready to look at all of them.
        Raises PagesUnavailable."""
        self._say("pass\n")
        line = self._line(seconds)
        if not line or not line.startswith("passed "):
            raise PagesUnavailable(self.failure() or "it copies no pages")
        logger.info("%s pages were written since they were copied", line.split()[1])

    def compare(self, ranges: Mapping[int, Iterable[tuple[int, int]]]) -> None:
        """Have it compare memory of processes, by process id from where to where, when CRIU has
        stopped them: a device may have written it. Raises PagesUnavailable."""
        for pid, parts in ranges.items():
            self._say("".join(f"device {pid} {start:x}-{end:x}\n" for start, end in parts))

    def look(self, pids: Iterable[int]) -> None:
        """Have it look up what CRIU is going to ask about the memory of processes that stand still
        from now on. Where it cannot, CRIU asks the kernel."""
        with suppress(PagesUnavailable):
            self._say("look " + " ".join(map(str, pids)) + "\n")

    def copy(self) -> None:
        """Have it copy the pages of these processes: from now on nobody but CRIU touches them."""
        with suppress(PagesUnavailable):
            self._say("copy\n")

    def _say(self, text: str) -> None:
        if self._process.stdin is None:
            raise PagesUnavailable("it has ended")
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise PagesUnavailable(self.failure() or str(error)) from error

    def hand_over(self) -> None:
        """CRIU has the descriptors: the connection ends with CRIU."""
        self._criu_end.close()
        if self._telling is not None:
            self._telling.close()
            self._telling = None

    def stats(self, seconds: float = END_SECONDS) -> PageStats:
        """What came, after CRIU has ended well. Raises PagesUnavailable."""
        line = self._line(seconds)
        if not line:
            raise PagesUnavailable(self.failure() or "it said nothing")
        self._complete = True
        return PageStats(**json.loads(line))

    def failure(self) -> str:
        """Why the server has failed by itself; empty: it has not."""
        self.hand_over()
        try:
            _, words = self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return ""
        self._process.stdin = None  # it is closed
        code = self._process.returncode
        if code in (0, _CRIU_IS_GONE):
            return ""
        return words.decode(errors="replace").strip() or f"the page server {how_ended(code)}"

    def close(self) -> None:
        """End it. Unless `stats` has said that all came, what came is removed."""
        self.hand_over()
        try:
            # Without a connection it ends by itself.
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._complete and self._process.stderr and not self._process.stderr.closed:
            for line in self._process.stderr.read().decode(errors="replace").splitlines():
                logger.warning("page server: %s", line)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with suppress(BrokenPipeError):  # it has not read all that it was told
                    pipe.close()
        self._process.stdin = None
        if not self._complete:
            for name in ("pages-*.img", "pagemap-*.img"):
                for path in self._images_dir.glob(name):
                    path.unlink(missing_ok=True)

    def _line(self, seconds: float) -> str | None:
        """Next line that the server says; None when it says none in time, empty at its end."""
        assert self._process.stdout
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._said:
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            more = os.read(self._process.stdout.fileno(), 1 << 12)
            if not more:
                return ""
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()
