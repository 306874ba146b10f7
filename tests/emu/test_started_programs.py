"""Programs that a job starts with an environment of its own making use the GPU through FlowGPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowgpu import launch
from flowgpu.errors import DUMPED_EXIT, CriuUnsupported, Unsupported
from flowgpu.host.criu import Criu
from tests.emu.intercept_lib import compile_program
from tests.gpu.site import Site
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

STEPS = 5


def python(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, subprocess, sys\nwords = sys.argv[1:]\n{text}"]


# Each is followed by the program's words.
WAYS = {
    "cleaned": ["env", "-i"],
    "cleaned twice": ["env", "-i", "/bin/sh", "-c", 'exec env -i "$0" "$@"'],
    "without LD_PRELOAD": ["env", "-u", "LD_PRELOAD"],
    "a preload of its own": ["env", "LD_PRELOAD=libm.so.6"],
    "subprocess": python("sys.exit(subprocess.run(words, env={}).returncode)"),
    "posix_spawn": python(
        "pid = os.posix_spawn(words[0], words, {})\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "system": python("os.environ.clear()\nsys.exit(os.system(' '.join(words)) >> 8)"),
    "popen": python("os.environ.clear()\nsys.exit(os.popen(' '.join(words), 'w').close())"),
}


@pytest.fixture(scope="module", params=["emulated", pytest.param("nvidia", marks=pytest.mark.gpu)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with Site(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It steps until the file that it is given is there."""
    link = f"-L{launch.emulated_driver().parent}"
    output = tmp_path_factory.mktemp("program") / "user"
    return compile_program("user.c", output, link, "-l:libcuda.so.1")


@contextmanager
def job(
    site: Site, folder: Path, *words: str, steps: int = STEPS
) -> Iterator[subprocess.Popen[bytes]]:
    """One that has made some steps."""
    said, errors = folder / "said", folder / "errors"
    with said.open("wb") as out, errors.open("wb") as err:
        process = site.start(
            *("run", "--gpu", site.kind, "--name", "starts", "--", *words), stdout=out, stderr=err
        )
    try:
        wait_for(
            lambda: said.read_bytes().count(b"\n") >= steps or process.poll() is not None, "steps"
        )
        assert process.poll() is None, errors.read_text()
        yield process
    finally:
        site.call("kill", "starts")
        process.kill()
        process.wait()


CASES = [(way, "replay") for way in WAYS] + [("cleaned", "native"), ("popen", "native")]


@pytest.mark.parametrize(("way", "engine"), CASES, ids=map("-".join, CASES))
def test_a_job_is_dumped_with_a_program_that_it_started(
    site: Site, program: Path, tmp_path: Path, way: str, engine: str
) -> None:
    stop, image = tmp_path / "stop", tmp_path / "image"
    with job(site, tmp_path, *WAYS[way], str(program), str(stop)) as process:
        dump = ("pause-and-dump", "starts", "--output", str(image), "--engine", engine)
        report = site.call(*dump, "--json").json()
        assert report["gpu_bytes_reserved"] > 0
        assert process.wait(SECONDS) == DUMPED_EXIT
    stop.touch()
    restored = site.call("restore", str(image)).succeeded()
    assert restored.code == 0


def test_a_program_started_by_the_system_call_itself_is_named_before_the_pause(
    site: Site, program: Path, tmp_path: Path
) -> None:
    raw = compile_program("raw_exec.c", tmp_path / "raw", "-static")
    stop, image = tmp_path / "stop", tmp_path / "image"
    driver = []
    if site.kind == "emulated":
        driver = ["env", f"LD_LIBRARY_PATH={launch.emulated_driver().parent}"]
    with job(site, tmp_path, *driver, str(raw), str(program), str(stop)) as process:
        done = site.call("pause-and-dump", "starts", "--output", str(image))
        assert done.code == Unsupported.exit_code, done.stderr
        assert "which uses the GPU but not through FlowGPU" in done.stderr
        assert not image.exists()
        record = site.registry.find("starts")
        log = site.registry.dir(record.id).coordinator_log.read_text()
        assert "checkpoint: gate" not in log
        stop.touch()
        assert process.wait(SECONDS) == 0


@pytest.fixture(scope="module")
def with_narrow(program: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a job, but for the file that ends it: that program and a 32-bit one."""
    flags = ("-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie", "-fno-stack-protector")
    narrow = compile_program("narrow.c", tmp_path_factory.mktemp("narrow") / "narrow", *flags)
    script = '"$0" "$2" & "$1" "$2" && wait $!'
    return ["/bin/sh", "-c", script, str(narrow), str(program)]


def test_a_job_is_dumped_with_a_32_bit_program(
    site: Site, with_narrow: list[str], tmp_path: Path
) -> None:
    stop, image = tmp_path / "stop", tmp_path / "image"
    with job(site, tmp_path, *with_narrow, str(stop)) as process:
        dump = ("pause-and-dump", "starts", "--output", str(image))
        site.call(*dump, "--leave-running").succeeded()
        shutil.rmtree(image)
        site.call(*dump).succeeded()
        assert process.wait(SECONDS) == DUMPED_EXIT
    stop.touch()
    for _ in range(2):
        restored = site.call("restore", str(image)).succeeded()
        assert "narrow end" in restored.stdout.splitlines()


def test_a_32_bit_program_is_named_where_criu_cannot_dump_it(
    site: Site, with_narrow: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper, stop = tmp_path / "criu", tmp_path / "stop"
    real = Criu.locate().program
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *compat_cr*) exit 1;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("FLOWGPU_CRIU", str(wrapper))
    with job(site, tmp_path, *with_narrow, str(stop)) as process:
        done = site.call("pause-and-dump", "starts", "--output", str(tmp_path / "image"))
        assert done.code == CriuUnsupported.exit_code, done.stderr
        assert re.search(r"a 32-bit program \(process \d+\)", done.stderr)
        stop.touch()
        assert process.wait(SECONDS) == 0


def unfit(folder: Path, kind: str) -> Path:
    """A program into which nothing of ours can be loaded."""
    compiler, flag = ("musl-gcc", "-O2") if kind == "musl" else ("cc", "-fsanitize=address")
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not here")
    source = Path(__file__).parent / "programs" / "waits.c"
    words = [compiler, flag, "-D_GNU_SOURCE", str(source), "-o", str(folder / "waits")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if re.search(r"cannot find \S*libasan", done.stderr):
        pytest.skip("the libraries of AddressSanitizer are not here")
    assert done.returncode == 0, done.stderr
    return folder / "waits"


@pytest.mark.parametrize("first", [True, False], ids=["first", "started"])
@pytest.mark.parametrize("kind", ["asan", "musl"])
def test_a_job_is_dumped_with_a_program_that_takes_no_preloads(
    site: Site, program: Path, tmp_path: Path, kind: str, first: bool
) -> None:
    stop, image, waits = tmp_path / "stop", tmp_path / "image", unfit(tmp_path, kind)
    words = [str(waits), str(stop)]
    if not first:
        script = '"$0" "$2" & "$1" "$2" && wait $!'
        words = ["/bin/sh", "-c", script, str(waits), str(program), str(stop)]
    with job(site, tmp_path, *words, steps=1 if first else STEPS) as process:
        site.call("pause-and-dump", "starts", "--output", str(image)).succeeded()
        assert process.wait(SECONDS) == DUMPED_EXIT
    assert (tmp_path / "errors").read_text().startswith("flowgpu: starts was dumped")
    stop.touch()
    restored = site.call("restore", str(image)).succeeded()
    assert "waits end" in restored.stdout.splitlines()


def test_a_program_that_takes_no_preloads_and_uses_the_gpu_is_named_before_the_pause(
    site: Site, tmp_path: Path
) -> None:
    unfit(tmp_path, "asan")  # or skips
    driver = launch.emulated_driver().parent
    link = (f"-L{driver}", "-l:libcuda.so.1", "-fsanitize=address")
    user = compile_program("user.c", tmp_path / "user", *link)
    stop, words = tmp_path / "stop", [str(user), str(tmp_path / "stop")]
    if site.kind == "emulated":
        words = ["env", f"LD_LIBRARY_PATH={driver}", *words]
    options = "ASAN_OPTIONS=detect_leaks=0:protect_shadow_gap=0"  # both are for the driver
    with job(site, tmp_path, "env", options, *words) as process:
        done = site.call("pause-and-dump", "starts", "--output", str(tmp_path / "image"))
        assert done.code == Unsupported.exit_code, done.stderr
        assert "which uses the GPU but not through FlowGPU" in done.stderr
        stop.touch()
        assert process.wait(SECONDS) == 0
