"""The page server of a checkpoint (flowgpu/pages.py): a help that a checkpoint does without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flowgpu import criu_images
from flowgpu.errors import FlowError
from flowgpu.pages import PageServer, PageStats, PagesUnavailable

log = logging.getLogger(__name__)


class Pages:
    """None, one that is being started, or one that is ready for CRIU."""

    def __init__(self) -> None:
        self._server: PageServer | None = None
        self._stats: PageStats | None = None

    def start(self, criu_dir: Path, pids: Sequence[int]) -> None:
        """Begin to make the files, while the job runs."""
        try:
            self._server = PageServer.start(criu_dir, pids)
        except PagesUnavailable as error:
            self._do_without(error)

    def ready(self, seconds: float) -> None:
        """Wait until the files are made; without a server that does not come to it."""
        if self._server is not None:
            try:
                self._server.wait_ready(seconds)
            except PagesUnavailable as error:
                self._do_without(error)

    def take(self) -> PageServer | None:
        """The server for `start_dump`."""
        if self._server is not None and self._server.has_ended():
            self._do_without(self._server.failure())
        return self._server

    def _do_without(self, reason: object) -> None:
        log.warning("CRIU writes the pages itself: %s", reason)
        self.close()

    def finish(self) -> None:
        """After a dump that went well. Raises PagesUnavailable when the server says otherwise."""
        if self._server is not None:
            self._stats = self._server.stats()

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
