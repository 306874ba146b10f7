"""Jobs in containers of a real podman: stopped and started anew, dumped by podman's own hand."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT
from tests.emu.test_checkpoint import ROOT, SECONDS, command, emulated_machine, undisturbed
from tests.podman.machine import IMAGE, SHIPPED, Podman, missing
from tests.unit.coordinator_job import wait_for

absent = missing()
pytestmark = [
    pytest.mark.skipif(bool(absent), reason=f"podman cannot run here: no {', '.join(absent)}"),
    pytest.mark.timeout(6 * SECONDS),
]
WORDS = command("digits_mlp")
RIGHTS = (
    "--cap-add=SYS_ADMIN,CHECKPOINT_RESTORE,SYS_PTRACE,NET_ADMIN,SYS_RESOURCE,SYS_TIME",
    "--security-opt=seccomp=unconfined",
    "--tmpfs=/run",
)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        found = Podman(Path(folder))
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Lines of a run that nobody disturbed."""
    with emulated_machine():
        return undisturbed("digits_mlp")


class Line:
    """A command line of contrib/podman/job.sh, started again and again."""

    def __init__(self, podman: Podman, folder: Path) -> None:
        self.podman, self.folder, self.name = podman, folder, podman.name()
        self.out, self.err = folder / "out", folder / "err"
        program = folder / "bin" / "flowgpu"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m flowgpu "$@"\n')
        program.chmod(0o755)
        shared = folder / "shared"
        shared.mkdir()
        self.hurrying = shared / "hurry"
        self.options = [
            *podman.volumes(),
            f"--volume={program.parent}:{program.parent}:ro",
            f"--volume={shared}:{shared}",
            f"--env=PATH={program.parent}:/usr/bin:/bin",
            f"--env=WORKLOAD_HURRY={self.hurrying}",
        ]
        self._env = {
            **podman.env,
            "FLOWGPU_IMAGES": str(folder / "images"),
            "PODMAN_OPTIONS": " ".join(self.options),
        }

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        words = [str(SHIPPED / "job.sh"), self.name, IMAGE, *WORDS]
        with (
            open(self.out, "ab") as out,
            open(self.err, "ab") as err,
            subprocess.Popen(words, stdout=out, stderr=err, env=self._env) as process,
        ):
            try:
                yield process
            finally:
                self.podman.run("rm", "--force", "--time", "0", self.name)

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def wait_more(self, count: int) -> None:
        wanted = len(self.lines) + count
        wait_for(lambda: len(self.lines) >= wanted, f"{wanted} lines", SECONDS)


@pytest.fixture
def line(podman: Podman, tmp_path: Path) -> Line:
    return Line(podman, tmp_path)


def test_a_job_that_podman_stops_goes_on_in_new_containers(line: Line, expected: list[str]) -> None:
    for _ in range(2):
        with line.started() as process:
            line.wait_more(3)
            line.podman.ask("stop", line.name)
            assert process.wait(SECONDS) == DUMPED_EXIT, line.err.read_text()
    assert len(line.lines) < len(expected)
    with line.started() as process:
        line.wait_more(1)
        line.hurrying.touch()
        assert process.wait(SECONDS) == 0, line.err.read_text()
    assert line.lines == expected
    assert line.err.read_text().count("goes on from") == 2 + 2  # dumped, and gone on


def test_a_command_in_the_container_dumps_its_job_for_another_container(
    line: Line, expected: list[str]
) -> None:
    podman = line.podman
    with line.started() as process:
        line.wait_more(3)
        dump = ("pause-and-dump", line.name, "--output", "/images/moved")
        done = podman.exec(line.name, "flowgpu", *dump)
        # The container ends with its job, and may take the command along that has said so.
        assert done.returncode in (0, 128 + signal.SIGKILL), done.stderr
        assert "image " in done.stdout
        assert process.wait(SECONDS) == DUMPED_EXIT, line.err.read_text()
    line.hurrying.touch()
    options = [*line.options, *RIGHTS, f"--volume={line.folder}/images:/images"]
    done = podman.run("run", "--rm", *options, IMAGE, "flowgpu", "restore", "/images/moved")
    assert done.returncode == 0, done.stderr
    assert [*line.lines, *done.stdout.splitlines()] == expected
