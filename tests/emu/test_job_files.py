"""What a restore does with the files that a job writes: real coordinator, real CRIU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.host.criu import Criu
from flowgpu.image import layout
from flowgpu.image.manifest import Manifest
from flowgpu.jobs import Registry
from flowgpu.start import kill_coordinator
from tests.emu.bad_input_cases import OWN, another_build, build_own
from tests.emu.test_cli_end_to_end import (
    SECONDS,
    flowgpu,
    numbers,
    read_lines,
    rest_of,
    runtime_dir,
    started,
    until,
)

__all__ = ["runtime_dir"]

# Opened each in a way of its own; every number goes to every file.
WRITER = """
import ctypes, mmap, os, sys, time
folder, stop = sys.argv[1:]
os.chdir(folder)
open("update", "w").write("head\\n")
update = open("update", "r+")
update.seek(5)
files = [open("append", "a"), open("both", "a+"), open("plain", "w"), update]
source = open("source")
with open("mapped", "r+b") as file:  # Python's own mmap keeps the file open
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    both = mmap.PROT_READ | mmap.PROT_WRITE
    view = libc.mmap(None, ctypes.c_size_t(4096), both, mmap.MAP_SHARED, file.fileno(), 0)
n = 0
while not os.path.exists(stop):
    for file in files:
        file.write(f"{n}\\n")
        file.flush()
    ctypes.memset(view + n % 4096, 0, 1)  # is written to, and stays as it was
    print(n, flush=True)
    n += 1
    time.sleep(0.01)
"""
HEADS = {"append": "", "both": "", "plain": "", "update": "head\n"}


@dataclass
class Job:
    """A job of WRITER of which there is an image; it ran on, and then was ended."""

    folder: Path
    image: Path
    stop: Path
    after: dict[str, bytes]  # its files then

    def reset(self) -> None:
        """Everything as it was then."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, data in self.after.items():
            (self.folder / name).write_bytes(data)
        for path in self.parts():
            shutil.rmtree(path)
        self.stop.unlink(missing_ok=True)

    def parts(self) -> list[Path]:
        """Folders with what was cut, the oldest first."""
        return sorted(self.image.parent.glob(f"{self.image.name}.cut-*"))

    def state(self) -> dict[str, tuple[bytes, int, int]]:
        """Bytes, inode and time of each file."""
        found = {}
        for path in sorted(self.folder.iterdir()):
            about = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            found[path.name] = data, about.st_ino, about.st_mtime_ns
        return found

    def lines(self, name: str) -> list[str]:
        """What was written to a file of HEADS."""
        text = (self.folder / name).read_text()
        assert text.startswith(HEADS[name])
        return text.removeprefix(HEADS[name]).splitlines()


@pytest.fixture(scope="module")
def dumped(runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_image("writer", tmp_path_factory.mktemp("job"))


def make_image(name: str, folder: Path, *options: str) -> Job:
    """An image that `flowgpu checkpoint` takes of a new job."""
    files, store, stop = folder / "files", folder / "store", folder / "stop"
    files.mkdir()
    (files / "source").write_text("read\n")
    (files / "mapped").write_bytes(bytes(4096))  # what the job makes itself is in the image
    words = [sys.executable, "-c", WRITER, str(files), str(stop)]
    with started("run", "--gpu", "emulated", "--name", name, "--", *words) as process:
        read_lines(process, 5)
        once = ("--store", store, "--every", "60", "--count", "1")
        done = flowgpu("checkpoint", name, *once, *options)
        assert done.returncode == 0, done.stderr
        read_lines(process, 20)
        assert flowgpu("kill", name).returncode == 0
        rest_of(process)
    (image,) = store.glob("0*")
    return Job(files, image, stop, {path.name: path.read_bytes() for path in files.iterdir()})


@pytest.fixture
def job(dumped: Job) -> Iterator[Job]:
    dumped.reset()
    yield dumped
    flowgpu("kill", "writer")


def restored(job: Job, *options: str) -> dict[str, Any]:
    """The report of a restore, after which the job has run on to its end."""
    with started("restore", str(job.image), "--json", *options) as process:
        read_lines(process, 3)
        job.stop.touch()
        _, messages = rest_of(process)
    assert process.returncode == 0, messages
    report = next(line for line in messages.splitlines() if line.startswith("{"))
    return dict(json.loads(report))


def refused(job: Job, *options: str, env: dict[str, str] | None = None) -> str:
    """What a restore says that changes nothing."""
    before = job.state()
    done = flowgpu("restore", job.image, *options, env={**os.environ, **(env or {})})
    assert job.state() == before
    assert job.parts() == []
    assert done.stdout == ""
    code = errors.RestoreFailed.exit_code if env else errors.FilesChanged.exit_code
    assert done.returncode == code, done.stderr
    assert Registry().find("writer").state == "dumped"
    return next(line for line in done.stderr.splitlines() if line.startswith("Error: "))


def test_files_that_grew_are_cut_back_and_the_job_goes_on_in_them(job: Job) -> None:
    sizes = {name: len(job.after[name]) for name in HEADS}
    for round_ in (1, 2):
        report = restored(job)
        folder = Path(report["cut_folder"])
        assert folder == job.parts()[-1] and len(job.parts()) == round_
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        index = json.loads((folder / "index.json").read_text())
        cut = {Path(file["path"]).name: file for file in report["cut_files"]}
        assert set(cut) == set(HEADS)
        for row in index["files"]:
            name = Path(row["path"]).name
            said = cut[name]
            assert (said["path"], said["bytes"]) == (row["path"], row["bytes_at_dump"])
            assert row["bytes_found"] == sizes[name] == said["bytes"] + said["cut_bytes"]
            part = (folder / row["part"]).read_bytes()
            # What ran on before is what is in the parts.
            if round_ == 1:
                assert part == job.after[name][said["bytes"] :]
            assert len(part) == said["cut_bytes"] > 0
        for name in HEADS:
            lines = job.lines(name)
            assert lines == numbers(0, len(lines)), name
            assert len(lines) > 8
        sizes = {name: (job.folder / name).stat().st_size for name in HEADS}
        job.stop.unlink()
    assert flowgpu("verify", job.image).returncode == 0


def test_files_are_cut_when_the_image_is_packed(runtime_dir: Path, tmp_path: Path) -> None:
    job = make_image("packed", tmp_path, "--compress")
    assert Manifest.load(job.image).version == layout.PACKED_VERSION
    assert len(restored(job)["cut_files"]) == len(HEADS)
    assert all(job.lines(name) == numbers(0, len(job.lines(name))) for name in HEADS)


def test_a_restore_says_what_it_has_cut(job: Job) -> None:
    done = flowgpu("restore", job.image, "--detach")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("cut ")]
    assert len(said) == len(HEADS)
    assert any(f" {job.folder / 'append'} by " in line for line in said)
    (folder,) = job.parts()
    assert f"what was cut is in {folder}\n" in done.stdout


def test_files_as_they_were_are_left_alone(job: Job) -> None:
    restored(job)
    index = json.loads((job.parts()[0] / "index.json").read_text())
    job.reset()
    for row in index["files"]:
        os.truncate(row["path"], row["bytes_at_dump"])
    report = restored(job, "--files", "refuse")
    assert (report["cut_folder"], report["cut_files"], job.parts()) == (None, [], [])
    assert all(job.lines(name) == numbers(0, len(job.lines(name))) for name in HEADS)


def test_grown_files_are_refused_when_asked_for_and_all_are_named(job: Job) -> None:
    said = refused(job, "--files", "refuse")
    for name in HEADS:
        assert f"{job.folder / name} has {len(job.after[name])} bytes and had " in said


def missing(path: Path) -> None:
    path.unlink()


def shrunk(path: Path) -> None:
    os.truncate(path, 1)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def other(path: Path) -> None:
    """Other bytes, as many."""
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("append", other, "{path} was changed in its first "),
        ("plain", other, "{path} was changed in its first "),
        ("mapped", other, "{path} was changed; "),
        ("append", missing, "{path} is missing"),
        ("source", missing, "{path} is missing"),
        ("mapped", missing, "{path} is missing"),
        ("append", shrunk, "{path} has 1 bytes and had "),
        ("plain", shrunk, "{path} has 1 bytes and had "),
        ("plain", folder, "{path} is no regular file any more"),
        ("append", linked, ", and is a link now"),
        ("source", longer, "{path} has 9 bytes and had 5, and the job only read it"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:12]),
)
def test_a_file_that_is_not_as_it_was_is_named_and_none_is_cut(
    job: Job, name: str, change: Any, words: str
) -> None:
    path = job.folder / name
    change(path)
    expected = words.format(path=path)
    assert expected in refused(job).replace(".", "; ")


def test_a_file_that_was_mapped_for_writing_is_cut(job: Job) -> None:
    longer(job.folder / "mapped")
    report = restored(job)
    cut = {Path(file["path"]).name: file["cut_bytes"] for file in report["cut_files"]}
    assert cut["mapped"] == 4
    assert (job.folder / "mapped").stat().st_size == 4096


@contextlib.contextmanager
def holding(code: str, path: Path) -> Iterator[int]:
    """Process id of a program that has the file in its hands."""
    words = [sys.executable, "-c", f"import mmap, sys\n{code}\nprint(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        [*words, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.communicate(timeout=SECONDS)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("file = open(sys.argv[1], 'a')", "has it open for writing"),
        (
            "file = open(sys.argv[1], 'rb')\n"
            "view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
            "file.close()",
            "has it mapped",
        ),
    ],
    ids=["writer", "mapping"],
)
def test_a_file_that_another_process_uses_is_not_cut(job: Job, code: str, how: str) -> None:
    with holding(code, job.folder / "plain") as pid:
        said = refused(job)
    path = job.folder / "plain"
    assert f"{path} has {len(job.after['plain'])} bytes and had " in said
    assert f", and process {pid} {how}" in said
    assert str(job.folder / "append") not in said


def test_a_file_that_another_process_reads_is_cut(job: Job) -> None:
    with holding("file = open(sys.argv[1])", job.folder / "plain"):
        assert len(restored(job)["cut_files"]) == len(HEADS)


def test_a_restore_that_fails_after_the_cut_puts_everything_back(job: Job) -> None:
    log = Registry().dir(Registry().find("writer").id).coordinator_log
    before = log.read_text()
    said = refused(job, env={"FLOWGPU_FAULT": "criu_restore:1"})
    assert "fault injected at criu_restore" in said
    assert f"cut {len(HEADS)} files back" in log.read_text().removeprefix(before)
    assert len(restored(job)["cut_files"]) == len(HEADS)


def test_after_a_restore_that_was_killed_the_next_one_works(job: Job, tmp_path: Path) -> None:
    slow = tmp_path / "criu"
    slow.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "if sys.argv[1] == 'restore':\n"
        f"    open({str(tmp_path / 'begun')!r}, 'w')\n"
        "    time.sleep(1000)\n"
        f"os.execv({str(Criu.locate().program)!r}, sys.argv)\n"
    )
    slow.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWGPU_CRIU", str(slow))
        with started("restore", str(job.image)) as process:
            until((tmp_path / "begun").exists)
            kill_coordinator(Registry().dir(Registry().find("writer").id))
            rest_of(process)
    assert process.returncode == errors.CoordinatorGone.exit_code
    (parts,) = job.parts()
    assert restored(job)["cut_files"] == []
    assert job.parts() == [parts]
    for row in json.loads((parts / "index.json").read_text())["files"]:
        name = Path(row["path"]).name
        assert job.after[name].endswith((parts / row["part"]).read_bytes())
        assert job.lines(name) == numbers(0, len(job.lines(name)))


# Changes its database for as long as it may, and is to be dumped in a transaction or between two.
DATABASE = """
import os, sqlite3, sys, time
path, mode, when, stop = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
database.execute(f"pragma journal_mode={mode}")
database.execute("pragma cache_size=10")  # so that a transaction writes before its end
database.execute("create table rows (n integer primary key, data blob)")
n = 0
while not os.path.exists(stop):
    database.execute("begin")
    for _ in range(20):
        database.execute("insert into rows values (?, randomblob(3000))", (n,))
        n += 1
    database.execute("update rows set data = zeroblob(3000) where n % 7 = 0")
    if when == "within":
        print(n, flush=True)
        time.sleep(0.2)
    database.execute("commit")
    if when == "between":
        print(n, flush=True)
        time.sleep(0.2)
(count,) = database.execute("select count(*) from rows").fetchone()
print(*database.execute("pragma integrity_check").fetchone(), count == n, flush=True)
"""


@contextlib.contextmanager
def database_job(folder: Path, mode: str, when: str) -> Iterator[subprocess.Popen[str]]:
    words = [str(folder / "data"), mode, when, str(folder / "stop")]
    command = [sys.executable, "-c", DATABASE, *words]
    with started("run", "--gpu", "emulated", "--name", "database", "--", *command) as process:
        try:
            read_lines(process, 2)
            yield process
        finally:
            flowgpu("kill", "database")


def is_whole(folder: Path) -> bool:
    with contextlib.closing(sqlite3.connect(folder / "data")) as database:
        rows = database.execute("select n from rows order by n").fetchall()
        check = database.execute("pragma integrity_check").fetchone()
    return check == ("ok",) and rows == [(n,) for n in range(len(rows))]


@pytest.mark.parametrize("when", ["within", "between"])
@pytest.mark.parametrize("mode", ["delete", "persist", "wal"])
def test_a_database_that_its_job_went_on_with_is_never_damaged(
    runtime_dir: Path, tmp_path: Path, mode: str, when: str
) -> None:
    image = tmp_path / "image"
    with database_job(tmp_path, mode, when) as process:
        done = flowgpu("pause-and-dump", "database", "--output", image, "--leave-running")
        assert done.returncode == 0, done.stderr
        # Two more than were said by now: the others may be of before the image.
        log = Registry().dir(Registry().find("database").id).output_log
        read_lines(process, log.read_text().count("\n"))
        assert flowgpu("kill", "database").returncode == 0
        rest_of(process)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("data*")}
    (tmp_path / "stop").touch()
    done = flowgpu("restore", image)
    if mode == "wal" and done.returncode == 0:
        # All has only grown, but for what is mapped, which the image has.
        assert done.stdout.splitlines()[-1] == "ok True"
    else:
        assert done.returncode == errors.FilesChanged.exit_code, done.stderr
        assert f"{tmp_path / 'data'}" in done.stderr
        assert {path.name: path.read_bytes() for path in tmp_path.glob("data*")} == before
    assert is_whole(tmp_path)


@pytest.mark.parametrize("when", ["within", "between"])
@pytest.mark.parametrize("mode", ["delete", "persist", "wal"])
def test_a_database_as_it_was_is_gone_on_with_and_only_once(
    runtime_dir: Path, tmp_path: Path, mode: str, when: str
) -> None:
    image = tmp_path / "image"
    with database_job(tmp_path, mode, when) as process:
        done = flowgpu("pause-and-dump", "database", "--output", image)
        assert done.returncode == 0, done.stderr
        rest_of(process)
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in tmp_path.glob("data*"):
        shutil.copy(path, kept)  # without times, as for another machine
    for _ in range(2):
        with started("restore", str(image)) as process:
            read_lines(process, 2)
            (tmp_path / "stop").touch()
            out, messages = rest_of(process)
        assert (process.returncode, out.splitlines()[-1:]) == (0, ["ok True"]), messages
        assert is_whole(tmp_path)
        (tmp_path / "stop").unlink()
        done = flowgpu("restore", image)
        assert done.returncode == errors.FilesChanged.exit_code, done.stderr
        assert is_whole(tmp_path)
        for path in tmp_path.glob("data*"):
            if not (kept / path.name).exists():
                path.unlink()
        for path in kept.iterdir():
            shutil.copy(path, tmp_path)  # into the same file: SQLite writes to no other


# Says what its library answers.
ASKS = """
import ctypes, os, sys, time
library = ctypes.CDLL(sys.argv[1])
while not os.path.exists(sys.argv[2]):
    print(library.answer(), flush=True)
    time.sleep(0.02)
"""


def test_a_library_that_was_rebuilt_is_named_and_the_image_restores_once_it_is_back(
    tmp_path: Path,
) -> None:
    library, kept, image = tmp_path / OWN, tmp_path / "kept", tmp_path / "image"
    build_own(library, 1)
    words = [sys.executable, "-c", ASKS, str(library), str(tmp_path / "stop")]
    with started("run", "--gpu", "emulated", "--name", "asks", "--", *words) as process:
        read_lines(process, 2)
        done = flowgpu("pause-and-dump", "asks", "--output", image)
        assert done.returncode == 0, done.stderr
        rest_of(process)
    library.rename(kept)
    for change in (another_build, longer, missing):
        shutil.copy(kept, library)
        change(library)
        done = flowgpu("restore", image)
        code = errors.FileMissing if change is another_build else errors.FilesChanged
        assert done.returncode == code.exit_code, done.stderr
        assert str(library) in done.stderr and done.stdout == ""
        assert Registry().find("asks").state == "dumped"
        assert flowgpu("verify", image).returncode == 0
    kept.rename(library)
    with started("restore", str(image)) as process:
        assert read_lines(process, 3) == ["1", "1", "1"]
        (tmp_path / "stop").touch()
        rest_of(process)
    assert process.returncode == 0
