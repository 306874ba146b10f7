"""However a program finds the driver, it finds the intercept library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu.jobs import JobDir
from flowgpu.launch import choose_driver, emulated_driver, intercept_library, task_env
from tests.emu import intercept_lib as lib
from tests.emu.intercept_lib import WINDOW, WINDOW_BYTES, Coordinator
from tests.patience import SECONDS

PER_THREAD = 2
ROUTES = [
    ["linked"],
    ["dlsym"],
    ["deepbind"],
    *(
        [route, str(version), str(flags)]
        for route in ("proc", "proc_v2")
        for version in (11030, 12000, 13000)
        for flags in (0, 1, PER_THREAD)
    ),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """routes.c, linked with the driver or not."""
    folder = tmp_path_factory.mktemp("programs")
    link = f"-L{emulated_driver().parent}"
    return {
        False: lib.compile_program("routes.c", folder / "routes"),
        True: lib.compile_program(
            "routes.c", folder / "linked", "-DLINKED", link, "-l:libcuda.so.1"
        ),
    }


# A library of the user's that counts calls on their way to the driver, as tracers and quotas do.
TRACER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <cuda.h>
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    __typeof__(&cuMemAlloc_v2) next = (__typeof__(next))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    fprintf(stderr, "traced %zu\\n", bytes);
    return next(address, bytes);
}
"""


def build_tracer(folder: Path) -> Path:
    """TRACER, linked with the driver, which a loader finds first by its own path."""
    output = folder / "libtracer.so"
    words = ["cc", "-shared", "-fPIC", "-isystem", lib.cuda_include(), "-x", "c", "-", "-o", output]
    folder_of_driver = emulated_driver().parent
    link = ["-x", "none", "-Wl,--no-as-needed", emulated_driver(), f"-Wl,-rpath,{folder_of_driver}"]
    subprocess.run([str(word) for word in [*words, *link]], input=TRACER, text=True, check=True)
    return output


def in_window(address: int) -> bool:
    return WINDOW <= address < WINDOW + WINDOW_BYTES


def run_route(program: Path, route: list[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [str(program), *route],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_route_leads_through_the_library(
    route: list[str], programs: dict[bool, Path], tmp_path: Path
) -> None:
    program = programs[route == ["linked"]]
    environment = lib.bare_environment(tmp_path)
    bare = subprocess.run(
        [str(program), *route],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert bare.returncode == 0 and not in_window(int(bare.stdout, 16)), bare.stderr
    with (
        Coordinator(tmp_path / "task.sock") as coordinator,
        run_route(program, route, lib.intercepted(environment, tmp_path)) as process,
    ):
        task = coordinator.accept()
        assert process.stdout
        assert in_window(int(process.stdout.readline(), 16))
        assert (task.hello.pid, task.page.allocation_bytes) == (process.pid, 1 << 20)
        output, errors = process.communicate(timeout=SECONDS)
        assert (output, errors, process.returncode) == ("", "", 0)


@pytest.mark.parametrize("tags", ["--disable-new-dtags", "--enable-new-dtags"])
def test_a_path_in_the_program_does_not_lead_past_the_library(tags: str, tmp_path: Path) -> None:
    """RPATH, which comes before LD_LIBRARY_PATH, and RUNPATH, to the driver's folder."""
    folder = emulated_driver().parent
    options = ["-DLINKED", f"-L{folder}", "-l:libcuda.so.1", f"-Wl,{tags},-rpath,{folder}"]
    program = lib.compile_program("routes.c", tmp_path / "routes", *options)
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    with (
        Coordinator(tmp_path / "task.sock") as coordinator,
        run_route(program, ["linked"], environment) as process,
    ):
        coordinator.accept()
        assert process.stdout and in_window(int(process.stdout.readline(), 16))
        process.communicate(timeout=SECONDS)


def test_a_library_of_the_users_is_called_before_the_driver_as_without_us(
    programs: dict[bool, Path], tmp_path: Path
) -> None:
    bare = lib.bare_environment(tmp_path) | {"LD_PRELOAD": str(build_tracer(tmp_path))}
    with run_route(programs[True], ["linked"], bare) as process:
        output, said = process.communicate(timeout=SECONDS)
    assert (in_window(int(output, 16)), said) == (False, "traced 1048576\n")
    preload = task_env(bare, choose_driver("emulated"), JobDir(tmp_path), tmp_path)["LD_PRELOAD"]
    environment = lib.intercepted(bare, tmp_path) | {"LD_PRELOAD": preload}
    with (
        Coordinator(tmp_path / "task.sock") as coordinator,
        run_route(programs[True], ["linked"], environment) as process,
    ):
        coordinator.accept()
        assert process.stdout and in_window(int(process.stdout.readline(), 16))
        assert process.communicate(timeout=SECONDS) == ("", said)


def test_the_bindings_of_python_lead_through_the_library(tmp_path: Path) -> None:
    with lib.job(tmp_path) as (_, program, task):
        assert in_window(program.do("int(ok(cu.cuMemAlloc(1 << 20)))"))
        assert task.page.allocation_bytes == 1 << 20


def test_the_drivers_own_path_goes_past_the_library(
    programs: dict[bool, Path], tmp_path: Path
) -> None:
    """A limit: such memory is the driver's, and no coordinator hears of the process."""
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    with Coordinator(tmp_path / "task.sock") as coordinator:
        done = subprocess.run(
            [str(programs[False]), "path", str(emulated_driver())],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0 and not in_window(int(done.stdout, 16)), done.stderr
        coordinator.listener.settimeout(0.3)
        with pytest.raises(TimeoutError):
            coordinator.accept()


@pytest.mark.parametrize(
    "command",
    [["ls", "/proc/self/fd"], ["sh", "-c", "ls /proc/self/fd; grep Threads /proc/self/status"]],
    ids=["ls", "sh"],
)
def test_programs_that_do_not_use_cuda_do_not_notice(command: list[str], tmp_path: Path) -> None:
    environment = lib.bare_environment(tmp_path)
    with Coordinator(tmp_path / "task.sock") as coordinator:
        bare, preloaded = (
            subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
            for env in (environment, lib.intercepted(environment, tmp_path))
        )
        assert (bare.returncode, preloaded.returncode, preloaded.stderr) == (0, 0, "")
        assert bare.stdout == preloaded.stdout
        coordinator.listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            coordinator.accept()
    assert not (tmp_path / "device.log").exists()


def test_loading_the_driver_alone_starts_nothing(tmp_path: Path) -> None:
    source = (
        "import ctypes, os; ctypes.CDLL('libcuda.so.1').cuDriverGetVersion;"
        "print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    )
    environment = lib.bare_environment(tmp_path)
    bare, preloaded = (
        subprocess.run(
            [sys.executable, "-c", source],
            env=env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        for env in (environment, lib.intercepted(environment, tmp_path))
    )
    assert preloaded.stdout == bare.stdout and preloaded.stderr == ""


def test_a_driver_that_is_not_there_is_no_device(
    programs: dict[bool, Path], tmp_path: Path
) -> None:
    environment = lib.intercepted(lib.bare_environment(tmp_path), tmp_path)
    environment["FLOWGPU_REAL_LIBCUDA"] = str(tmp_path / "libcuda.so.1")
    done = subprocess.run(
        [str(programs[False]), "dlsym"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (1, "dlsym: 100\n")


WHOSE = """
import ctypes, os
class Found(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), *((n, ctypes.c_void_p) for n in ("at", "name", "start"))]
def whose(name):
    function, found = ctypes.c_void_p(), Found()
    zero = ctypes.c_uint64(0)
    assert libcuda().cuGetProcAddress_v2(name, ctypes.byref(function), 13000, zero, None) == 0
    assert ctypes.CDLL(None).dladdr(function, ctypes.byref(found))
    return found.file.decode()
"""


@pytest.mark.parametrize("replay", [False, True])
def test_a_function_that_ours_only_passes_on_is_the_drivers_own(
    replay: bool, tmp_path: Path
) -> None:
    """But where handles are exchanged."""
    with lib.job(tmp_path, replay=replay) as (_, program, _):
        program.do(WHOSE)
        ours, drivers = str(intercept_library()), str(emulated_driver())
        assert program.do("whose(b'cuCtxGetDevice')") == (ours if replay else drivers)
        assert program.do("whose(b'cuCtxSynchronize')") == ours
