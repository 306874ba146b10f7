"""Choice of the driver and the environment of each process."""

from __future__ import annotations

import socket
import subprocess
import threading
from pathlib import Path

import pytest

from flowgpu import launch
from flowgpu.errors import NoGpu, NotBuilt, StartFailed
from flowgpu.jobs import JobDir
from flowgpu.launch import Driver, Spec
from tests.patience import SECONDS

ELF64 = b"\x7fELF\x02"


def make_driver(path: Path, size: int = launch.SMALLEST_DRIVER, head: bytes = ELF64) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of native libraries that are files and no more, on a machine without a driver."""
    folder = tmp_path / "lib"
    for name in (
        "intercept/libcuda.so.1",
        "libflowgpu_memstub.so",
        "libflowgpu_nccl.so",
        "libflowgpu_exec.so",
        "emu/libcuda.so.1",
        "emu/flowgpu-emud",
    ):
        make_driver(folder / name)
    monkeypatch.setenv("FLOWGPU_LIB", str(folder))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(launch, "DRIVER_FOLDERS", ())
    monkeypatch.setattr(launch, "_loader_cache", lambda _name: [])
    monkeypatch.setattr(launch, "nvidia_device", lambda: "/dev/nvidia0")
    return folder


@pytest.fixture
def nvidia(tmp_path: Path) -> Driver:
    return Driver("nvidia", tmp_path / "drv" / "libcuda.so.1", "")


@pytest.fixture
def emulated(library: Path) -> Driver:
    return Driver("emulated", library / "emu" / "libcuda.so.1", "")


def test_auto_takes_nvidia_where_device_and_driver_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(tmp_path / "usr" / "libcuda.so.1")
    monkeypatch.setattr(launch, "DRIVER_FOLDERS", (str(driver.parent),))
    chosen = launch.choose_driver("auto")
    assert (chosen.kind, chosen.libcuda) == ("nvidia", driver)


@pytest.mark.parametrize("missing", ["device", "libcuda"])
def test_auto_takes_the_emulated_gpu_where_one_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    if missing == "device":
        driver = make_driver(tmp_path / "usr" / "libcuda.so.1")
        monkeypatch.setattr(launch, "DRIVER_FOLDERS", (str(driver.parent),))
        monkeypatch.setattr(launch, "nvidia_device", lambda: None)
    chosen = launch.choose_driver("auto")
    assert (chosen.kind, chosen.libcuda) == ("emulated", library / "emu/libcuda.so.1")
    assert missing in chosen.reason
    with pytest.raises(NoGpu, match=missing):
        launch.choose_driver("nvidia")


def test_the_driver_is_found_in_the_order_of_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_driver(tmp_path / name / "libcuda.so.1") for name in ("env", "cache", "known")]
    monkeypatch.setenv("LD_LIBRARY_PATH", f":/nowhere:{paths[0].parent}")
    monkeypatch.setattr(launch, "_loader_cache", lambda _name: [paths[1]])
    monkeypatch.setattr(launch, "DRIVER_FOLDERS", (str(paths[2].parent),))
    for path in paths:
        assert launch.find_nvidia_libcuda() == path
        path.unlink()
    assert launch.find_nvidia_libcuda() is None


def test_our_own_libraries_stubs_and_32_bit_drivers_are_not_nvidias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    stub = make_driver(tmp_path / "stub" / "libcuda.so.1", size=70000)
    narrow = make_driver(tmp_path / "narrow" / "libcuda.so.1", head=b"\x7fELF\x01")
    linked = tmp_path / "linked" / "libcuda.so.1"
    linked.parent.mkdir()
    linked.symlink_to(library / "emu" / "libcuda.so.1")
    ours = library / "intercept" / "libcuda.so.1"
    monkeypatch.setattr(launch, "_loader_cache", lambda _name: [stub, narrow, linked, ours])
    assert launch.find_nvidia_libcuda() is None


def test_the_loader_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = launch._loader_cache("libc.so.6")
    assert found
    assert all(path.name == "libc.so.6" and path.exists() for path in found)
    assert launch._loader_cache("libnothing-at-all.so.1") == []


def test_what_is_not_built_is_named(library: Path) -> None:
    (library / "emu" / "flowgpu-emud").unlink()
    with pytest.raises(NotBuilt, match="flowgpu-emud"):
        launch.emulator_daemon()


def test_libraries_come_from_the_checkout_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWGPU_LIB")
    assert launch.library_dir() == Path(__file__).resolve().parents[2] / "build" / "lib"


def test_an_installed_package_has_its_libraries_inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLOWGPU_LIB")
    monkeypatch.setattr(launch, "PACKAGE", tmp_path / "site-packages" / "flowgpu")
    assert launch.library_dir() == tmp_path / "site-packages" / "flowgpu" / "lib"


def ours(library: Path) -> str:
    names = ("memstub", "nccl", "exec")
    behind = [f"{library}/libflowgpu_{name}.so" for name in names]
    return ":".join([f"{library}/intercept/libcuda.so.1", *behind])


def test_a_task_gets_the_shim_and_the_driver(nvidia: Driver, library: Path, tmp_path: Path) -> None:
    job = JobDir(tmp_path / "job")
    env = launch.task_env({"HOME": "/root"}, nvidia, job, tmp_path)
    assert env == {
        "HOME": "/root",
        "LD_PRELOAD": ours(library),
        "FLOWGPU_REAL_LIBCUDA": str(nvidia.libcuda),
        "FLOWGPU_SOCKET": str(job.task_socket),
        "FLOWGPU_REPLAY": "1",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
    }
    native = launch.task_env({"HOME": "/root"}, nvidia, job, tmp_path, "native")
    assert env == {**native, "FLOWGPU_REPLAY": "1"}


def test_what_the_user_wants_of_nccl_stays(nvidia: Driver, tmp_path: Path) -> None:
    env = launch.task_env({"NCCL_RAS_ENABLE": "1"}, nvidia, JobDir(tmp_path), tmp_path)
    assert (env["NCCL_RAS_ENABLE"], env["NCCL_CUMEM_HOST_ENABLE"]) == ("1", "0")


@pytest.mark.parametrize("theirs", ["/a.so:/b.so", "/a.so /b.so"])
def test_the_users_preloads_come_before_ours(
    theirs: str, nvidia: Driver, library: Path, tmp_path: Path
) -> None:
    env = launch.task_env({"LD_PRELOAD": theirs}, nvidia, JobDir(tmp_path), tmp_path)
    assert env["LD_PRELOAD"] == f"/a.so:/b.so:{ours(library)}"


def test_what_is_set_for_python_is_the_jobs_alone(nvidia: Driver, tmp_path: Path) -> None:
    set_for_it = {"PYTHONPATH": "/theirs", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}
    where_it_is = {"PYTHONHOME": "/python"}
    user = {**set_for_it, **where_it_is}
    task = launch.task_env(user, nvidia, JobDir(tmp_path), tmp_path)
    assert {key: task[key] for key in user} == user
    for env in (launch.coordinator_env(user), launch.ghost_env(user, nvidia, tmp_path)):
        ours = {key: value for key, value in env.items() if key.startswith("PYTHON")}
        assert ours == {**where_it_is, "PYTHONPATH": str(launch.PACKAGE.parent)}
        assert "FLOWGPU_PACKAGES" in env
    assert "FLOWGPU_PACKAGES" not in task


def test_an_emulated_task_finds_the_device(emulated: Driver, library: Path, tmp_path: Path) -> None:
    env = launch.task_env({}, emulated, JobDir(tmp_path), tmp_path)
    assert env["FLOWGPU_REAL_LIBCUDA"] == str(library / "emu/libcuda.so.1")
    assert env["FLOWGPU_EMU_SOCKET"] == str(launch.emulator_socket(tmp_path))
    assert env["FLOWGPU_EMUD"] == str(library / "emu/flowgpu-emud")
    assert "LD_LIBRARY_PATH" not in env


def test_a_job_inside_a_job_is_launched_as_if_outside(
    nvidia: Driver, emulated: Driver, tmp_path: Path
) -> None:
    user = {"PATH": "/bin", "LD_PRELOAD": "/a.so"}
    outer = launch.task_env(user, emulated, JobDir(tmp_path / "outer"), tmp_path, "replay")
    assert outer["FLOWGPU_REPLAY"] == "1"
    job = JobDir(tmp_path / "inner")
    assert launch.task_env(outer, nvidia, job, tmp_path) == launch.task_env(
        user, nvidia, job, tmp_path
    )
    # Who has set them for NCCL is not known inside.
    assert launch.clean_env(outer) == user | launch.FOR_NCCL


def test_the_ghost_gets_the_driver_first_and_no_preload(nvidia: Driver, tmp_path: Path) -> None:
    user = {"LD_LIBRARY_PATH": "/opt/lib", "LD_PRELOAD": "/a.so"}
    env = launch.ghost_env(user, nvidia, tmp_path)
    assert env["LD_LIBRARY_PATH"] == f"{nvidia.libcuda.parent}:/opt/lib"
    assert env["FLOWGPU_REAL_LIBCUDA"] == str(nvidia.libcuda)
    assert "LD_PRELOAD" not in env
    assert env["FLOWGPU_SOCKET"] == "", "a job in which the command runs would hand its own on"


def test_the_ghost_of_an_emulated_job_finds_the_device(emulated: Driver, tmp_path: Path) -> None:
    env = launch.ghost_env({}, emulated, tmp_path)
    assert env["LD_LIBRARY_PATH"] == str(emulated.libcuda.parent)
    assert env["FLOWGPU_EMU_SOCKET"] == str(launch.emulator_socket(tmp_path))


def test_a_spec_comes_back_as_it_was_sent() -> None:
    spec = Spec(
        kind="run",
        id="0" * 12,
        name="n",
        command=["a", "b"],
        cwd="/",
        gpu="nvidia",
        job_dir="/j",
        env={"K": "\udcff"},  # a byte that is no UTF-8, as os.environ shows it
        ghost_env={},
    )
    assert Spec.from_json(spec.to_json()) == spec
    with pytest.raises(TypeError):
        Spec.from_json(spec.to_json()[:-1] + b', "color": 1}')


def test_answers_tells_a_listener_from_what_it_left(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert not launch.answers(path)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(str(path))
            listener.listen()
            assert launch.answers(path)
        assert not launch.answers(path)
        path.unlink()


def fake_daemon(library: Path, body: str) -> None:
    program = library / "emu" / "flowgpu-emud"
    program.write_text(f"#!/usr/bin/env python3\n{body}")
    program.chmod(0o755)


SERVE = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[2])
listener.listen()
print(sys.argv[1], sys.argv[3], os.getsid(0) == os.getpid(), flush=True)
if os.fork() == 0:
    listener.settimeout(300)
    while listener.accept()[0].recv(1) == b"":
        pass
"""


def test_the_emulated_device_is_started_once_in_its_own_session(
    library: Path, runtime_dir: Path
) -> None:
    fake_daemon(library, SERVE)
    threads = [
        threading.Thread(target=launch.start_emulator, args=(runtime_dir,)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        launch.start_emulator(runtime_dir)
        log = runtime_dir / "flowgpu-emud.log"
        assert log.read_text() == "--socket --background True\n"
        assert log.stat().st_mode & 0o777 == 0o600
    finally:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ending:
            ending.connect(str(launch.emulator_socket(runtime_dir)))
            ending.sendall(b"x")


def test_an_emulated_device_that_does_not_start_is_reported(
    library: Path, runtime_dir: Path
) -> None:
    fake_daemon(library, "raise SystemExit('no memory')")
    with pytest.raises(StartFailed, match=r"flowgpu-emud\.log"):
        launch.start_emulator(runtime_dir)
    assert "no memory" in (runtime_dir / "flowgpu-emud.log").read_text()


def test_the_coordinator_is_started_apart_from_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the spec, has its own session, and not the user's folder for modules."""
    package = tmp_path / "code" / "coordinator"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "spec = os.fdopen(int(sys.argv[sys.argv.index('--spec-fd') + 1]), 'rb').read()\n"
        "print(len(spec), os.getsid(0) == os.getpid(), os.getcwd(), sys.flags.safe_path)\n"
        "print(os.environ.get('LD_PRELOAD'), sys.stdin.read() == '')\n"
    )
    monkeypatch.setattr(launch, "PACKAGE", tmp_path / "code" / "flowgpu")
    monkeypatch.setenv("LD_PRELOAD", "")
    job = tmp_path / "job"
    job.mkdir()
    spec = Spec("run", "0" * 12, "n", ["true"], "/", "nvidia", str(job), {}, {})
    process: subprocess.Popen[bytes] = launch.start_coordinator(spec)
    assert process.wait(SECONDS) == 0
    log = JobDir(job).coordinator_log
    assert log.read_text() == f"{len(spec.to_json())} True / True\nNone True\n"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("first_line", "shell"),
    [
        ("#!/bin/sh", True),
        ("#! /usr/bin/bash -e", True),
        ("#!/usr/bin/env zsh", True),
        ("#!/usr/bin/env -S bash -e", True),
        ("#!/usr/bin/env python3", False),
        ("#!/opt/bin/python bash", False),
        ("#!/usr/bin/env", False),
        ("#!", False),
        ("echo from no script", False),
    ],
)
def test_scripts_of_shells_are_known_by_their_first_line(
    first_line: str, shell: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text(first_line + "\n")
    assert launch.is_shell(str(script)) == shell
    script.rename(tmp_path / "dash")
    assert launch.is_shell(str(tmp_path / "dash")) == (shell or not first_line.startswith("#!"))
    assert not launch.is_shell(str(tmp_path / "missing"))
