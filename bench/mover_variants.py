"""Measure the mover on a GPU: all ways to dump, or restores over a grid of their parameters.

    python -m bench.mover_variants restores --dir /dev/shm/mover --gib 10

`dumps`: `whole` lays the memory out as one segment, `parts` as shuffled segments of --part-chunks
chunks. `gb/s` is from the start of the copy to its end, `early` until all bytes have left the GPU,
`all` from making the job, preparation included, until it is closed. `direct` and `gathered` are
shares of the bytes: straight into the file's pages, and by a kernel.

`restores`: rows by their rate, the best of --repeat runs; `cpu` is GB a second of processor time.
Without --full pieces and arenas vary at the middle of threads and streams, and the other way round.
After every run the memory's digests must be those of the dump. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.mover_bench import BLOCK, GIB, MIB, Device, numbers
from flowgpu import launch
from flowgpu.host.native import (
    CHUNK_BYTES,
    Arena,
    Kernels,
    Kind,
    Mode,
    Mover,
    Stage,
    Transfer,
    digest_count,
)

Options = dict[str, Any]
SCRATCH = 64 * MIB
CORES = len(os.sched_getaffinity(0))
LEAST_SLOTS = 4


class Way(NamedTuple):
    """How a restore is done; sizes in MiB."""

    threads: int
    streams: int
    piece: int
    arena: int


MIDDLE = Way(max(2, CORES - 1), 2, 4, 256)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("dumps", "restores"))
    parser.add_argument("--dir", type=Path, required=True, help="folder for the data files")
    parser.add_argument("--gib", type=float, default=10, help="device memory to move")
    parser.add_argument("--part-chunks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2, help="runs of a way")
    parser.add_argument("--driver", type=Path, default=Path("libcuda.so.1"))
    grid = parser.add_argument_group("the grid of restores")
    some = sorted({min(8, CORES), min(12, CORES), MIDDLE.threads, CORES})
    grid.add_argument("--threads", type=numbers, default=some)
    grid.add_argument("--streams", type=numbers, default=[2, 4])
    grid.add_argument("--piece-mib", type=numbers, default=[2, 4, 8, 16, 32])
    grid.add_argument("--arena-mib", type=numbers, default=[64, 128, 256, 1024])
    grid.add_argument("--layout", choices=("whole", "parts"), default="whole")
    grid.add_argument("--full", action="store_true", help="every combination")
    return parser.parse_args(arguments)


class Bench:
    """One GPU's memory, the mover, and a data file of each layout."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = Device(int(options.gib * GIB) // BLOCK * BLOCK)
        self.device.fill()
        self.mover = Mover(options.driver)
        self.kernels = Kernels(self.mover, self.context, launch.kernels_ptx(), SCRATCH)
        self.digests = np.zeros(16 * digest_count(self.device.size), np.uint8)

    @property
    def context(self) -> int:
        return int(self.device.context)

    def arena(self, arena_mib: int, piece_mib: int) -> Arena:
        arena = Arena(self.mover, arena_mib * MIB, piece_mib * MIB, MIDDLE.threads)
        arena.register(self.context)
        return arena

    def segments(self, layout: str) -> np.ndarray[Any, Any]:
        """Rows of address, bytes and offset."""
        size = self.device.size
        if layout == "whole":
            return np.array([[self.device.address, size, 0]], np.uint64)
        part = self.options.part_chunks * CHUNK_BYTES
        count = size // part
        order = np.random.default_rng(1).permutation(count)
        columns = (
            self.device.address + order * part,
            np.full(count, part),
            np.arange(count) * part,
        )
        return np.column_stack(columns).astype(np.uint64)

    def path(self, layout: str) -> Path:
        return Path(self.options.dir / f"variants-{layout}.data")

    def dump(self, arena: Arena, layout: str, **options: Any) -> Options:
        """Dump once and give the row of the table."""
        size, mode, rows = self.device.size, options.pop("mode"), self.segments(layout)
        self.path(layout).unlink(missing_ok=True)
        options |= {"threads": MIDDLE.threads, "streams": MIDDLE.streams, "expected_bytes": size}
        begin = time.perf_counter()
        with Transfer(
            arena, Kind.DUMP, mode, self.path(layout), context=self.context, **options
        ) as job:
            job.wait(Stage.PREPARED)
            job.start(rows, self.digests)
            job.wait(Stage.DONE)
            seen = job.progress()
            closing = time.perf_counter()
        end = time.perf_counter()
        return {
            "prep s": seen.prepare_ns / 1e9,
            "early": size / seen.out_ns,
            "gb/s": size / seen.done_ns,
            "close s": end - closing,
            "all": size / 1e9 / (end - begin),
            "direct": seen.bytes_direct / size,
            "gathered": seen.bytes_gathered / size,
        }

    def dumps(self) -> Iterator[tuple[str, str, Options]]:
        """Names, layouts and options."""
        for layout in ("whole", "parts"):
            for mode in Mode:
                options = {"mode": mode, "kernels": self.kernels}
                yield (
                    f"{mode.name.lower()}, digests given",
                    layout,
                    options | {"given_digests": True},
                )
                yield mode.name.lower(), layout, options
        yield "registered, no kernels", "parts", {"mode": Mode.REGISTERED}

    def ways(self) -> list[Way]:
        """All ways to try; those of one arena lie together."""
        given = self.options
        grid = itertools.product(given.arena_mib, given.piece_mib, given.threads, given.streams)
        found = [Way(threads, streams, piece, arena) for arena, piece, threads, streams in grid]
        return [
            way
            for way in found
            if way.arena >= LEAST_SLOTS * way.piece
            and (given.full or way[:2] == MIDDLE[:2] or way[2:] == MIDDLE[2:])
        ]

    def restore(self, arena: Arena, way: Way, rows: np.ndarray[Any, Any]) -> tuple[float, float]:
        """Restore once: GB a second, and GB a second of processor time."""
        layout, size = self.options.layout, self.device.size
        self.device.clear()
        options: Options = {"threads": way.threads, "streams": way.streams}
        options |= {"context": self.context, "kernels": self.kernels}
        with Transfer(arena, Kind.RESTORE, Mode.RING, self.path(layout), **options) as job:
            job.wait(Stage.PREPARED)
            before = processor_seconds()
            job.start(rows, self.digests)
            job.wait(Stage.DONE)
            used = processor_seconds() - before
            rate = size / job.progress().done_ns
        return rate, size / 1e9 / used

    def check(self, rows: np.ndarray[Any, Any]) -> None:
        """Compare the digests of all memory with those of the dump."""
        chunks = np.arange(rows[0, 1] // CHUNK_BYTES, dtype=np.uint64) * np.uint64(CHUNK_BYTES)
        found, _ = self.kernels.scan((rows[:, :1] + chunks).reshape(-1))
        if not np.array_equal(found.reshape(-1), self.digests):
            raise SystemExit("a restore brought back other bytes")


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_dumps(bench: Bench) -> None:
    arena = bench.arena(1024, 32)
    header = True
    for name, layout, options in bench.dumps():
        for _ in range(bench.options.repeat):
            row = bench.dump(arena, layout, **options)
            if header:
                print(f"{'':32}{'layout':>8}" + "".join(f"{key:>9}" for key in row))
                header = False
            cells = "".join(f"{value:>9.2f}" for value in row.values())
            print(f"{name:32}{layout:>8}{cells}", flush=True)
    arena.close()


def measure_restores(bench: Bench) -> None:
    arena = bench.arena(1024, 32)
    bench.dump(arena, bench.options.layout, mode=Mode.REGISTERED, kernels=bench.kernels)
    arena.close()
    rows = bench.segments(bench.options.layout)
    best: dict[Way, tuple[float, float]] = {}
    for (arena_mib, piece_mib), ways in itertools.groupby(
        bench.ways(), lambda way: (way.arena, way.piece)
    ):
        arena = bench.arena(arena_mib, piece_mib)
        for way in ways:
            for _ in range(bench.options.repeat):
                best[way] = max(best.get(way, (0.0, 0.0)), bench.restore(arena, way, rows))
                bench.check(rows)
        arena.close()
    print("".join(f"{name:>9}" for name in (*Way._fields, "gb/s", "cpu")))
    for way, rates in sorted(best.items(), key=lambda item: -item[1][0]):
        print("".join(f"{n:>9}" for n in way) + "".join(f"{rate:>9.2f}" for rate in rates))


def main() -> None:
    options = parse()
    options.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    d2h, h2d = bench.device.plain_rates()
    print(
        f"{bench.device.size / 1e9:.1f} GB, {CORES} cores; "
        f"plain pinned copies: D2H {d2h:.1f} GB/s, H2D {h2d:.1f} GB/s",
        flush=True,
    )
    try:
        {"dumps": measure_dumps, "restores": measure_restores}[options.what](bench)
    finally:
        for layout in ("whole", "parts"):
            bench.path(layout).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
