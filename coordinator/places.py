"""What CRIU wants to find and does not make: FIFOs, and folders in memory that the job watches.

They are gone once the job, or another copy of it, has ended and removed them. A FIFO is made again
without its bytes, which CRIU has. A folder on a tmpfs that is watched with inotify is made empty.
Both get their mode and owner. Another folder that is watched and missing is named before CRIU
starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from flowgpu.errors import FileMissing
from flowgpu.host import criu_images
from flowgpu.host.proctree import PROC, fd_targets
from flowgpu.host.settings import FIFO, WATCHED_FOLDER
from flowgpu.image.manifest import Setting
from flowgpu.image.space import is_memory


def any_held(pids: Iterable[int]) -> bool:
    """True if one of these processes has a FIFO open by a name, or watches something."""
    for pid in pids:
        for fd, target in fd_targets(pid):
            if target == "anon_inode:inotify":
                return True
            with suppress(OSError):  # closed by now: CRIU opens some in a stopped process
                if target.startswith("/") and (PROC / str(pid) / "fd" / str(fd)).is_fifo():
                    return True
    return False


def found(images: Path, root: int) -> Iterator[Setting]:
    """Those that processes of CRIU's `images` use, while the job is stopped."""
    for path in sorted(criu_images.watched_paths(images)):
        with suppress(OSError):  # it is gone, and so is the watch
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and is_memory(path):
                yield _setting(WATCHED_FOLDER, path, status, root)
    for path in sorted(criu_images.fifo_paths(images)):
        with suppress(OSError):  # gone since, so that a restore will miss it
            status = path.lstat()
            if stat.S_ISFIFO(status.st_mode):
                yield _setting(FIFO, path, status, root)


def _setting(kind: str, path: Path, status: os.stat_result, root: int) -> Setting:
    values = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    return Setting(kind, values, str(path), (root,))


def make(settings: Iterable[Setting], images: Path) -> list[Path]:
    """Make those of an image that are missing; gives what was made. Raises FileMissing, OSError."""
    made: list[Path] = []
    try:
        for setting in settings:
            path = Path(setting.text)
            if setting.kind in (FIFO, WATCHED_FOLDER) and not os.path.lexists(path):
                _make(setting, path, made)
        for path in sorted(criu_images.watched_paths(images)):
            if not os.path.lexists(path):
                raise FileMissing(path=path)
    except BaseException:
        remove(made)
        raise
    return made


def _make(setting: Setting, path: Path, made: list[Path]) -> None:
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(0o700)
            made.append(folder)
    mode, user, group = setting.values
    if setting.kind == FIFO:
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    made.append(path)
    with suppress(PermissionError):  # another user's, and that is not us
        os.chown(path, user, group)
    path.chmod(mode)


def remove(made: Iterable[Path]) -> None:
    """What `make` has made, where nothing came of it."""
    for path in reversed([*made]):
        with suppress(OSError):  # somebody uses the folder
            if path.is_fifo():
                path.unlink()
            else:
                path.rmdir()
