"""Programs that multiply in the processor's AMX tiles, on a processor that has them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.errors import RegistersInUse
from flowgpu.host import processor
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
    """Commands that have the job, one after the other, and what it has said."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.commands: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object) -> None:
        """The job, or its restore, until it goes on."""
        count = len(self.numbers()) if self.commands else 0
        with open(self.out, "ab") as out:
            command = [*FLOWGPU, *map(str, words)]
            self.commands.append(subprocess.Popen(command, cwd=ROOT, stdout=out))
        self.go_on(count)

    def numbers(self) -> list[int]:
        """Numbers of the products, in their order; the job stops where one is wrong."""
        return [int(line.split()[1]) for line in self.out.read_text().splitlines()]

    def go_on(self, count: int) -> None:
        def more() -> bool:
            assert self.commands[-1].poll() is None, self.out.read_text()
            return len(self.numbers()) > count + 3

        wait_for(more, "further products", SECONDS)


@pytest.fixture
def products(tmp_path: Path) -> Iterator[Products]:
    job = Products(tmp_path / "out")
    yield job
    flowgpu("kill", NAME)
    for command in job.commands:
        command.kill()
        command.wait()


def test_a_restored_process_may_use_tiles_as_before(
    program: Path, products: Products, tmp_path: Path
) -> None:
    products.start("run", "--gpu", "emulated", "--name", NAME, program)
    done = flowgpu("pause-and-dump", NAME, "--output", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    products.start("restore", tmp_path / "image")
    assert products.numbers() == list(range(len(products.numbers())))


def test_a_thread_that_has_values_in_tiles_is_named(
    program: Path, products: Products, tmp_path: Path
) -> None:
    products.start("run", "--gpu", "emulated", "--name", NAME, program, "held")
    done = flowgpu("pause-and-dump", NAME, "--output", tmp_path / "image")
    assert done.returncode == RegistersInUse.exit_code, done.stderr
    assert "AMX tiles" in done.stderr
    assert not (tmp_path / "image").exists()
    products.go_on(len(products.numbers()))
