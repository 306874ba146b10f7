"""Files that are the program's memory: shared memory, named semaphores, files without a name."""

from __future__ import annotations

import array
import ctypes
import mmap
import multiprocessing
import os
import socket
import struct
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from tests.trials.prelude import Gpu, Here, child, ended, error, libc, ok, program, say, until

SHM = Path("/dev/shm")


def tick(memory: Any, at: int = 0) -> int:
    """Count on in shared memory."""
    number = struct.unpack_from("q", memory, at)[0] + 1
    struct.pack_into("q", memory, at, number)
    return int(number)


@program("counts in `multiprocessing.shared_memory`")
def shared_counter(here: Here) -> None:
    gpu = Gpu()
    shared = shared_memory.SharedMemory(here.unique, create=True, size=1 << 20)
    for _ in range(3):
        say("step", tick(shared.buf), gpu.step())
    here.ready()
    for _ in range(5):
        say("step", tick(shared.buf), gpu.step())
    shared.close()
    shared.unlink()


@program("named POSIX semaphore, opened again by its name")
def named_semaphore(here: Here) -> None:
    gpu = Gpu()
    libc.sem_open.restype = ctypes.c_void_p
    name, value = f"/{here.unique}".encode(), ctypes.c_int()
    semaphore = libc.sem_open(name, os.O_CREAT | os.O_EXCL, 0o600, 3)
    assert semaphore, error()

    def count(of: int) -> int:
        assert libc.sem_getvalue(ctypes.c_void_p(of), ctypes.byref(value)) == 0, error()
        return value.value

    libc.sem_wait(ctypes.c_void_p(semaphore))
    say("semaphore", count(semaphore), gpu.step())
    here.ready()
    libc.sem_post(ctypes.c_void_p(semaphore))
    libc.sem_post(ctypes.c_void_p(semaphore))
    again = libc.sem_open(name, 0)
    say("semaphore", count(semaphore), "by name", count(again) if again else error())
    say("unlink", libc.sem_unlink(name), gpu.step())


def square(number: int) -> int:
    return number * number


def serve(queue: Any, results: Any, lock: Any) -> None:
    """A worker that uses the GPU, as vLLM's do."""
    gpu = Gpu()
    for number in iter(queue.get, None):
        with lock:
            results.put((number, gpu.step()))


def workers(here: Here, method: str) -> None:
    gpu, context = Gpu(), multiprocessing.get_context(method)
    queue, results, lock = context.Queue(), context.Queue(), context.Lock()
    value, semaphore = context.Value("i", 5), context.Semaphore(2)
    processes = [context.Process(target=serve, args=(queue, results, lock)) for _ in range(2)]
    for process in processes:
        process.start()
    queue.put(1)
    say("worker", results.get(timeout=60), gpu.step())
    semaphore.acquire()
    here.ready()
    queue.put(2)
    say("worker", results.get(timeout=60)[0])
    say("semaphore", semaphore.acquire(block=False), semaphore.acquire(block=False), value.value)
    for _ in processes:
        queue.put(None)
    for process in processes:
        process.join(30)
    say("ended", [process.exitcode for process in processes], gpu.step())


@program("GPU workers of `multiprocessing`, spawned: queues, a lock, a semaphore")
def spawned_workers(here: Here) -> None:
    workers(here, "spawn")


@program("GPU workers of a `forkserver`")
def forkserver_workers(here: Here) -> None:
    workers(here, "forkserver")


@program("`multiprocessing.Manager` and a `Pool`")
def manager_and_pool(here: Here) -> None:
    gpu, context = Gpu(), multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        shared = manager.dict(a=1)
        say("pool", pool.map(square, range(5)), gpu.step())
        here.ready()
        shared["b"] = 2
        say("manager", dict(shared))
        say("pool", pool.map(square, range(5)), gpu.step())


@program("`ProcessPoolExecutor` with work under way")
def executor(here: Here) -> None:
    gpu = Gpu()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        say("map", list(pool.map(square, range(8))), gpu.step())
        waiting = [pool.submit(waits, here.go) for _ in range(3)]
        here.ready()
        say("done", [one.result(60) for one in waiting], gpu.step())


def waits(go: Path) -> bool:
    return until(go.exists, 60)


@program(
    "a segment by name, made by a loader and kept by a manager (`file_system` sharing)",
)
def file_system_sharing(here: Here) -> None:
    """torch_shm_manager does so: the file stays linked until the last one lets go of it."""
    gpu, name = Gpu(), SHM / here.unique
    reader, writer = os.pipe()

    def loader() -> None:
        for batch in range(2):
            if batch:
                here.wait()
            path = f"{name}-{batch}"
            with open(path, "wb") as file:
                file.write(bytes([batch + 1]) * 65536)
            os.write(writer, path.encode().ljust(100))

    process = child(loader)

    def batch() -> mmap.mmap:
        path = os.read(reader, 100).strip().decode()
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    first = batch()
    first[:5] = b"read1"
    say("batch", first[:7], gpu.step())
    here.ready()
    second = batch()
    say("batch", first[:7], second[:3], ended([process]))
    with open(f"{name}-0", "rb") as file:
        say("by name", file.read(7), gpu.step())
    for number in range(2):
        os.unlink(f"{name}-{number}")


@program("segments passed as descriptors between processes (`file_descriptor` sharing)")
def file_descriptor_sharing(here: Here) -> None:
    gpu = Gpu()
    ours, theirs = socket.socketpair()

    def loader() -> None:
        for batch in range(2):
            if batch:
                here.wait()
            path = SHM / f"{here.unique}-{batch}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
            os.write(fd, bytes([batch + 1]) * 65536)
            socket.send_fds(theirs, [b"batch"], [fd, os.memfd_create("meta")])
            os.close(fd)

    process = child(loader)

    def batch() -> mmap.mmap:
        _, fds, *_ = socket.recv_fds(ours, 9, 2)
        view = mmap.mmap(fds[0], 0)
        for fd in fds:
            os.close(fd)
        return view

    first = batch()
    first[:5] = b"read1"
    say("batch", first[:7], gpu.step())
    here.ready()
    second = batch()
    say("batch", first[:7], second[:3], ended([process]), gpu.step())


@program("descriptors of shared memory in flight in a socket")
def descriptors_in_flight(here: Here) -> None:
    gpu = Gpu()
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("in flight")
    os.write(memory, b"sent before")
    socket.send_fds(theirs, [b"one"], [memory])
    os.close(memory)
    say("sent", gpu.step())
    here.ready()
    said, fds, *_ = socket.recv_fds(ours, 9, 2)
    say(said, os.pread(fds[0], 99, 0), gpu.step())


@program("an open file whose first name is gone while another link is left")
def hard_link(here: Here) -> None:
    gpu = Gpu()
    first, second = here.folder / "first", here.folder / "second"
    first.write_bytes(b"hard link")
    fd = os.open(first, os.O_RDWR)
    os.link(first, second)
    os.unlink(first)
    say("links", os.fstat(fd).st_nlink, gpu.step())
    here.ready()
    os.pwrite(fd, b"HARD", 0)
    say("links", os.fstat(fd).st_nlink, second.read_bytes())
    os.ftruncate(fd, 9)
    os.pwrite(fd, b"hard", 0)  # as at the dump, for who is restored after this
    say("files", sorted(os.listdir(here.folder)), gpu.step())


@program("an open log that was renamed by rotation")
def rotated_by_rename(here: Here) -> None:
    gpu, log = Gpu(), here.folder / "log"
    file = open(log, "a", buffering=1)  # noqa: SIM115
    file.write("one\n")
    log.rename(here.folder / "log.1")
    log.touch()
    say("rotated", gpu.step())
    here.ready()
    file.write("two\n")
    say((here.folder / "log.1").read_text().split(), repr(log.read_text()), gpu.step())


@program(
    "`/tmp/hsperfdata` file: made, mapped shared and written all the time, as Java does",
)
def performance_data(here: Here) -> None:
    gpu = Gpu()
    folder = here.folder / "hsperfdata_user"
    folder.mkdir()
    file = folder / str(os.getpid())
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 32768)
    view = mmap.mmap(fd, 32768)
    os.close(fd)
    say("count", tick(view), gpu.step())
    here.ready()
    say("count", tick(view), tick(view), file.stat().st_size, gpu.step())
    file.unlink()


@program("temporary files without a name: `O_TMPFILE`, deleted, in a folder that is gone, sparse")
def nameless_files(here: Here) -> None:
    gpu = Gpu()
    unnamed = os.open(here.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(unnamed, b"O_TMPFILE")
    deleted = tempfile.TemporaryFile(dir=here.folder)  # noqa: SIM115
    deleted.write(b"deleted")
    deleted.flush()
    deep = here.folder / "x" / "y"
    deep.mkdir(parents=True)
    inside = os.open(deep / "file", os.O_RDWR | os.O_CREAT)
    os.write(inside, b"in a deleted folder")
    (deep / "file").unlink()
    deep.rmdir()
    deep.parent.rmdir()
    sparse = os.open(here.folder / "sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(sparse, b"end", (8 << 30) - 3)
    os.unlink(here.folder / "sparse")
    say("made", gpu.step())
    here.ready()
    deleted.seek(0)
    say(os.pread(unnamed, 99, 0), deleted.read(), os.pread(inside, 99, 0))
    status = os.fstat(sparse)
    say(status.st_size == 8 << 30, os.pread(sparse, 3, (8 << 30) - 3), status.st_blocks < 100)
    say("files", os.listdir(here.folder), gpu.step())


@program(
    "a named temporary file and a temporary folder, deleted at the end",
    "refused then: FilesChanged",
    why="a file on a disk that is gone is the user's to put back",
)
def temporary_files(here: Here) -> None:
    gpu = Gpu()
    with (
        tempfile.TemporaryDirectory(dir=here.folder) as folder,
        tempfile.NamedTemporaryFile(dir=folder) as file,
    ):
        file.write(b"before")
        file.flush()
        say("made", gpu.step())
        here.ready()
        if not Path(file.name).exists():
            say("gone")
        file.write(b" after")
        file.flush()
        say(Path(file.name).read_bytes(), gpu.step())


@program("arrays that workers map from a folder in `/dev/shm`, as joblib does")
def mapped_arrays(here: Here) -> None:
    gpu, folder = Gpu(), SHM / here.unique
    folder.mkdir()
    file = folder / "array"
    array.array("q", range(10000)).tofile(file.open("wb"))
    reader, writer = os.pipe()

    def worker() -> None:
        with file.open("rb") as opened:
            view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        os.write(writer, b"mapped")
        here.wait()
        numbers = array.array("q", bytes(view))
        os.write(writer, str(sum(numbers)).encode().ljust(20))

    process = child(worker)
    say(os.read(reader, 6), gpu.step())
    here.ready()
    say(os.read(reader, 20).strip(), ended([process]), file.exists(), gpu.step())
    subprocess.run(["rm", "-r", folder], check=True)


@program("memory that two processes share without a file, and memfds that grow")
def anonymous_sharing(here: Here) -> None:
    gpu = Gpu()
    shared, grows = mmap.mmap(-1, 65536), os.memfd_create("grows")
    os.ftruncate(grows, 4096)
    view = mmap.mmap(grows, 4096)
    tick(shared), tick(view)

    def worker() -> None:
        here.wait()
        tick(shared)
        os.ftruncate(grows, 1 << 20)
        os.pwrite(grows, b"far", 999_999)

    process = child(worker)
    say("step", gpu.step())
    here.ready()
    say(ended([process]), tick(shared), tick(view), os.pread(grows, 3, 999_999), gpu.step())


@program("host memory of the driver's, mapped and pinned, beside a named segment")
def pinned_memory(here: Here) -> None:
    from cuda.bindings import driver as cu

    gpu = Gpu()
    shared = shared_memory.SharedMemory(here.unique, create=True, size=1 << 20)
    pinned = ok(cu.cuMemAllocHost(1 << 20))
    ctypes.memset(int(pinned), 7, 1 << 20)
    shared.buf[:4] = b"name"
    say("step", gpu.step())
    here.ready()
    say(ctypes.string_at(int(pinned) + 99, 3), bytes(shared.buf[:4]), gpu.step())
    shared.close()
    shared.unlink()
