"""A job that goes on in another folder than it was started in.

A scheduler without a shared file system gives each turn of a job a folder of its own, and a process
cannot be told that its folder has another name now: it has it in its memory. So the new folder is
found at the old path as well, in a mount namespace that this command and the job have.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from flowgpu.host import mounts
from flowgpu.host.mounts import MS_BIND, MS_RDONLY, MS_REC, MS_REMOUNT, mount

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
    mounts.leave()
    here, beside = os.open(new, os.O_PATH), os.open(parent, os.O_PATH)
    # Who may not write to it may cover it: with a folder that has the same in it, and `old`.
    mount("flowgpu", parent, "tmpfs", 0, "mode=0755")
    try:
        for entry in entries:
            if parent / entry.name == old:  # another user's, to whom it was given meanwhile
                continue
            source, target = f"/proc/self/fd/{beside}/{entry.name}", parent / entry.name
            with contextlib.suppress(FileNotFoundError):  # another job's, which has ended
                _show(source, target, target in (new, *new.parents))
        old.mkdir(parents=True)
        mount(f"/proc/self/fd/{here}", old, "", MS_BIND | MS_REC)
        # What would be made beside them is refused: it would be lost.
        mount("none", parent, "", MS_REMOUNT | MS_BIND | MS_RDONLY)
    except OSError:
        mounts.unmount(parent)
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
    mount(source, target, "", MS_BIND | (MS_REC if needed else 0))
