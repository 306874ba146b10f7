"""The ghost on a driver that does not exist: device memory is memfds, copies are plain files.

State of the checkpoint API is kept in $FAKE_STATES, one file a process, so that a second ghost sees
what a first one did. The emulated driver is the strict one; this only lets the coordinator run.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from coordinator.chunks import CHUNK, U8, U64, Bools, Kernels, Segments
from coordinator.device import DriverError, Gpu, check_context
from coordinator.engine import CheckpointApi, ProcessState
from coordinator.faults import check_write
from coordinator.ghost import GhostProgram
from coordinator.ghost_server import serve
from coordinator.move_plan import Plan
from flowgpu.host.native import MoverError, Status
from flowgpu.image.digests import chunk_digests
from flowgpu.wire import Fault

MEMORY = 1 << 30
mapped: dict[int, tuple[int, int]] = {}  # address -> (fd, size), for driver and mover


FIRST_FILLED = os.environ.get("FAKE_FIRST_FILLED", "")
"""The first fill that ends makes this file. Only then do other GPUs than the first get blocks."""


def seconds_of(name: str) -> float:
    """What the environment says that something takes."""
    return float(os.environ.get(name, "0"))


class FakeCheckpoints:
    def __init__(self) -> None:
        self.folder = Path(os.environ["FAKE_STATES"])

    def state(self, pid: int) -> ProcessState:
        path = self.folder / str(pid)
        return ProcessState[path.read_text()] if path.exists() else ProcessState.RUNNING

    def _move(self, pid: int, before: ProcessState, after: ProcessState) -> None:
        if os.environ.get("FAKE_CHECKPOINT") == f"hang-{after.name}":
            time.sleep(3600)
        if os.environ.get("FAKE_CHECKPOINT") == f"fail-{after.name}":
            raise DriverError(f"to {after.name}", "CUDA_ERROR_UNKNOWN")
        if os.environ.get("FAKE_CHECKPOINT") == f"full-{after.name}":
            raise DriverError(f"to {after.name}", "CUDA_ERROR_OUT_OF_MEMORY")
        died = self.folder / "ghost died"
        if os.environ.get("FAKE_CHECKPOINT") == f"die-{after.name}" and not died.exists():
            died.touch()
            os._exit(1)
        if self.state(pid) is not before:
            raise DriverError(f"to {after.name}", "CUDA_ERROR_ILLEGAL_STATE")
        (self.folder / str(pid)).write_text(after.name)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._move(pid, ProcessState.RUNNING, ProcessState.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._move(pid, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    def restore(self, pid: int, gpus: Mapping[str, str]) -> None:
        self._move(pid, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._move(pid, ProcessState.LOCKED, ProcessState.RUNNING)


class FakeDriver:
    version = 13000
    library = "no library"

    def __init__(self) -> None:
        old = os.environ.get("FAKE_DRIVER_OLD")
        self.checkpoints: CheckpointApi | None = None if old else FakeCheckpoints()
        self.next_address = MEMORY
        self.imports = 0
        self.contexts: set[int] = set()

    def gpus(self) -> list[Gpu]:
        count = int(os.environ.get("FAKE_GPUS", "1"))
        salt = os.environ.get("FAKE_GPU_SALT", "0")
        model = os.environ.get("FAKE_GPU_MODEL", "no GPU at all")
        peers = ({"access": 1, "atomics": 1, "rank": 0},) * count
        return [
            Gpu(i, f"GPU-{salt}0000000-0000-0000-0000-00000000000{i}", model, MEMORY, "8.0", peers)
            for i in range(count)
        ]

    def context(self, ordinal: int) -> int:
        if ordinal not in self.contexts:
            check_context()
            self.contexts.add(ordinal)
        return 1000 + ordinal

    def use(self, ordinal: int) -> None:
        pass

    def free(self, ordinal: int) -> int:
        return int(os.environ.get("FAKE_GPU_FREE", MEMORY))

    def granularity(self, ordinal: int) -> int:
        return 2 << 20

    def import_block(self, fd: int) -> tuple[int, int]:
        # The first ghost of a session alone: the contexts of the tasks are beside it.
        self.imports += 1
        full = Path(os.environ["FAKE_STATES"]) / "full"
        if self.imports == int(os.environ.get("FAKE_IMPORTS", 0)) and not full.exists():
            full.touch()
            raise DriverError("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY")
        name = os.readlink(f"/proc/self/fd/{fd}")
        return os.dup(fd), int(name.partition("gpu")[2].split()[0])

    def create_block(self, ordinal: int, size: int) -> tuple[int, int]:
        time.sleep(seconds_of("FAKE_CREATE_SECONDS"))
        while ordinal and FIRST_FILLED and not os.path.exists(FIRST_FILLED):
            time.sleep(0.01)
        handle = os.memfd_create(f"gpu{ordinal}", os.MFD_CLOEXEC)
        os.ftruncate(handle, size)
        return handle, os.dup(handle)

    def reserve(self, size: int) -> int:
        self.next_address += size
        return self.next_address - size

    def map(self, address: int, size: int, handle: int) -> None:
        assert address not in mapped
        mapped[address] = (handle, size)

    def allow(self, ordinal: int, address: int, size: int) -> None:
        if "FAKE_UNREACHED" in os.environ and not gpu_at(address).endswith(f"gpu{ordinal}"):
            raise DriverError("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")

    def unmap(self, address: int, size: int) -> None:
        del mapped[address]

    def release(self, handle: int) -> None:
        os.close(handle)


def place(address: int) -> tuple[int, int]:
    """Descriptor of the block at an address, and the offset in it."""
    for start, (fd, size) in mapped.items():
        if start <= address < start + size:
            return fd, address - start
    raise AssertionError(f"nothing is mapped at {address:#x}")


def gpu_at(address: int) -> str:
    return os.readlink(f"/proc/self/fd/{place(address)[0]}").partition(" ")[0]


def read(address: int) -> bytes:
    fd, offset = place(address)
    return os.pread(fd, CHUNK, offset)


def write(address: int, data: bytes) -> None:
    fd, offset = place(address)
    os.pwrite(fd, data, offset)


class FakeJob:
    """Copies in a thread, chunk by chunk."""

    def __init__(self, path: Path, digests: Path, restore: bool) -> None:
        self.path, self.digests, self.restore = path, digests, restore
        self.total = self.moved = 0
        self.error: Exception | None = None
        self.cancelled = threading.Event()

    def start(self, segments: Segments, digests: U8 | None) -> None:
        self.total = int(segments[:, 1].sum())
        self.thread = threading.Thread(target=self.run, args=(segments,), daemon=True)
        self.thread.start()

    def run(self, segments: Segments) -> None:
        try:
            if not self.restore:
                check_write(self.path, (Fault.GHOST_FULL, Fault.GHOST_ERROR))
                self.path.touch()
                self.digests.touch()
            seconds = seconds_of("FAKE_COPY_SECONDS")
            for address, size, offset in segments.tolist():
                for at in range(0, size, CHUNK):
                    if self.cancelled.wait(seconds * CHUNK / self.total):
                        return
                    work = self.fill if self.restore else self.dump
                    work(address + at, offset + at)
                    self.moved += CHUNK
            if self.restore and FIRST_FILLED:
                Path(FIRST_FILLED).touch()
        except Exception as error:
            self.error = error

    def dump(self, address: int, offset: int) -> None:
        data = read(address)
        with open(self.path, "ab") as file, open(self.digests, "ab") as digests:
            assert file.tell() == offset
            file.write(data)
            digests.write(chunk_digests(memoryview(data)))

    def fill(self, address: int, offset: int) -> None:
        for path in filter(None, os.environ.get("FAKE_FILL_AFTER", "").split(":")):
            while not os.path.exists(path) and not self.cancelled.wait(0.01):
                pass
        with open(self.path, "rb") as file, open(self.digests, "rb") as digests:
            file.seek(offset)
            data = file.read(CHUNK)
            found = chunk_digests(memoryview(data))
            digests.seek(offset // CHUNK * 16)
            if digests.read(16) != found:
                raise MoverError(Status.DAMAGED, f"a chunk of {self.path.name} is damaged")
        write(address, data)

    def progress(self) -> tuple[int, int]:
        return self.moved, self.total

    def wait(self, stage: str, seconds: float) -> int:
        if stage == "prepared":
            return 0
        self.thread.join(seconds)
        if stage == "done" and self.cancelled.wait(seconds_of("FAKE_FLUSH_SECONDS")):
            raise MoverError(Status.CANCELLED, "cancelled")
        if self.error:
            raise self.error
        if self.cancelled.is_set():
            raise MoverError(Status.CANCELLED, "cancelled")
        if self.moved < self.total:
            raise TimeoutError("the copy is not done")
        return self.total

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.cancelled.set()
        if hasattr(self, "thread"):
            self.thread.join()
        if os.environ.get("FAKE_UNPIN"):
            states = Path(os.environ["FAKE_STATES"])
            (states / "unpins").write_text(str(os.getpid()))
            while not (states / "may-unpin").exists():
                time.sleep(0.01)
            (states / "unpinned").touch()


class FakeKernels:
    def scan(self, addresses: U64) -> tuple[U8, Bools]:
        found = [read(int(at)) for at in addresses]
        digests = b"".join(chunk_digests(memoryview(data)) for data in found)
        zeros = np.array([not data.strip(b"\0") for data in found], np.bool_)
        return np.frombuffer(digests, np.uint8).reshape(-1, 16), zeros

    def compare(self, left: U64, right: U64) -> Bools:
        pairs = zip(left, right, strict=True)
        return np.array([read(int(a)) != read(int(b)) for a, b in pairs], np.bool_)

    def copy(self, sources: U64, destinations: U64) -> None:
        lossy = "FAKE_LOSSY" in os.environ  # bytes that go from one GPU to another are lost
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            away = gpu_at(source) != gpu_at(destination)
            write(destination, bytes([7]) * CHUNK if lossy and away else read(source))

    def fill(self, destinations: U64, pattern: int) -> None:
        for at in destinations:
            write(int(at), pattern.to_bytes(8, "little") * (CHUNK // 8))


class FakeCatalogue:
    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}

    def match(self, digests: U8, first: int) -> U64:
        rows = [row.tobytes() for row in digests]
        found = [self.numbers.setdefault(row, first + i) for i, row in enumerate(rows)]
        return np.array(found, np.uint64)


class FakeMover:
    def make_arena(self, plan: Plan) -> None:
        pass

    def pin_arena(self, context: int) -> None:
        pass

    def kernels(self, context: int) -> FakeKernels:
        if os.environ.get("FAKE_NO_KERNELS"):
            raise MoverError(Status.DRIVER, "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        return FakeKernels()

    def catalogue(self, expected: int) -> FakeCatalogue:
        return FakeCatalogue()

    def dump_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        expected: int,
        plan: Plan,
        kernels: Kernels | None,
    ) -> FakeJob:
        if path.is_relative_to("/proc"):  # what it has of an earlier copy is written over
            os.truncate(path, 0)
            digests.unlink(missing_ok=True)
        return FakeJob(path, digests, restore=False)

    def restore_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        plan: Plan,
        kernels: Kernels | None,
        frames: Sequence[int] | None = None,
    ) -> FakeJob:
        assert frames is None
        return FakeJob(path, digests, restore=True)


def run(fd: int) -> None:
    serve(fd, GhostProgram(FakeDriver, lambda library: FakeMover()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    run(parser.parse_args().fd)


if __name__ == "__main__":
    main()
