"""The wheel, built and installed into a fresh environment, checkpoints a job.

Not in `make test`, as it compiles everything again: `make test-wheel` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT
from flowgpu.host.criu import Criu

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
VERBS = ("run", "ps", "logs", "kill", "pause-and-dump", "restore", "checkpoint", "store", "doctor")
PROGRAM = """
import os, sys, time
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
memory = ok(cu.cuMemAlloc(4096))
ok(cu.cuMemsetD8(memory, 5, 4096))
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
data = bytearray(4096)
ok(cu.cuMemcpyDtoH(data, memory, 4096))
print(data == bytes([5]) * 4096)
"""


# The first of them compiles, and fetches what the wheel asks for.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", ".", "--no-deps", "-w", folder / "dist"], cwd=ROOT, check=True)
    (wheel,) = (folder / "dist").glob("flowgpu-*.whl")
    made = folder / "env"
    venv.create(made)
    subprocess.run([*pip, "--python", made / "bin" / "python", "install", wheel], check=True)
    return made


def variables(folder: Path) -> dict[str, str]:
    """For commands of the environment: this machine's CRIU, and nothing of the checkout."""
    ours = {"FLOWGPU_CRIU": str(Criu.locate().program), "FLOWGPU_RUNTIME_DIR": str(folder / "run")}
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ours


def call(environment: Path, *words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of FlowGPU's that the environment has."""
    return subprocess.run(
        [environment / "bin" / "flowgpu", *words],
        cwd=folder,
        env=variables(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.timeout(1800)  # it compiles, and fetches what the wheel asks for
def test_what_the_wheel_installs_finds_its_libraries(environment: Path, tmp_path: Path) -> None:
    doctor = call(environment, "doctor", folder=tmp_path)
    assert str(environment) in doctor.stdout, doctor.stdout + doctor.stderr


@pytest.mark.parametrize(
    "before",
    [[], ["sh", "-c", '(sleep 1000 > /dev/null &); "$@"; exit $?', "sh"]],
    ids=["program", "script"],
)
def test_a_job_of_the_wheel_is_dumped_and_restored(
    before: list[str], environment: Path, tmp_path: Path
) -> None:
    go, image, out = tmp_path / "go", tmp_path / "image", tmp_path / "out"
    job = [*before, environment / "bin" / "python", "-c", PROGRAM, go]
    words = [environment / "bin" / "flowgpu", "run", "--gpu", "emulated", "--name", "wheel", "--"]
    with (
        open(out, "wb") as output,
        subprocess.Popen(
            [*words, *job], cwd=tmp_path, env=variables(tmp_path), stdout=output, stderr=output
        ) as process,
    ):
        try:
            while "ready" not in out.read_text():
                assert process.poll() is None, out.read_text()
                time.sleep(0.01)
            dumped = call(
                environment, "pause-and-dump", "wheel", "--output", image, folder=tmp_path
            )
            assert dumped.returncode == 0, dumped.stderr + out.read_text()
            assert process.wait(SECONDS) == DUMPED_EXIT
        finally:
            call(environment, "kill", "wheel", folder=tmp_path)
    go.touch()
    restored = call(environment, "restore", image, folder=tmp_path)
    assert (restored.returncode, restored.stdout) == (0, "True\n"), restored.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_page_of_the_manual(environment: Path, verb: str) -> None:
    page = environment / "share" / "man" / "man1" / f"flowgpu-{verb}.1"
    assert f"flowgpu {verb}" in page.read_text().replace("\\-", "-")


def test_bash_completes_verbs_options_and_jobs(environment: Path, tmp_path: Path) -> None:
    script = environment / "share" / "bash-completion" / "completions" / "flowgpu"
    call(environment, "run", "--name", "named", "--", "true", folder=tmp_path)

    def completed(*line: str) -> list[str]:
        asked = (
            f"source {script}; PATH={environment / 'bin'}:$PATH; COMP_WORDS=({' '.join(line)}); "
            f"COMP_CWORD={len(line) - 1}; _flowgpu_completion flowgpu; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run(
            ["bash", "-c", asked],
            env=variables(tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("flowgpu", "pa") == ["pause-and-dump"]
    assert "--output" in completed("flowgpu", "pause-and-dump", "--o")
    assert completed("flowgpu", "logs", "na") == ["named"]
