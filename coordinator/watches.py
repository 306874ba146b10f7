"""Folders in memory that the job watches with inotify: CRIU wants to find what was watched.

A folder on a tmpfs is gone once the job, or another copy of it, has ended and removed it. It is
made again, empty, with its mode and owner. Whatever else is missing is named before CRIU starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from flowgpu.errors import FileMissing
from flowgpu.host import criu_images
from flowgpu.host.settings import WATCHED_FOLDER
from flowgpu.image.manifest import Setting
from flowgpu.image.space import is_memory


def folders(images: Path, root: int) -> Iterator[Setting]:
    """Folders that processes of CRIU's `images` watch, while the job is stopped."""
    for path in sorted(criu_images.watched_paths(images)):
        with suppress(OSError):  # it is gone, and so is the watch
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and is_memory(path):
                values = stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
                yield Setting(WATCHED_FOLDER, values, str(path), (root,))


def make(settings: Iterable[Setting], images: Path) -> list[Path]:
    """Make those of an image that are missing; gives them. Raises FileMissing, OSError."""
    made = []
    for setting in settings:
        path = Path(setting.text)
        if setting.kind == WATCHED_FOLDER and not path.exists():
            mode, user, group = setting.values
            path.mkdir(0o700)
            made.append(path)
            with suppress(PermissionError):  # another user's, and that is not us
                os.chown(path, user, group)
            path.chmod(mode)
    for path in sorted(criu_images.watched_paths(images)):
        if not os.path.lexists(path):
            remove(made)
            raise FileMissing(path=path)
    return made


def remove(made: Iterable[Path]) -> None:
    """What `make` has made, where nothing came of it."""
    for path in made:
        with suppress(OSError):  # somebody uses it
            path.rmdir()
