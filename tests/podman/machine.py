"""A podman of one's own, as root, in a private folder: no system container is seen or touched."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from pathlib import Path

from flowgpu.host.criu import Criu
from tests.emu.test_checkpoint import ROOT, SECONDS
from tests.unit.coordinator_job import wait_for

FETCHED = ROOT / ".tools" / "podman"
SHIPPED = ROOT / "contrib" / "podman"
PROGRAMS = ("podman", "runc", "conmon")
IMAGE = "flowgpu-test:1"
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr")
LINKS = ("bin", "sbin", "lib", "lib64")


def _path() -> str:
    fetched = [str(FETCHED / "usr" / name) for name in ("bin", "sbin")]
    return ":".join([os.environ["PATH"], "/usr/sbin", "/sbin", *fetched])


def program(name: str) -> str:
    return shutil.which(name, path=_path()) or ""


def missing() -> list[str]:
    """What lacks to run containers and to dump what is in them."""
    if os.geteuid() != 0:
        return ["root"]
    return [name for name in PROGRAMS if not program(name)]


class Podman:
    """Containers with the programs of this machine and this checkout, at the same paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self._tag = uuid.uuid4().hex[:8]
        self._criu()
        runtime = program("runc")
        (folder / "containers.conf").write_text(
            "[containers]\n"
            'netns = "none"\n'
            "[engine]\n"
            'cgroup_manager = "cgroupfs"\n'
            'events_logger = "none"\n'
            'runtime = "runc"\n'
            f'conmon_path = ["{program("conmon")}"]\n'
            f'tmp_dir = "{folder}/libpod"\n'
            "[engine.runtimes]\n"
            f'runc = ["{runtime}"]\n'
        )
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        )
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}\n')
        libraries = ":".join(map(str, FETCHED.glob("usr/lib/*-linux-gnu")))
        self.env = {
            **os.environ,
            "PATH": f"{folder}/bin:{_path()}",
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
            "LD_LIBRARY_PATH": libraries,
        }
        self._import()

    def _criu(self) -> None:
        """The one that FlowGPU has, where the runtime looks for one."""
        criu = self.folder / "bin" / "criu"
        criu.parent.mkdir()
        criu.write_text(f'#!/bin/sh\nexec env -u LD_LIBRARY_PATH {Criu.locate().program} "$@"\n')
        criu.chmod(0o755)

    def _import(self) -> None:
        tree = self.folder / "tree"
        for name in FOLDERS:
            (tree / name).mkdir(parents=True)
        for name in LINKS:
            (tree / name).symlink_to(f"usr/{name}")
        archive = self.folder / "tree.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(tree, ".")
        self.ask("import", "--signature-policy", self.folder / "policy.json", archive, IMAGE)

    def volumes(self) -> list[str]:
        """Options for the programs: a container has nothing but them."""
        folders = {Path("/usr"), ROOT, Path(sys.base_prefix), Path(sys.prefix)}
        inner = {one for one in folders for other in folders if other in one.parents}
        return [f"--volume={one}:{one}:ro" for one in sorted(folders - inner)]

    def name(self) -> str:
        """A name that no other container has."""
        return f"flowgpu-{self._tag}-{next(self._numbers)}"

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self.env,
            timeout=3 * SECONDS,
            check=False,
        )

    def ask(self, *arguments: object) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"podman {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def exec(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        return self.run("exec", name, *words)

    def wait_lines(self, name: str, count: int) -> list[str]:
        """The container's output, once it has so many lines."""
        wait_for(lambda: len(self.lines(name)) >= count, f"{count} lines", SECONDS)
        return self.lines(name)

    def lines(self, name: str) -> list[str]:
        done = self.run("logs", name)
        return done.stdout.splitlines()

    @property
    def criu_said(self) -> str:
        """Errors in CRIU's logs of dumps."""
        logs = self.folder.glob("graph/vfs-containers/*/userdata/dump.log")
        lines = [line for log in logs for line in log.read_text().splitlines(keepends=True)]
        return "".join(line for line in lines if "Error" in line)

    def close(self) -> None:
        """Remove all that is here, and wait for its monitors."""
        self.run("rm", "--all", "--force", "--time", "0")
        self.run("rmi", "--all", "--force")


if __name__ == "__main__":
    sys.exit(bool(missing()))
