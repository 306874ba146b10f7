#!/usr/bin/env python3
"""Get HTCondor for its tests, without touching the system.

The first newer suite of this machine's mirror that has it is unpacked into .tools/htcondor: the
daemons and commands that a pool needs, behind launchers that start them through the dynamic loader
and the C library that they were built for (fetch_criu.py does the same for CRIU).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from fetch_criu import FetchError, first_suite, linked_libraries

PACKAGE = "condor"
TARGET = Path(__file__).resolve().parent.parent / ".tools" / "htcondor"
DAEMONS = ("master", "collector", "negotiator", "schedd", "startd", "starter", "shadow", "procd")
COMMANDS = ("config_val", "hold", "q", "release", "rm", "status", "submit", "userprio")
COMMANDS += ("history", "qedit", "vacate_job")
LAUNCHER = """\
#!/bin/sh
root=${0%/*}/../root
exec "$root/ld.so" --library-path "$root/lib" "$root/bin/${0##*/}" "$@"
"""


def assemble(unpacked: Path, target: Path) -> None:
    """Lay out the programs, what they link, and a launcher for each in `target`/bin."""
    found = {path.name: path for path in unpacked.glob("usr/*bin/condor_*")}
    loader = next(path for path in unpacked.rglob("ld-linux*.so*") if path.is_file())
    folders = sorted({path.parent for path in unpacked.rglob("*.so*") if path.is_file()})
    for name in ("bin", "root/bin", "root/lib"):
        (target / name).mkdir(parents=True)
    for short in (*DAEMONS, *COMMANDS):
        name = f"condor_{short}"
        if name not in found:
            raise FetchError(f"the package {PACKAGE} has no {name}")
        for library in linked_libraries(loader, folders, found[name]):
            shutil.copy(library, target / "root" / "lib" / library.name)
        # Each under its own name: several commands are one program that looks at it.
        shutil.copy(found[name], target / "root" / "bin" / name)
        launcher = target / "bin" / name
        launcher.write_text(LAUNCHER)
        launcher.chmod(0o755)
    shutil.copy(loader, target / "root" / "ld.so")


def fetch() -> None:
    with first_suite(PACKAGE, (), TARGET) as (apt, scratch, version):
        unpacked, fresh = scratch / "unpacked", scratch / "htcondor"
        for package in apt.download(PACKAGE):
            subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
        assemble(unpacked, fresh)
        (fresh / "VERSION").write_text(version)
        fresh.rename(TARGET)


def main() -> int:
    if TARGET.exists():
        return 0
    try:
        fetch()
    except (FetchError, OSError, subprocess.CalledProcessError) as error:
        print(
            f"HTCondor could not be fetched here: its tests are skipped: {error}", file=sys.stderr
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
