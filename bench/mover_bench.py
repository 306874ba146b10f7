"""Measure the mover on a GPU: GB/s of dumps in each mode and of restores, beside pinned copies.

    python bench/mover_bench.py --dir /dev/shm/mover --gib 50

One row a combination of the dump's mode, threads, piece and streams. `out` is until all bytes have
left the GPU, `done` until they are in the file with their digests; `restore` includes reading and
checking every digest; `dump_prep_s` is what happens before the pause. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
from cuda.bindings import driver as cuda

from flowgpu.host.native import Arena, Kind, Mode, Mover, Stage, Transfer, digest_count

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 64 * MIB


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A driver call's value or values; anything but success ends the program."""
    error, *values = function(*arguments)
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{function.__name__}: {error.name}")
    return values[0] if len(values) == 1 else values


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder for the data file")
    parser.add_argument("--gib", type=float, default=50, help="device memory to move")
    parser.add_argument("--modes", default="ring,mapped,registered")
    parser.add_argument("--threads", type=numbers, default=[8, 16])
    parser.add_argument("--piece-mib", type=numbers, default=[32])
    parser.add_argument("--streams", type=numbers, default=[4])
    parser.add_argument("--arena-gib", type=float, default=2)
    parser.add_argument("--direct", action="store_true", help="O_DIRECT in ring mode")
    parser.add_argument("--driver", type=Path, default=Path("libcuda.so.1"))
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    return parser.parse_args(arguments)


class Device:
    """Device 0 with `size` bytes in one allocation, and a pattern that no two blocks share."""

    def __init__(self, size: int) -> None:
        call(cuda.cuInit, 0)
        self.context = call(cuda.cuDevicePrimaryCtxRetain, call(cuda.cuDeviceGet, 0))
        call(cuda.cuCtxSetCurrent, self.context)
        self.size = size
        self.address = int(call(cuda.cuMemAlloc, size))
        self.host = numpy.random.default_rng(1).integers(0, 256, BLOCK, dtype=numpy.uint8)

    def fill(self) -> None:
        for index, at in enumerate(range(0, self.size, BLOCK)):
            self.host[:8] = numpy.frombuffer(index.to_bytes(8, "little"), numpy.uint8)
            length = min(BLOCK, self.size - at)
            call(cuda.cuMemcpyHtoD, self.address + at, self.host.ctypes.data, length)

    def clear(self) -> None:
        call(cuda.cuMemsetD8, self.address, 0, self.size)
        call(cuda.cuCtxSynchronize)

    def check(self) -> None:
        """Compare 16 blocks, evenly spread, with the pattern."""
        blocks = -(-self.size // BLOCK)
        found = numpy.empty(BLOCK, numpy.uint8)
        for index in {round(i * (blocks - 1) / 15) for i in range(16)}:
            length = min(BLOCK, self.size - index * BLOCK)
            source = self.address + index * BLOCK
            call(cuda.cuMemcpyDtoH, found.ctypes.data, source, length)
            self.host[:8] = numpy.frombuffer(index.to_bytes(8, "little"), numpy.uint8)
            if not numpy.array_equal(found[:length], self.host[:length]):
                raise SystemExit(f"block {index} came back wrong")

    def plain_rates(self) -> tuple[float, float]:
        """GB/s of copies to and from pinned memory that do nothing else."""
        size = min(512 * MIB, self.size)
        host = call(cuda.cuMemHostAlloc, size, 0)
        stream = call(cuda.cuStreamCreate, cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        rates = []
        for copy in (
            lambda: call(cuda.cuMemcpyDtoHAsync, host, self.address, size, stream),
            lambda: call(cuda.cuMemcpyHtoDAsync, self.address, host, size, stream),
        ):
            copy()
            call(cuda.cuStreamSynchronize, stream)
            start = time.perf_counter()
            for _ in range(8):
                copy()
            call(cuda.cuStreamSynchronize, stream)
            rates.append(8 * size / 1e9 / (time.perf_counter() - start))
        call(cuda.cuMemFreeHost, host)
        call(cuda.cuStreamDestroy, stream)
        return rates[0], rates[1]


def run(
    device: Device, arena: Arena, path: Path, mode: Mode, options: dict[str, Any]
) -> dict[str, float]:
    """Dump and restore once; seconds and GB/s by name."""
    digests = bytearray(digest_count(device.size) * 16)
    segments = [(device.address, device.size)]
    row: dict[str, float] = {}
    common = {"context": int(device.context), **options}
    with Transfer(arena, Kind.DUMP, mode, path, expected_bytes=device.size, **common) as job:
        job.wait(Stage.PREPARED)
        job.start(segments, digests)
        job.wait(Stage.DONE)
        seen = job.progress()
        row["dump_prep_s"] = seen.prepare_ns / 1e9
        row["out_gbs"] = device.size / seen.out_ns
        row["done_gbs"] = device.size / seen.done_ns
        row["dump_direct"] = seen.bytes_direct / device.size
        start = time.perf_counter()
    row["dump_close_s"] = time.perf_counter() - start
    start = time.perf_counter()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        row["fsync_s"] = time.perf_counter() - start
        # So that a restore reads the disk; a tmpfs has nothing to drop.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    device.clear()
    with Transfer(arena, Kind.RESTORE, Mode.RING, path, **common) as job:
        job.wait(Stage.PREPARED)
        job.start(segments, digests)
        job.wait(Stage.DONE)
        seen = job.progress()
        row["restore_gbs"] = device.size / seen.done_ns
    device.check()
    return row


def main() -> None:
    options = parse()
    options.dir.mkdir(parents=True, exist_ok=True)
    path = options.dir / "mover-bench.data"
    device = Device(int(options.gib * GIB) // BLOCK * BLOCK)
    d2h, h2d = device.plain_rates()
    device.fill()
    mover = Mover(options.driver)
    print(f"plain pinned copies: D2H {d2h:.1f} GB/s, H2D {h2d:.1f} GB/s", file=sys.stderr)
    header = True
    for piece, threads, streams, name in itertools.product(
        options.piece_mib, options.threads, options.streams, options.modes.split(",")
    ):
        start = time.perf_counter()
        arena = Arena(mover, int(options.arena_gib * GIB), piece * MIB, threads=threads)
        arena.register(int(device.context))
        row: dict[str, Any] = {"mode": name, "threads": threads, "piece": piece, "streams": streams}
        row["arena_s"] = time.perf_counter() - start
        path.unlink(missing_ok=True)
        settings = {"threads": threads, "streams": streams, "direct_io": options.direct}
        try:
            row |= run(device, arena, path, Mode[name.upper()], settings)
        finally:
            path.unlink(missing_ok=True)
            arena.close()
        if options.json:
            print(json.dumps(row | {"bytes": device.size, "d2h_gbs": d2h, "h2d_gbs": h2d}))
            continue
        if header:
            print("  ".join(f"{key:>{max(len(key), 7)}}" for key in row))
            header = False
        print(
            "  ".join(
                f"{value:>{max(len(key), 7)}.2f}"
                if isinstance(value, float)
                else f"{value:>{max(len(key), 7)}}"
                for key, value in row.items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
