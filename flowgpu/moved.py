"""A job that goes on in another folder than it was started in.

A scheduler without a shared file system gives each turn of a job a folder of its own, and a process
cannot be told that its folder has another name now: it has it in its memory. So the new folder is
found at the old path as well, in a mount namespace that this command and the job have.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from pathlib import Path

from flowgpu.host.probes import libc

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MS_RDONLY, MS_REMOUNT = 0x1, 0x20
MNT_DETACH = 2
# A folder with more than that is no place where jobs have theirs: each entry takes a mount.
MOST_ENTRIES = 1000


def find_here(old: Path) -> bool:
    """Let this process, and all that it starts, find the working folder at `old` as well.

    False: it may not mount, or nothing can be put there.
    """
    try:
        _bring(old, Path.cwd())
    except OSError:
        return False
    return True


def _bring(old: Path, new: Path) -> None:
    parent = next(folder for folder in old.parents if folder.is_dir())
    entries = list(os.scandir(parent))
    if parent == Path("/") or len(entries) > MOST_ENTRIES:
        raise FileExistsError  # it is to be covered
    _call(libc().unshare(CLONE_NEWNS))
    _mount("none", "/", "", MS_REC | MS_SLAVE)
    here, beside = os.open(new, os.O_PATH), os.open(parent, os.O_PATH)
    # Who may not write to it may cover it: with a folder that has the same in it, and `old`.
    _mount("flowgpu", parent, "tmpfs", 0, "mode=0755")
    try:
        for entry in entries:
            if parent / entry.name == old:  # another user's, to whom it was given meanwhile
                continue
            source, target = f"/proc/self/fd/{beside}/{entry.name}", parent / entry.name
            with contextlib.suppress(FileNotFoundError):  # another job's, which has ended
                _show(source, target, target in (new, *new.parents))
        old.mkdir(parents=True)
        _mount(f"/proc/self/fd/{here}", old, "", MS_BIND | MS_REC)
        # What would be made beside them is refused: it would be lost.
        _mount("none", parent, "", MS_REMOUNT | MS_BIND | MS_RDONLY)
    except OSError:
        libc().umount2(os.fsencode(parent), MNT_DETACH)
        raise
    finally:
        os.close(here)
        os.close(beside)
    os.chdir(new)


def _show(source: str, target: Path, needed: bool) -> None:
    """Let what is at `source` be at `target` too; a file system only if it is needed: its owner
    could not unmount it any more."""
    about = os.lstat(source)
    if stat.S_ISLNK(about.st_mode):
        target.symlink_to(os.readlink(source))
        return
    if about.st_dev != os.stat(os.path.dirname(source)).st_dev and not needed:
        return
    if stat.S_ISDIR(about.st_mode):
        target.mkdir()
    else:
        target.touch()
    _mount(source, target, "", MS_BIND | (MS_REC if needed else 0))


def _mount(source: str, target: Path | str, kind: str, flags: int, data: str = "") -> None:
    words = (os.fsencode(word) for word in (source, str(target), kind))
    _call(libc().mount(*words, flags, os.fsencode(data)))


def _call(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
