"""What a task lists of its record of CUDA objects (native/intercept/replay/listing.h), in an image.

It is for people alone (`flowgpu inspect --record`), so no checkpoint fails of it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from flowgpu.image import layout

log = logging.getLogger(__name__)


@contextlib.contextmanager
def listed(path: Path | None) -> Iterator[list[int]]:
    """Descriptors for a request by which a task lists its record; `path` has that afterwards.

    There is no file where the task lists nothing, as one of an earlier FlowGPU, or where it cannot
    be written.
    """
    if path is None:
        yield []
        return
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=_receive, args=(ours, path), daemon=True)
    reader.start()
    try:
        with theirs:
            try:
                yield [theirs.fileno()]
            finally:
                # The list was sent before the answer. A task that hangs may keep its descriptor.
                theirs.shutdown(socket.SHUT_RDWR)
    finally:
        reader.join()


def _receive(ours: socket.socket, path: Path) -> None:
    with ours, ours.makefile("rb") as source:
        try:
            first = source.peek(1)
            if first:
                with open(path, "wb", opener=layout.private) as file:
                    shutil.copyfileobj(source, file)
        except OSError as error:
            log.warning("the record of CUDA objects is not in the image: %s", error)
            path.unlink(missing_ok=True)
