"""A job with managed memory, or a library's managed variables, is refused by name while they live.

The emulated driver has no such memory; here it has some by another library in front of it, which
is not prepared for replay (for that: tests/emu/test_replay_cases.py).
"""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors, launch
from flowgpu.jobs import Registry
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import emulated_machine, flowgpu, runs

NAME, OTHER_NAME = b"libcuda.so.1\0", b"libreal.so.1\0"
# By ctypes: cuGetProcAddress is the emulated driver's.
PROGRAM = """
import ctypes, sys, time
from pathlib import Path
cuda, folder = ctypes.CDLL("libcuda.so.1"), Path(sys.argv[1])
address, size, context, library = (ctypes.c_uint64() for _ in range(4))
def ok(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
def until(name):
    print("until", name, flush=True)
    while not (folder / name).exists():
        time.sleep(0.01)
ok("cuInit", 0)
ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
ok("cuCtxSetCurrent", context)
ok("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(4096), 1)
until("free")
ok("cuMemFree_v2", address)
text = b".version 7.0 .target sm_80 .address_size 64 .global .align 4 .u32 m;"
ok("cuLibraryLoadData", ctypes.byref(library), text, None, None, 0, None, None, 0)
ok("cuLibraryGetManaged", ctypes.byref(address), ctypes.byref(size), library, b"m")
until("unload")
ok("cuLibraryUnload", library)
until("end")
"""


@pytest.fixture(scope="module", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FlowGPU's, but for the emulated driver."""
    built, base = launch.library_dir(), tmp_path_factory.mktemp("managed")
    shutil.copytree(built, base / "lib", symlinks=True, ignore=shutil.ignore_patterns("*test*"))
    (base / "bin").symlink_to(built.with_name("bin"))
    driver, real = (base / "lib" / "emu" / name for name in ("libcuda.so.1", "libreal.so.1"))
    data = driver.read_bytes()
    assert data.count(NAME) == 1
    real.write_bytes(data.replace(NAME, OTHER_NAME))
    driver.unlink()
    compile_program(
        "managed_driver.c", driver, "-shared", "-fPIC",
        "-Wl,-soname,libcuda.so.1,-rpath,$ORIGIN,--no-as-needed", str(real),
    )  # fmt: skip
    with emulated_machine(FLOWGPU_LIB=str(base / "lib")):
        yield


def refused(job: str, image: Path) -> str:
    """What a checkpoint says that ends before the pause."""
    done = flowgpu("pause-and-dump", job, "--output", image)
    assert done.returncode == errors.Unsupported.exit_code, done.stderr
    log = Registry().dir(Registry().find(job).id).coordinator_log.read_text()
    assert "checkpoint: prepare failed" in log and "checkpoint: gate" not in log
    return done.stderr


def test_managed_memory_and_variables_are_named_before_the_pause(runs: Any, tmp_path: Path) -> None:
    job = runs("managed", [sys.executable, "-c", PROGRAM, str(tmp_path)])
    job.wait_lines(1)
    said = refused(job.name, tmp_path / "image")
    assert re.search(r"memory from cuMemAllocManaged \(process \d+\), which cannot be", said)
    (tmp_path / "free").touch()
    job.wait_lines(2)
    said = refused(job.name, tmp_path / "image")
    assert re.search(r"managed variables of a module \(process \d+\), which cannot be", said)
    assert "cuMemAllocManaged" not in said
    (tmp_path / "unload").touch()
    job.wait_lines(3)
    job.dump(tmp_path / "image")
    assert job.end() == errors.DUMPED_EXIT
    (tmp_path / "end").touch()
    done = flowgpu("restore", tmp_path / "image")
    assert done.returncode == 0, done.stderr
