"""Files that are a job's memory, through the command line: real coordinator, real CRIU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.host.proctree import PROC
from tests.emu.test_cli_end_to_end import (
    flowgpu,
    name,
    read_lines,
    rest_of,
    runtime_dir,
    started,
    until,
)

__all__ = ["name", "runtime_dir"]

# Each value is counted up in a file of another kind; "go" lets it count on.
PROGRAM = """
import ctypes, mmap, os, struct, sys, time
from multiprocessing import shared_memory
folder, shm, go = sys.argv[1:]
posix = ctypes.CDLL("libpthread.so.0", use_errno=True)
posix.sem_open.restype = ctypes.c_void_p
semaphore = posix.sem_open(f"/{shm}-sem".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
assert semaphore
segment = shared_memory.SharedMemory(f"{shm}-seg", create=True, size=4096)
with open(f"{folder}/counters", "w+b") as file:
    file.truncate(4096)
    counters = mmap.mmap(file.fileno(), 4096)
first = os.open(f"{folder}/first", os.O_CREAT | os.O_RDWR)
os.write(first, struct.pack("q", 7))
os.link(f"{folder}/first", f"{folder}/second")
os.unlink(f"{folder}/first")
with open(f"/dev/shm/torch_{os.getpid()}_waits", "wb") as file:
    file.write(b"a batch")

def count():
    posix.sem_post(ctypes.c_void_p(semaphore))
    value = ctypes.c_int()
    posix.sem_getvalue(ctypes.c_void_p(semaphore), ctypes.byref(value))
    for memory in (segment.buf, counters):
        struct.pack_into("q", memory, 0, struct.unpack_from("q", memory, 0)[0] + 1)
    links = [name for name in os.listdir(folder) if name.startswith("link_remap")]
    found = [struct.unpack_from("q", m, 0)[0] for m in (segment.buf, counters)]
    second = struct.unpack("q", open(f"{folder}/second", "rb").read()) == (7,)
    second &= os.pread(first, 8, 0) == struct.pack("q", 7)
    print(value.value, *found, second, os.fstat(first).st_nlink, *links, flush=True)

count()
count()
while not os.path.exists(go):
    time.sleep(0.005)
count()
other = posix.sem_open(f"/{shm}-sem".encode(), 0)
path = f"/dev/shm/torch_{os.getpid()}_waits"
print("by their names", bool(other), open(path, "rb").read(), flush=True)
os.unlink(path)
os.unlink(f"{folder}/counters")
posix.sem_unlink(f"/{shm}-sem".encode())
segment.close()
segment.unlink()
"""
BEFORE = ["2 1 1 True 1", "3 2 2 True 1"]
AFTER = ["4 3 3 True 1", "by their names True b'a batch'"]


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[str]:
    """What names in /dev/shm begin with; none of them is left."""
    prefix = f"flowgpu-test-{os.getpid()}"
    yield prefix
    for path in Path("/dev/shm").glob(f"*{prefix}*"):
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    made.mkdir()
    return made


def command(name: str, folder: Path, shm: str, go: Path) -> list[str]:
    words = [sys.executable, "-c", PROGRAM, str(folder), shm, str(go)]
    return ["run", "--gpu", "emulated", "--name", name, "--", *words]


def restored(image: Path, folder: Path) -> list[str]:
    done = flowgpu("restore", image)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == ["second"]
    return done.stdout.splitlines()


def test_images_of_a_job_that_ran_on_restore_any_number_of_times(
    tmp_path: Path, folder: Path, shm: str, name: str
) -> None:
    go, images = tmp_path / "go", [tmp_path / "image1", tmp_path / "image2"]
    with started(*command(name, folder, shm, go)) as process:
        assert read_lines(process, 2) == BEFORE
        for image in images:
            done = flowgpu("pause-and-dump", name, "--output", image, "--leave-running")
            assert done.returncode == 0, done.stderr
            assert sorted(os.listdir(folder)) == ["counters", "second"]
        go.touch()
        stdout, stderr = rest_of(process)
        assert (stdout.splitlines(), process.returncode) == (AFTER, 0), stderr
    for image in [*images, images[0]]:
        assert restored(image, folder) == AFTER
    # Another machine has none of it, but the folder on a disk that the machines share.
    assert not list(Path("/dev/shm").glob(f"*{shm}*"))


def test_a_failed_dump_leaves_no_link(
    tmp_path: Path, folder: Path, shm: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, image, fault = tmp_path / "go", tmp_path / "image", tmp_path / "fault"
    monkeypatch.setenv("FLOWGPU_FAULT", f"@{fault}")
    with started(*command(name, folder, shm, go)) as process:
        assert read_lines(process, 2) == BEFORE
        for point in ("commit", "criu_hang"):
            fault.write_text(f"{point}:0")
            done = flowgpu("pause-and-dump", name, "--output", image, "--timeout", "5")
            assert done.returncode != 0
            assert sorted(os.listdir(folder)) == ["counters", "second"]
        go.touch()
        assert rest_of(process)[0].splitlines() == AFTER


def test_a_copy_is_not_restored_beside_the_memory_of_a_job_that_has_it(
    tmp_path: Path, folder: Path, shm: str, name: str
) -> None:
    go, image = tmp_path / "go", tmp_path / "image"
    with started(*command(name, folder, shm, go)) as process:
        assert read_lines(process, 2) == BEFORE
        done = flowgpu("pause-and-dump", name, "--output", image)
        assert done.returncode == 0, done.stderr
        rest_of(process)
    hold = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); input()"
    path = f"/dev/shm/{shm}-seg"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE) as other:
        until(lambda: path in (PROC / str(other.pid) / "maps").read_text())
        done = flowgpu("restore", image)
        assert done.returncode == errors.FilesChanged.exit_code
        assert f"{path} is memory of the job, and process {other.pid} has it" in done.stderr
        other.communicate(b"\n")
    go.touch()
    assert restored(image, folder) == AFTER


def test_a_failed_restore_leaves_files_as_they_were(
    tmp_path: Path, folder: Path, shm: str, name: str
) -> None:
    go, image = tmp_path / "go", tmp_path / "image"
    with started(*command(name, folder, shm, go)) as process:
        assert read_lines(process, 2) == BEFORE
        assert flowgpu("pause-and-dump", name, "--output", image).returncode == 0
        rest_of(process)
    segment = Path(f"/dev/shm/{shm}-seg")
    segment.write_bytes(b"another program's")
    (folder / "counters").unlink()
    done = flowgpu("restore", image, env=os.environ | {"FLOWGPU_FAULT": "criu_hang:1"})
    assert done.returncode != 0
    assert segment.read_bytes() == b"another program's"
    assert os.listdir(folder) == ["second"]
    go.touch()
    assert restored(image, folder) == AFTER
