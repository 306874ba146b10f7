"""The page server of a checkpoint (flowgpu/host/pages.py), which does without it too."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flowgpu.errors import FlowError
from flowgpu.host import criu_images
from flowgpu.host.pages import END_SECONDS, NONE, PageServer, PageStats, PagesUnavailable
from flowgpu.image.manifest import Inherited

log = logging.getLogger(__name__)


class Pages:
    """The page server of a dump, if there is one: it is being started, or ready for CRIU."""

    def __init__(self) -> None:
        self._server: PageServer | None = None
        self._stats: PageStats | None = None
        self._files: tuple[Path, Sequence[int]]  # in `start`
        self.why_not_early = ""
        """Why it has not copied pages of the job while that ran, where it was to."""

    @property
    def early(self) -> bool:
        """True if the server has copied pages of the job, so that CRIU sends only the others."""
        return self._server is not None and self._server.early

    def start(self, criu_dir: Path, pids: Sequence[int], tracked: Mapping[int, int] = NONE) -> None:
        """Begin to make the files, while the job runs, with the pages of those that are tracked:
        by process id a userfaultfd, which is closed."""
        self._files = criu_dir, pids
        try:
            self._server = PageServer.start(criu_dir, pids, tracked=tracked)
        except PagesUnavailable as error:
            self._do_without(error)
        finally:
            for fd in tracked.values():
                os.close(fd)

    def ready(self, seconds: float) -> None:
        """Wait until the files are made; without a server that does not come to it."""
        if self._server is None:
            return
        early = self.early
        try:
            self._server.wait_ready(seconds)
        except PagesUnavailable as error:
            self._do_without(error, early)
            if early:  # it may do the rest
                self.start(*self._files)
                self.ready(seconds)

    def again(self, seconds: float) -> None:
        """Copy what was written since: soon all stands still."""
        if self._server is not None:
            try:
                self._server.again(seconds)
            except PagesUnavailable as error:
                self._do_without(error, self.early)

    def compare(self, ranges: Mapping[int, Iterable[tuple[int, int]]]) -> None:
        """Have memory of processes compared that a device may have written."""
        if self._server is not None and self.early:
            try:
                self._server.compare(ranges)
            except PagesUnavailable as error:
                self._do_without(error, early=True)

    def take(self) -> PageServer | None:
        """The server for `start_dump`."""
        if self._server is not None and self._server.has_ended():
            self._do_without(self._server.failure(), self.early)
        return self._server

    def _do_without(self, reason: object, early: bool = False) -> None:
        log.warning("CRIU writes the pages itself: %s", reason)
        if early:
            self.why_not_early = str(reason)
        self.close()

    def finish(self, seconds: float = END_SECONDS) -> None:
        """After a dump that went well. Raises PagesUnavailable when the server says otherwise."""
        if self._server is not None and self._stats is None:
            self._stats = self._server.stats(seconds)

    @property
    def inherited(self) -> tuple[Inherited, ...]:
        """Pages that processes have of their parents; after `finish`."""
        found = self._stats.inherited if self._stats else {}
        return tuple(Inherited(process=int(pid), bytes=size) for pid, size in found.items())

    def report(self, criu_dir: Path) -> None:
        """Log what CRIU and the server have counted, outside the pause."""
        try:
            log.info("CRIU: %s; pages: %s", criu_images.dump_stats(criu_dir), self._stats)
        except FlowError as error:
            log.warning("%s", error)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
