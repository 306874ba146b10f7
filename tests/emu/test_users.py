"""A job in which a process is another user, to whom the job's folder is closed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flowgpu import errors, launch
from flowgpu.errors import FlowError
from flowgpu.jobs import Registry
from tests.emu.bad_input_cases import NOBODY
from tests.emu.intercept_lib import compile_program
from tests.emu.test_cli_end_to_end import FLOWGPU, end_emulator, flowgpu, read_lines, rest_of

BECOME = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups"


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[Path]:
    """Where everybody finds libraries and program, and the emulated device, as they do a real one.
    What is the job's own in it stays closed."""
    with pytest.MonkeyPatch.context() as patch:
        base = Path(tempfile.mkdtemp(prefix="flowgpu-"))
        built = launch.library_dir()
        for name in ("lib", "bin"):
            unused = shutil.ignore_patterns("*test*")
            shutil.copytree(built.with_name(name), base / name, symlinks=True, ignore=unused)
        patch.setenv("FLOWGPU_LIB", str(base / "lib"))
        patch.setenv("FLOWGPU_RUNTIME_DIR", str(base))
        link = f"-L{launch.emulated_driver().parent}"
        compile_program("user.c", base / "user", link, "-l:libcuda.so.1")
        base.chmod(0o711)
        launch.start_emulator(base)
        launch.emulator_socket(base).chmod(0o777)
        yield base
        end_emulator(launch.emulator_socket(base))
        shutil.rmtree(base)


@contextmanager
def shell_job(script: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A job called `users` that runs a script, with `stop` for the file that ends its programs."""
    words = [*command, *FLOWGPU, "run", "--gpu", "emulated", "--name", "users", "--"]
    with subprocess.Popen(
        [*words, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            flowgpu("kill", "users")
            process.kill()


def refused(error: type[FlowError], output: Path) -> str:
    """What a checkpoint says that ends before the pause."""
    done = flowgpu("pause-and-dump", "users", "--output", output)
    assert done.returncode == error.exit_code, done.stderr
    assert not output.exists()
    log = Registry().dir(Registry().find("users").id).coordinator_log.read_text()
    assert "checkpoint: prepare failed" in log and "checkpoint: gate" not in log
    return next(line for line in done.stderr.splitlines() if line.startswith("Error: "))


def steps(process: subprocess.Popen[str], users: set[int]) -> None:
    """Wait until each of these has made another ten steps."""
    left = dict.fromkeys(users, 10)
    while any(left.values()):
        (line,) = read_lines(process, 1)
        user = int(line.split()[0])
        left[user] = max(left[user] - 1, 0)


def test_a_child_that_uses_the_gpu_as_another_user_is_named_and_runs_on(
    folder: Path, tmp_path: Path
) -> None:
    stop = folder / "stop-child"
    run = f"{folder}/user {stop}"
    script = f"{run} & {BECOME} {run}; code=$?; wait $! && exit $code"
    with shell_job(script) as process:
        steps(process, {0, NOBODY})
        said = refused(errors.Unsupported, tmp_path / "image")
        assert f", which uses the GPU as another user ({NOBODY}), which cannot be" in said
        steps(process, {0, NOBODY})
        stop.touch()
        _, messages = rest_of(process)
    assert (process.returncode, messages) == (0, "")


def test_a_process_that_becomes_another_user_beside_its_memory_is_named_and_runs_on(
    folder: Path, tmp_path: Path
) -> None:
    stop = folder / "stop-changed"
    with shell_job(f"exec {folder}/user {stop} {NOBODY}") as process:
        steps(process, {NOBODY})
        said = refused(errors.Unsupported, tmp_path / "image")
        assert f", which uses the GPU as another user ({NOBODY}), which cannot be" in said
        steps(process, {NOBODY})
        stop.touch()
        _, messages = rest_of(process)
    assert (process.returncode, messages) == (0, "")


@pytest.mark.parametrize(
    ("become", "who"),
    [
        (BECOME, f"user ({NOBODY})"),
        (f"setpriv --regid {NOBODY} --keep-groups", f"group ({NOBODY})"),
    ],
    ids=["user", "group"],
)
def test_a_process_of_another_user_is_named_where_its_limits_may_not_be_asked_for(
    become: str, who: str, folder: Path, tmp_path: Path
) -> None:
    weak = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]
    with shell_job(f"{become} sh -c 'while echo 0; do sleep 0.01; done'; :", *weak) as process:
        steps(process, {0})
        said = refused(errors.MissingCapability, tmp_path / "image")
        assert f" of another {who} needs the capability CAP_SYS_RESOURCE" in said
        steps(process, {0})


def may_ask_for_limits() -> bool:
    """True if this process has CAP_SYS_RESOURCE."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("CapEff:")[1].split()[0], 16) >> 24 & 1 == 1


@pytest.mark.skipif(not may_ask_for_limits(), reason="there is no CAP_SYS_RESOURCE here")
def test_a_process_of_another_user_that_uses_no_gpu_comes_back(
    folder: Path, tmp_path: Path
) -> None:
    stop, image = folder / "stop-other", tmp_path / "image"
    count = f"n=0; until test -e {stop}; do n=$((n+1)); echo $n $(id -u); sleep 0.02; done"
    with shell_job(f"{BECOME} sh -c '{count}'; :") as process:
        lines = read_lines(process, 5)
        done = flowgpu("pause-and-dump", "users", "--output", image)
        assert done.returncode == 0, done.stderr
        lines += rest_of(process)[0].splitlines()
        restore = [*FLOWGPU, "restore", image]
        with subprocess.Popen(
            restore, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as restored:
            lines += read_lines(restored, 5)
            stop.touch()
            rest, messages = rest_of(restored)
        assert restored.returncode == 0, messages
        lines += rest.splitlines()
    assert lines == [f"{n} {NOBODY}" for n in range(1, len(lines) + 1)]
