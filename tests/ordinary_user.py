"""Programs of a user who is not root and has the capabilities that docs/install.md names.

They run in a mount namespace of their own, where this checkout lies at /mnt: its own path may lead
through folders that are closed to that user.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path("/mnt")
USER = 64990
RIGHTS = ("sys_admin", "sys_ptrace", "sys_time", "net_admin", "setpcap", "checkpoint_restore")
STARTS = "import sys; sys.path.insert(0, '/mnt'); from flowgpu.cli import main; sys.exit(main())"


def here(path: Path | str) -> str:
    """Where the user finds a file of this checkout."""
    path = Path(path)
    return str(HERE / path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


FLOWGPU = (here(sys.executable), "-c", STARTS)


def missing() -> list[str]:
    """What lacks to run programs as that user."""
    python = Path(sys.executable)
    folders = [] if python.is_relative_to(ROOT) else [python.parent, *python.parent.parents]
    closed = [str(folder) for folder in folders if not folder.stat().st_mode & 0o001]
    return [*(["root"] if os.geteuid() != 0 else []), *closed]


def workload(name: str, **options: object) -> list[str]:
    words = [here(sys.executable), here(ROOT / "workloads" / f"{name}.py")]
    return words + [word for key, value in options.items() for word in (f"--{key}", str(value))]


def as_user(words: Iterable[str], rights: Iterable[str] = RIGHTS) -> list[str]:
    """The command that runs these words as the user."""
    added = ",".join(f"+{right}" for right in rights)
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    if added:
        become += [f"--inh-caps={added}", f"--ambient-caps={added}"]
    script = f"mount --bind {shlex.quote(str(ROOT))} {HERE} && exec {shlex.join([*become, *words])}"
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
