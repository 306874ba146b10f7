"""Programs that move chunks with the mover and its kernels, on the GPU that cuInit finds.

python -m tests.emu.mover_cases CASE FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from cuda.bindings import driver as cu

from coordinator.device import loaded_libcuda
from flowgpu import launch
from flowgpu.host.native import (
    Arena,
    Catalogue,
    Kernels,
    Kind,
    Mode,
    Mover,
    MoverError,
    Status,
    Transfer,
)
from tests.emu.chunk_kernels import CHUNK, DIGEST, Array, allocate_chunks
from tests.emu.driver_lib import MIB, download, ok, start
from tests.patience import SECONDS

PIECE = 2 * MIB
PER_PIECE = PIECE // CHUNK
CHUNKS = 2 * PER_PIECE + 3
Options = dict[str, object]


@dataclass
class Device:
    """Chunks of device memory, and a mover with its kernels in their context."""

    mover: Mover
    context: int
    kernels: Kernels
    base: int
    count: int

    @classmethod
    def with_chunks(cls, count: int) -> Device:
        start()
        context = int(ok(cu.cuCtxGetCurrent()))
        mover = Mover(Path(loaded_libcuda()))
        kernels = Kernels(mover, context, launch.kernels_ptx(), MIB)
        return cls(mover, context, kernels, allocate_chunks(count)[1], count)

    def addresses(self, numbers: list[int] | None = None) -> Array:
        chosen = np.arange(self.count) if numbers is None else np.array(numbers)
        return (self.base + chosen * CHUNK).astype(np.uint64)

    def write(self, data: Array) -> None:
        ok(cu.cuMemcpyHtoD(self.base, np.ascontiguousarray(data).ctypes.data, data.nbytes))

    def read(self) -> Array:
        return np.asarray(download(self.base, self.count * CHUNK, np.uint8)).reshape(-1, CHUNK)

    def clear(self) -> None:
        ok(cu.cuMemsetD8(self.base, 0xEE, self.count * CHUNK))
        ok(cu.cuCtxSynchronize())

    def arena(self) -> Arena:
        arena = Arena(self.mover, 4 * PIECE, PIECE, threads=2)
        arena.register(self.context)
        return arena

    def run(
        self,
        arena: Arena,
        kind: Kind,
        path: Path,
        segments: Array,
        digests: Array,
        **options: object,
    ) -> int:
        """Run a job; the bytes that it gathered."""
        settings = {"mode": Mode.RING, "threads": 2, "streams": 2, "context": self.context}
        settings |= options
        with Transfer(arena, kind, path=path, kernels=self.kernels, **settings) as job:  # type: ignore[arg-type]
            job.start(segments, digests)
            assert job.wait(timeout=SECONDS)
            return job.progress().bytes_gathered


def random_chunks(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (count, CHUNK), np.uint8)


def digests_of(data: Array) -> Array:
    found = b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in data)
    return np.frombuffer(found, np.uint8).reshape(-1, DIGEST)


def shuffled(device: Device) -> tuple[Array, Array]:
    """Where each slot of the file belongs, and the segments that say so."""
    order = np.random.default_rng(4).permutation(device.count)
    sizes = np.full(device.count, CHUNK)
    rows = np.column_stack((device.base + order * CHUNK, sizes, np.arange(device.count) * CHUNK))
    return order, rows.astype(np.uint64)


def lists_of_chunks_are_scanned_compared_copied_and_filled(folder: Path) -> None:
    device = Device.with_chunks(24)
    data = random_chunks(24)
    data[[3, 9]] = 0
    data[9, -1] = 1
    data[12] = data[2]
    device.write(data)
    digests, zero = device.kernels.scan(device.addresses())
    np.testing.assert_array_equal(digests, digests_of(data))
    assert zero.tolist() == [number == 3 for number in range(24)]
    differ = device.kernels.compare(device.addresses([12, 3, 5]), device.addresses([2, 9, 5]))
    assert differ.tolist() == [False, True, False]
    device.kernels.copy(device.addresses([1, 0]), device.addresses([20, 21]))
    device.kernels.fill(device.addresses([22, 4]), 0x0807060504030201)
    data[[20, 21]] = data[[1, 0]]
    data[[22, 4]] = np.tile(np.arange(1, 9, dtype=np.uint8), CHUNK // 8)
    np.testing.assert_array_equal(device.read(), data)


def equal_chunks_are_found_by_their_digests(folder: Path) -> None:
    device = Device.with_chunks(16)
    data = random_chunks(16)
    data[[7, 11, 15]] = data[[2, 2, 0]]
    device.write(data)
    digests, _ = device.kernels.scan(device.addresses())
    numbers = Catalogue(device.mover, 4).match(digests, 100)
    expected = np.arange(100, 116)
    expected[[7, 11, 15]] = [102, 102, 100]
    assert numbers.tolist() == expected.tolist()


def a_gathered_dump_with_given_digests_is_restored(folder: Path) -> None:
    device = Device.with_chunks(CHUNKS)
    data = random_chunks(CHUNKS)
    order, segments = shuffled(device)
    arena = device.arena()
    for number, mode in enumerate(Mode):
        device.write(data)
        digests, _ = device.kernels.scan(segments[:, 0])
        given: Options = {"mode": mode, "given_digests": True, "expected_bytes": data.nbytes}
        path = folder / f"data{number}"
        gathered = device.run(arena, Kind.DUMP, path, segments, digests, **given)
        assert gathered == 2 * PIECE
        assert path.read_bytes() == data[order].tobytes()
        device.clear()
        assert device.run(arena, Kind.RESTORE, path, segments, digests) == gathered
        np.testing.assert_array_equal(device.read(), data)
    arena.close()


def a_restore_leaves_gaps_of_the_file_and_other_memory_alone(folder: Path) -> None:
    device = Device.with_chunks(CHUNKS)
    data = random_chunks(CHUNKS)
    (folder / "data").write_bytes(data.tobytes())
    digests = digests_of(data)
    order, segments = shuffled(device)
    arena = device.arena()
    device.clear()
    kept = np.arange(CHUNKS) % 3 == 0
    device.run(arena, Kind.RESTORE, folder / "data", segments[kept], digests)
    expected = np.full_like(data, 0xEE)
    expected[order[kept]] = data[kept]
    np.testing.assert_array_equal(device.read(), expected)
    arena.close()


def a_flipped_byte_is_found_wherever_it_is(folder: Path) -> None:
    device = Device.with_chunks(CHUNKS)
    data = random_chunks(CHUNKS)
    digests = digests_of(data)
    _, segments = shuffled(device)
    whole = np.array([[device.base, CHUNKS * CHUNK, 0]], np.uint64)
    arena = device.arena()
    places = [0, CHUNK - 1, PIECE + 12345, data.nbytes - 1]
    for rows, where in zip((segments, whole) * 2, places, strict=True):
        path = folder / f"data{where}"
        path.write_bytes(data.tobytes())
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([data.reshape(-1)[where] ^ 0x40]), where)
        try:
            device.run(arena, Kind.RESTORE, path, rows, digests)
        except MoverError as error:
            assert (error.status, error.chunk) == (Status.DAMAGED, where // CHUNK)
        else:
            raise AssertionError("a damaged image was restored")
    arena.close()


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        lists_of_chunks_are_scanned_compared_copied_and_filled,
        equal_chunks_are_found_by_their_digests,
        a_gathered_dump_with_given_digests_is_restored,
        a_restore_leaves_gaps_of_the_file_and_other_memory_alone,
        a_flipped_byte_is_found_wherever_it_is,
    )
}


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
    print("passed")
