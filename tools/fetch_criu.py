#!/usr/bin/env python3
"""Get a CRIU that works on this machine's kernel, without touching the system.

An installed CRIU that is new enough is used as it is. Otherwise the machine's own package mirror
is asked for a newer suite of the same distribution, and CRIU is unpacked beside the C library it
was built for into a private, relocatable folder:

    .tools/criu/criu         launcher: resolves its own folder, starts CRIU through its own ld.so
    .tools/criu/root/        the program, its dynamic loader and the shared libraries it needs
    .tools/criu/python/      pycriu, which reads and writes CRIU's image files, for the tests
    .tools/criu/VERSION      version, suite and packages it was made of

apt does the transfer in a state folder of its own, so proxies, credentials and mirror lists of the
machine apply, the signature of the suite is checked with the keyring that its sources name, and
every package with the hash of the signed index. Nothing is installed and no root is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from apt_sources import Source, configured_sources

MINIMUM = (4, 2)
# Oldest first: the first suite that has a CRIU new enough brings the smallest jump of everything.
NEWER_SUITES = {
    "debian": ("trixie", "forky", "sid"),
    "ubuntu": ("resolute", "devel"),
}
COMPONENTS = {"debian": "main", "ubuntu": "main universe"}
OS_RELEASE = Path("/etc/os-release")
OWN_PROGRAM = (
    f"Install CRIU {'.'.join(map(str, MINIMUM))} or newer and set FLOWGPU_CRIU to the program."
)
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / ".tools" / "criu"

LAUNCHER = """\
#!/bin/sh
# Starts CRIU through the dynamic loader and C library that it was built for.
# A job stands still while this starts: two more programs would take longer than CRIU's own start.
case $0 in
/*) here=${0%/*}/root ;;
*) here= ;;
esac
if [ -h "$0" ] || [ -z "$here" ]; then here=$(dirname "$(readlink -f "$0")")/root; fi
exec "$here/ld.so" --library-path "$here/lib" "$here/criu" "$@"
"""


class FetchError(Exception):
    """What was wanted could not be set up; the message says why."""


def version_of(criu: Path | str) -> tuple[int, ...] | None:
    """Version that `criu --version` reports, or None when it does not run."""
    try:
        done = subprocess.run(
            [str(criu), "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"Version:\s*(\d+(?:\.\d+)*)", done.stdout)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def works(criu: Path | str) -> bool:
    """True when CRIU is new enough and its own check of the kernel passes (as root only)."""
    version = version_of(criu)
    if version is None or version < MINIMUM:
        return False
    if os.geteuid() != 0:
        return True
    done = subprocess.run([str(criu), "check"], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def distribution(os_release: Path = OS_RELEASE) -> tuple[str, str]:
    """`debian` or `ubuntu`, derivatives included, and the release's codename."""
    fields: dict[str, str] = {}
    try:
        for line in os_release.read_text().splitlines():
            key, _, value = line.partition("=")
            fields[key] = value.strip('"')
    except OSError as error:
        raise FetchError(f"cannot tell the distribution: {error}") from error
    for name in (fields.get("ID", ""), *fields.get("ID_LIKE", "").split()):
        if name in NEWER_SUITES:
            return name, fields.get("VERSION_CODENAME", "")
    unknown = fields.get("ID", "?")
    raise FetchError(f"no newer suite is known for distribution {unknown!r}")


def mirrors(codename: str) -> list[Source]:
    """Repositories of this machine's own release, once each: they carry newer suites too."""
    found: dict[str, Source] = {}
    for source in configured_sources():
        if source.suite in (codename, "stable", "testing", "unstable", "sid"):
            found.setdefault(source.uri, source)
    if not found:
        raise FetchError(f"apt has no package source for {codename or 'this release'}")
    return list(found.values())


class PrivateApt:
    """apt with one suite as its only source and with all its state in one folder."""

    def __init__(self, folder: Path, source: Source, suite: str, components: str) -> None:
        self.folder = folder
        for name in ("lists/partial", "cache/archives/partial", "empty"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        sources = folder / "suite.sources"
        lines = ["Types: deb", f"URIs: {source.uri}", f"Suites: {suite}"]
        lines.append(f"Components: {components}")
        if source.signed_by:
            lines.append(f"Signed-By: {source.signed_by}")
        sources.write_text("\n".join(lines) + "\n")
        self.config = {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": folder / "empty",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": folder / "empty",
            "Dir::State": folder,
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            # A mirror frozen for reproducible set-ups is older than its Valid-Until allows.
            "Acquire::Check-Valid-Until": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }

    def run(self, *args: str) -> str:
        """Output of an apt program run on the private state; FetchError with apt's own words."""
        program, *rest = args
        options = [f"-o{key}={value}" for key, value in self.config.items()]
        done = subprocess.run(
            [program, *options, *rest], capture_output=True, text=True, cwd=self.folder, check=False
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))]
        if done.returncode != 0 or any("Failed to fetch" in line for line in errors):
            raise FetchError(f"{program} {rest[0]}: {' '.join(errors) or done.stderr.strip()}")
        return done.stdout

    def candidate(self, package: str) -> str | None:
        """Version of a package in the suite, after fetching its signed index."""
        self.run("apt-get", "update", "-qq")
        found = re.search(
            r"^ +Candidate: (\d\S*)", self.run("apt-cache", "policy", package), re.MULTILINE
        )
        return found[1] if found else None

    def download(self, package: str, *alone: str) -> list[Path]:
        """A package with all that it depends on, as if nothing were installed; others alone."""
        self.run("apt-get", "install", "-y", "-qq", "--download-only", package)
        for other in alone:
            self.run("apt-get", "download", "-qq", other)
        archives = self.folder / "cache" / "archives"
        return sorted([*archives.glob("*.deb"), *self.folder.glob("*.deb")])


def as_numbers(version: str) -> tuple[int, ...]:
    """`4.2.1-1` as (4, 2, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("-")[0]))


@contextmanager
def first_suite(
    package: str, minimum: tuple[int, ...], target: Path
) -> Iterator[tuple[PrivateApt, Path, str]]:
    """The first newer suite on this machine's mirrors that has a package new enough.

    Gives its apt, a folder beside `target` that ends with the context, and a line for VERSION.
    """
    kind, codename = distribution()
    target.parent.mkdir(parents=True, exist_ok=True)
    tried: list[str] = []
    for suite in NEWER_SUITES[kind]:
        for source in mirrors(codename):
            with tempfile.TemporaryDirectory(
                prefix=f".{target.name}-", dir=target.parent
            ) as scratch:
                apt = PrivateApt(Path(scratch) / "apt", source, suite, COMPONENTS[kind])
                try:
                    version = apt.candidate(package)
                except FetchError as error:
                    tried.append(f"{suite}: {error}")
                    continue
                if version is None or as_numbers(version) < minimum:
                    tried.append(f"{suite}: {package} {version or 'absent'}")
                    continue
                yield apt, Path(scratch), f"{package} {version} from {suite}\n"
                return
    found = "".join(f"\n  {line}" for line in tried)
    raise FetchError(f"no suite of the configured mirrors has one{found}")


def linked_libraries(loader: Path, library_path: Sequence[Path], program: Path) -> list[Path]:
    """Files that the dynamic loader itself would open for the program."""
    joined = ":".join(map(str, library_path))
    done = subprocess.run(
        [str(loader), "--library-path", joined, "--list", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or "not found" in done.stdout:
        raise FetchError(f"the downloaded CRIU misses a library: {done.stdout}{done.stderr}")
    return [Path(path) for path in re.findall(r"=> (/\S+) \(", done.stdout)]


def assemble(packages: Iterable[Path], unpacked: Path, target: Path) -> None:
    """Lay out program, loader and the libraries it links; the rest of the packages is dropped."""
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
    program = next(iter(unpacked.glob("usr/*bin/criu")), None)
    loader = next(
        (path for path in sorted(unpacked.rglob("ld-linux*.so*")) if path.is_file()), None
    )
    pycriu = next(iter(unpacked.rglob("pycriu/__init__.py")), None)
    if program is None or loader is None or pycriu is None:
        raise FetchError("the packages hold no program criu, no dynamic loader or no pycriu")
    folders = sorted({path.parent for path in unpacked.rglob("*.so*") if path.is_file()})
    libraries = target / "root" / "lib"
    libraries.mkdir(parents=True)
    for library in linked_libraries(loader, folders, program):
        if unpacked not in library.parents:
            raise FetchError(f"CRIU would take {library} from the system, not from the packages")
        shutil.copy(library, libraries / library.name)
    shutil.copy(program, target / "root" / "criu")
    shutil.copy(loader, target / "root" / "ld.so")
    shutil.copytree(pycriu.parent, target / "python" / "pycriu")
    launcher = target / "criu"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)


def fetch(target: Path) -> Path:
    """Build `target` from the first newer suite that has CRIU; replaces it in one rename."""
    with first_suite("criu", MINIMUM, target) as (apt, scratch, version):
        packages = apt.download("criu", "python3-pycriu")
        fresh = scratch / "criu"
        assemble(packages, scratch / "unpacked", fresh)
        names = "".join(f"{package.name}\n" for package in packages)
        (fresh / "VERSION").write_text(version + names)
        if version_of(fresh / "criu") is None:
            raise FetchError("the CRIU that was put together does not start")
        if target.exists():
            target.rename(scratch / "old")
        fresh.rename(target)
    return target / "criu"


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up a CRIU that works on this kernel.")
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder to create")
    parser.add_argument("--print", action="store_true", help="print the path, fetch nothing")
    parser.add_argument("--force", action="store_true", help="fetch even if one is there")
    args = parser.parse_args()
    target = args.target.absolute()
    if not args.force:
        for known in (target / "criu", shutil.which("criu")):
            if known is not None and works(known):
                print(known)
                return 0
    if args.print:
        print("fetch_criu: no CRIU that works here; run `make setup`", file=sys.stderr)
        return 1
    try:
        print(fetch(target))
    except (FetchError, subprocess.CalledProcessError) as error:
        print(f"fetch_criu: {error}\n{OWN_PROGRAM}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
