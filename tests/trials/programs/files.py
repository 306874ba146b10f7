"""Files on disks: databases, logs, locks, folders, and what /proc has."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.handlers
import mmap
import os
import shelve
import sqlite3
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from tests.trials.prelude import LEFT, RESTORED, Gpu, Here, child, ended, program, say

OFD_SETLK = 37
CHANGED = "refused then: FilesChanged"
WRITTEN_IN_PLACE = "what was written in place since the dump cannot be cut back"


def database(here: Here, mode: str) -> sqlite3.Connection:
    """A table of 200 rows, with the cache so small that an open transaction reaches the disk."""
    made = sqlite3.connect(here.folder / "database", isolation_level=None)
    say("mode", made.execute(f"pragma journal_mode={mode}").fetchone())
    made.execute("pragma cache_size=10")
    made.execute("create table t(a integer, b blob)")
    made.execute("begin")
    insert(made, range(200))
    made.execute("commit")
    return made


def insert(made: sqlite3.Connection, numbers: range) -> None:
    made.executemany("insert into t values(?,?)", ((n, bytes([n % 251]) * 500) for n in numbers))


def contents(made: sqlite3.Connection) -> tuple[object, ...]:
    return (
        made.execute("select count(*), sum(a) from t").fetchone(),
        made.execute("pragma integrity_check").fetchone(),
    )


def transaction(here: Here, mode: str) -> None:
    """A dump in the middle of a transaction whose pages are partly in the file."""
    gpu, made = Gpu(), database(here, mode)
    made.execute("begin immediate")
    insert(made, range(200, 400))
    made.execute("update t set b=zeroblob(300) where a % 3 = 0")
    say("open", gpu.step())
    here.ready()
    insert(made, range(400, 500))
    made.execute("commit")
    say("committed", *contents(made))
    other = sqlite3.connect(here.folder / "database")
    say("another connection", *contents(other), gpu.step())


@program(
    "SQLite with a rollback journal, dumped in a transaction that has reached the file",
    CHANGED,
    why=WRITTEN_IN_PLACE,
)
def sqlite_journal(here: Here) -> None:
    transaction(here, "delete")


@program(
    "SQLite with a write-ahead log, dumped in a transaction",
    CHANGED,
    why=WRITTEN_IN_PLACE,
)
def sqlite_wal(here: Here) -> None:
    transaction(here, "wal")


@program(
    "SQLite between two transactions; those after the dump change and grow the file",
    CHANGED,
    why=WRITTEN_IN_PLACE,
)
def sqlite_idle(here: Here) -> None:
    gpu, made = Gpu(), database(here, "delete")
    say("idle", *contents(made), gpu.step())
    here.ready()
    made.execute("begin")
    made.execute("update t set b=zeroblob(900) where a < 100")
    insert(made, range(200, 400))
    made.execute("commit")
    say("committed", *contents(made), gpu.step())


@program("SQLite in memory")
def sqlite_in_memory(here: Here) -> None:
    gpu, made = Gpu(), sqlite3.connect(":memory:", isolation_level=None)
    made.execute("create table t(a integer, b blob)")
    made.execute("begin")
    insert(made, range(500))
    say("open", gpu.step())
    here.ready()
    made.execute("commit")
    say("committed", *contents(made), gpu.step())


@program(
    "a file of records that is appended to and has a header rewritten in place",
    CHANGED,
    why=WRITTEN_IN_PLACE,
)
def header_in_place(here: Here) -> None:
    """Libraries write HDF5, zip and checkpoints so."""
    gpu, file = Gpu(), (here.folder / "records").open("w+b", buffering=0)

    def add() -> tuple[int, int]:
        file.seek(0)
        number = struct.unpack("q", file.read(8))[0] + 1
        file.seek(0)
        file.write(struct.pack("q", number))
        file.seek(0, os.SEEK_END)
        file.write(bytes([number]) * 5000)
        return number, file.tell()

    file.write(bytes(8))
    say("records", add(), add(), gpu.step())
    here.ready()
    say("records", add(), gpu.step())


@program("a log that grows, by `logging`; another that it rotates before the dump")
def logs(here: Here) -> None:
    gpu = Gpu()
    plain = logging.FileHandler(here.folder / "plain.log")
    rotated = logging.handlers.RotatingFileHandler(
        here.folder / "rotated.log", maxBytes=100, backupCount=2
    )
    log = logging.getLogger("trial")
    log.setLevel(logging.INFO)
    for handler in (plain, rotated):
        log.addHandler(handler)
    for number in range(20):
        log.info("line %d", number)
    say("logged", gpu.step())
    here.ready()
    log.info("after")
    lines = (here.folder / "plain.log").read_text().splitlines()
    kept = sorted(path.name for path in here.folder.iterdir())
    say(len(lines), lines[-1], kept, gpu.step())


@program("a log that is mapped for reading while it grows")
def mapped_log(here: Here) -> None:
    gpu, path = Gpu(), here.folder / "log"
    file = path.open("ab", buffering=0)
    file.write(b"x" * 5000)
    with path.open("rb") as opened:
        view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    say("log", len(view), gpu.step())
    here.ready()
    file.write(b"y" * 5000)
    say("log", view[4999:], path.stat().st_size, gpu.step())


@program("`flock`, POSIX and open-file locks, a lease: held against another process")
def locks(here: Here) -> None:
    gpu = Gpu()

    def made(name: str) -> int:
        fd = os.open(here.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        os.write(fd, bytes(100))
        return fd

    whole, range_, own = made("flock"), made("posix"), made("ofd")
    leased = os.open(here.folder / "lease", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(whole, fcntl.LOCK_EX)
    fcntl.lockf(range_, fcntl.LOCK_EX, 10, 5)
    fcntl.fcntl(own, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 20, 10, 0))
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)

    def refused(name: str, lock: Callable[[int], object]) -> bool:
        def attempt() -> int:
            try:
                lock(os.open(here.folder / name, os.O_RDWR))
            except OSError:
                return 1
            return 0

        return ended([child(attempt)]) == [1]

    def range_lock(start: int) -> Callable[[int], object]:
        return lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)

    say("held", gpu.step())
    here.ready()
    say("flock", refused("flock", lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)))
    say("posix", refused("posix", range_lock(6)), refused("posix", range_lock(50)))
    say("open file", refused("ofd", range_lock(21)))
    say("lease", fcntl.fcntl(leased, fcntl.F_GETLEASE) == fcntl.F_RDLCK, gpu.step())


@program(
    "a lock file of its own with its process id, and `dbm` open for writing",
    {RESTORED: CHANGED, LEFT: CHANGED},
    why=WRITTEN_IN_PLACE,
)
def lock_file_and_dbm(here: Here) -> None:
    gpu, lock = Gpu(), here.folder / "pid"
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, str(os.getpid()).encode())
    with contextlib.closing(shelve.open(str(here.folder / "shelf"), "c")) as shelf:
        shelf["a"] = list(range(1000))
        say("open", gpu.step())
        here.ready()
        shelf["b"] = "after" * 1000
        say(int(lock.read_text()) == os.getpid(), sorted(shelf), gpu.step())


@program("open folders, half-read; O_PATH descriptors; a FIFO and a large pipe with contents")
def odd_descriptors(here: Here) -> None:
    gpu, folder = Gpu(), here.folder / "folder"
    folder.mkdir()
    for number in range(300):
        (folder / str(number)).touch()
    half = os.scandir(folder)
    seen = {next(half).name for _ in range(50)}
    (here.folder / "file").touch()
    (here.folder / "link").symlink_to("file")
    path = os.open(here.folder / "file", os.O_PATH)
    link = os.open(here.folder / "link", os.O_PATH | os.O_NOFOLLOW)
    os.mkfifo(here.folder / "fifo")
    fifo = os.open(here.folder / "fifo", os.O_RDWR | os.O_NONBLOCK)
    os.write(fifo, b"in the fifo")
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.write(writer, bytes(200_000))
    say("open", gpu.step())
    here.ready()
    say("folder", len(seen | {entry.name for entry in half}))
    say(stat.S_ISREG(os.fstat(path).st_mode), stat.S_ISLNK(os.fstat(link).st_mode))
    size = sum(len(os.read(reader, 65536)) for _ in range(3))
    say(os.read(fifo, 99), size, fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ), gpu.step())


@program("a FIFO by which two processes talk, in a folder that is removed at the end (Open MPI)")
def fifo_that_is_removed(here: Here) -> None:
    gpu, folder = Gpu(), here.folder / "session"
    folder.mkdir()
    path = folder / "fifo"
    os.mkfifo(path)
    path.chmod(0o640)

    def talker() -> None:
        with path.open("wb", 0) as writing:
            writing.write(b"before ")
            here.wait()
            writing.write(b"after")

    pid = child(talker)
    with path.open("rb", 0) as reading:
        say("open", gpu.step())
        here.ready()
        say(ended([pid]), reading.read(), oct(path.stat().st_mode), gpu.step())
    path.unlink()
    folder.rmdir()


@program("files of `/proc` and `/sys` kept open, its own and another process's")
def proc_files(here: Here) -> None:
    gpu = Gpu()
    own, first = (os.open(f"/proc/{pid}/stat", os.O_RDONLY) for pid in ("self", "1"))
    memory = os.open("/proc/meminfo", os.O_RDONLY)
    folder = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    maps = os.open("/proc/self/maps", os.O_RDONLY)
    processors = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)
    os.read(maps, 100)
    say("open", gpu.step())
    here.ready()
    say("own", os.pread(own, 99, 0).split()[0] == str(os.getpid()).encode())
    say("first", os.pread(first, 99, 0)[:2], b"MemTotal" in os.pread(memory, 99, 0))
    say("folder", str(os.getpid()) in os.listdir(folder))
    say(bool(os.pread(processors, 9, 0)), bool(os.read(maps, 100)), gpu.step())


@program("a working folder that is deleted")
def deleted_working_folder(here: Here) -> None:
    gpu, folder = Gpu(), here.folder / "working"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    say("deleted", gpu.step())
    here.ready()
    try:
        say(os.getcwd())
    except FileNotFoundError:
        say("no working folder", gpu.step())


@program("standard output that is a file of its own, and output that is buffered")
def own_output(here: Here) -> None:
    gpu, log = Gpu(), here.folder / "stdout"
    kept = os.dup(1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.write(1, b"first ")
    os.write(kept, f"{gpu.step()}\n".encode())
    os.write(kept, b"ready\n")
    here.wait()
    os.write(1, b"second")
    os.write(kept, f"{Path(log).read_text()} {gpu.step()}\n".encode())
