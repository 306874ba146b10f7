"""Measure every variant of the mover on a GPU, in one table for dumps and one for restores.

    python -m bench.mover_variants --dir /dev/shm/mover --gib 16

`whole` lays the memory out as one segment, `parts` as shuffled segments of --part-chunks chunks.
`gb/s` is from the start of the copy to its end, `all` from making the job, preparation included,
until it is closed; `early` of a dump is until all bytes have left the GPU. `direct` and `gathered`
are shares of the bytes: straight between the GPU and the file's pages, and by a kernel. GB are 10^9
bytes. Each restore is compared with what was dumped, in 16 places.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.mover_bench import BLOCK, GIB, MIB, Device
from flowgpu import launch
from flowgpu.native import CHUNK_BYTES, Arena, Job, Kernels, Kind, Mode, Mover, Stage, digest_count

Options = dict[str, Any]
SCRATCH = 64 * MIB


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="folder for the data files")
    parser.add_argument("--gib", type=float, default=16, help="device memory to move")
    parser.add_argument("--threads", type=int, default=max(2, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--piece-mib", type=int, default=32)
    parser.add_argument("--part-chunks", type=int, default=2)
    parser.add_argument("--arena-gib", type=float, default=1)
    parser.add_argument("--repeat", type=int, default=1, help="rows a variant")
    parser.add_argument("--driver", type=Path, default=Path("libcuda.so.1"))
    return parser.parse_args(arguments)


class Bench:
    """One GPU's memory, the mover, and a data file of each layout."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = Device(int(options.gib * GIB) // BLOCK * BLOCK)
        self.device.fill()
        self.mover = Mover(options.driver)
        context = int(self.device.context)
        self.kernels = Kernels(self.mover, context, launch.kernels_ptx(), SCRATCH)
        size = int(options.arena_gib * GIB)
        self.arena = Arena(self.mover, size, options.piece_mib * MIB, options.threads)
        self.arena.register(context)
        self.digests: dict[str, bytearray] = {}

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

    def run(self, kind: Kind, layout: str, job_options: Options) -> Options:
        """Run one job and give its row of the table."""
        options = dict(job_options)
        mode, waits = options.pop("mode"), options.pop("waits", True)
        options |= {"threads": self.options.threads, "streams": self.options.streams}
        size = self.device.size
        if kind is Kind.DUMP:
            self.path(layout).unlink(missing_ok=True)
            options["expected_bytes"] = size
            self.digests.setdefault(layout, bytearray(16 * digest_count(size)))
        rows = self.segments(layout)
        begin = time.perf_counter()
        job = Job(
            self.arena, kind, mode, self.path(layout), context=int(self.device.context), **options
        )
        with job:
            if waits:
                job.wait(Stage.PREPARED)
            job.start(rows, self.digests[layout])
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
        """Names, layouts and options; the last of a layout leaves the file and its digests."""
        for layout in ("whole", "parts"):
            for mode in Mode:
                yield f"{mode.name.lower()}, digests given", layout, self.given(mode)
                yield mode.name.lower(), layout, {"mode": mode, "kernels": self.kernels}
        yield "registered, no kernels", "parts", {"mode": Mode.REGISTERED}

    def given(self, mode: Mode) -> Options:
        return {"mode": mode, "kernels": self.kernels, "given_digests": True}

    def restores(self) -> Iterator[tuple[str, Options]]:
        """Names and options, each without and with the check on the GPU."""
        threads = self.options.threads
        counts = sorted({1, 2, threads // 4, threads // 2, threads} - {0})
        ways: dict[str, Options] = {
            "ring": {"mode": Mode.RING},
            "registered, prepared": {"mode": Mode.REGISTERED},
            "registered, at once": {"mode": Mode.REGISTERED, "waits": False},
        }
        for count in counts:
            name = f"registered, {count} of {threads} behind"
            ways[name] = {"mode": Mode.REGISTERED, "prepare_behind": count}
        for name, options in ways.items():
            for check in (False, True):
                more = {**options, "kernels": self.kernels, "check_on_gpu": check}
                yield name + (", GPU checks" if check else ""), more
        yield "ring, no kernels", {"mode": Mode.RING}


def show(name: str, layout: str, row: Options, header: bool) -> None:
    if header:
        print(f"{'':44}{'layout':>8}" + "".join(f"{key:>9}" for key in row))
    print(f"{name:44}{layout:>8}" + "".join(f"{value:>9.2f}" for value in row.values()), flush=True)


def main() -> None:
    options = parse()
    options.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    d2h, h2d = bench.device.plain_rates()
    print(
        f"{bench.device.size / 1e9:.1f} GB, {options.threads} threads, {options.streams} streams; "
        f"plain pinned copies: D2H {d2h:.1f} GB/s, H2D {h2d:.1f} GB/s"
    )
    try:
        header = True
        for name, layout, job in bench.dumps():
            for _ in range(options.repeat):
                show("dump " + name, layout, bench.run(Kind.DUMP, layout, job), header)
                header = False
        for layout in ("whole", "parts"):
            for name, job in bench.restores():
                for _ in range(options.repeat):
                    bench.device.clear()
                    row = bench.run(Kind.RESTORE, layout, job)
                    bench.device.check()
                    row.pop("early")
                    show("restore " + name, layout, row, not header)
                    header = True
    finally:
        for layout in ("whole", "parts"):
            bench.path(layout).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
