"""Programs that multiply in the processor's AMX tiles, on a processor that has them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import processor
from flowgpu.errors import RegistersInUse
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu, runtime_dir
from tests.unit.coordinator_job import wait_for

__all__ = ["runtime_dir"]

pytestmark = pytest.mark.skipif(
    processor.AMX not in processor.features(), reason="the processor has no AMX"
)
NAME = "products"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amx")
    return compile_program("amx.c", folder / "amx", "-mamx-tile", "-mamx-int8")


class Products:
    """The command that has the job, and what the job has said to it."""

    def __init__(self, out: Path, *words: object) -> None:
        self.out = out
        with open(out, "ab") as output:
            self.process = subprocess.Popen([*FLOWGPU, *map(str, words)], cwd=ROOT, stdout=output)

    def numbers(self) -> list[int]:
        """Of the products, in their order; it ends where one is wrong."""
        assert self.process.poll() is None, self.out.read_text()
        return [int(line.split()[1]) for line in self.out.read_text().splitlines()]

    def go_on(self) -> None:
        count = len(self.numbers())
        wait_for(lambda: len(self.numbers()) > count + 3, "further products", SECONDS)


@pytest.fixture
def killed() -> Iterator[None]:
    yield
    flowgpu("kill", NAME)


@pytest.mark.usefixtures("killed")
def test_a_restored_process_may_use_tiles_as_before(program: Path, tmp_path: Path) -> None:
    image, out = tmp_path / "image", tmp_path / "out"
    first = Products(out, "run", "--gpu", "emulated", "--name", NAME, program)
    first.go_on()
    done = flowgpu("pause-and-dump", NAME, "--output", image)
    assert done.returncode == 0, done.stderr
    first.process.wait(SECONDS)
    second = Products(out, "restore", image)
    second.go_on()
    assert second.numbers() == list(range(len(second.numbers())))


@pytest.mark.usefixtures("killed")
def test_a_thread_that_has_values_in_tiles_is_named(program: Path, tmp_path: Path) -> None:
    job = Products(tmp_path / "out", "run", "--gpu", "emulated", "--name", NAME, program, "held")
    job.go_on()
    done = flowgpu("pause-and-dump", NAME, "--output", tmp_path / "image")
    assert done.returncode == RegistersInUse.exit_code, done.stderr
    assert "AMX tiles" in done.stderr
    assert not (tmp_path / "image").exists()
    job.go_on()
