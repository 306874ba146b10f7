"""Measure the kernels on chunks on a GPU, beside a copy from device memory to device memory.

    python -m bench.chunk_bench --gib 16

One row a kernel, and of the digest one a variant (threads a chunk) and an order of the chunks. GB
are 10^9 bytes, read and written bytes apart, from the median of samples timed by events. `share`:
read and written bytes a second, over those of cuMemcpyDtoD; the digest is to reach 80 %. `right`:
some of the results were checked on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from cuda.bindings import driver

from bench.device import check, context
from tests.emu.chunk_kernels import (
    CHUNK,
    DIGEST,
    SOURCES,
    Array,
    Kernels,
    allocate_chunks,
    upload,
)
from tools.compile_kernels import compile_ptx

GIB = 1 << 30
LANES = (4, 8, 16, 32)
CHECKED = 16
PATTERN = 0x0123456789ABCDEF
Row = dict[str, Any]


def seconds_of(work: Callable[[], Any], samples: int) -> list[float]:
    """Time of `work` on the device, each sample for itself, after one that is not counted."""
    begin, end = (check(driver.cuEventCreate(0)) for _ in range(2))
    work()
    found = []
    for _ in range(samples):
        check(driver.cuEventRecord(begin, 0))
        work()
        check(driver.cuEventRecord(end, 0))
        check(driver.cuEventSynchronize(end))
        found.append(check(driver.cuEventElapsedTime(begin, end)) / 1000)
    return found


def download(address: int, size: int) -> Array:
    out = np.zeros(size, np.uint8)
    check(driver.cuMemcpyDtoH(out.ctypes.data, address, size))
    return out


class Memory:
    """Two ranges of chunks, the left one filled, no two chunks equal; addresses of all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.size = count * CHUNK
        self.left, self.right = (allocate_chunks(count)[1] for _ in range(2))
        words = np.random.default_rng(1).integers(0, 2**63, 64 << 17, np.uint64)
        for at in range(0, self.size, words.nbytes):
            size = min(words.nbytes, self.size - at)
            check(driver.cuMemcpyHtoD(self.left + at, words.ctypes.data, size))
            words += np.uint64(1)
        in_order = np.arange(count, dtype=np.uint64)
        self.order = {"in order": in_order}
        self.order["shuffled"] = np.random.default_rng(2).permutation(in_order)
        self.rows = {
            name: upload(np.uint64(self.left) + order * np.uint64(CHUNK))
            for name, order in self.order.items()
        }
        self.right_rows = upload(np.uint64(self.right) + in_order * np.uint64(CHUNK))
        self.digests = upload(np.zeros(count * DIGEST, np.uint8))
        self.flags = upload(np.full(count, 7, np.uint8))
        self.some = np.linspace(0, count - 1, CHECKED, dtype=int).tolist()

    def chunk(self, base: int, number: int) -> bytes:
        return download(base + number * CHUNK, CHUNK).tobytes()

    def digests_are_right(self, order: Array) -> bool:
        found = download(self.digests, self.count * DIGEST).reshape(-1, DIGEST)
        flags = download(self.flags, self.count)
        wanted = {at: self.chunk(self.left, int(order[at])) for at in self.some}
        return not flags.any() and all(
            found[at].tobytes() == xxhash.xxh3_128_digest(data) for at, data in wanted.items()
        )


def measure(memory: Memory, samples: int) -> Iterator[Row]:
    size = memory.size

    def row(name: str, work: Callable[[], Any], read: int, written: int, **more: Any) -> Row:
        seconds = seconds_of(work, samples)
        median = statistics.median(seconds)
        rates = {"read_gbs": read / 1e9 / median, "written_gbs": written / 1e9 / median}
        return {"kernel": name, **rates, "seconds": seconds, **more}

    def device_copy() -> None:
        check(driver.cuMemcpyDtoDAsync(memory.right, memory.left, size, 0))

    yield row("cuMemcpyDtoD", device_copy, size, size)
    for lanes in LANES:
        yield from measure_digest(memory, lanes, row)
    kernels = Kernels(compile_ptx(SOURCES / "chunks.cu", [SOURCES / "chunks.h"]))
    rows, count = memory.rows["in order"], memory.count

    def fill() -> None:
        kernels.fill(memory.right_rows, count, PATTERN)

    def copy() -> None:
        kernels.copy(rows, memory.right_rows, count)

    def compare() -> None:
        kernels.compare(rows, memory.right_rows, count, memory.flags)

    filled = row("fill", fill, 0, size)
    want = PATTERN.to_bytes(8, "little") * (CHUNK // 8)
    yield filled | {"right": all(memory.chunk(memory.right, k) == want for k in memory.some)}
    copied = row("copy", copy, size, size)
    pairs = [(memory.chunk(memory.left, k), memory.chunk(memory.right, k)) for k in memory.some]
    yield copied | {"right": all(left == right for left, right in pairs)}
    compared = row("compare", compare, 2 * size, 0)
    yield compared | {"right": not download(memory.flags, count).any()}


def measure_digest(memory: Memory, lanes: int, row: Callable[..., Row]) -> Iterator[Row]:
    defines = (f"FGK_DIGEST_LANES={lanes}",)
    ptx = compile_ptx(SOURCES / "chunks.cu", [SOURCES / "chunks.h"], defines)
    kernels = Kernels(ptx, defines)
    registers = check(
        driver.cuFuncGetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, kernels.functions["digest"]
        )
    )
    for name, order in memory.order.items():

        def digest(addresses: int = memory.rows[name]) -> None:
            kernels.digest(addresses, memory.count, memory.digests, memory.flags)

        about = {"threads_a_chunk": lanes, "order": name, "registers": registers}
        check(driver.cuMemsetD8(memory.digests, 0, memory.count * DIGEST))
        found = row("digest", digest, memory.size, 0, **about)
        yield found | {"right": memory.digests_are_right(order)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=16, help="size of each of the two ranges")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    name = check(driver.cuDeviceGetName(128, context())).split(b"\0")[0].decode()
    memory = Memory(int(options.gib * GIB) // CHUNK)
    if not options.json:
        print(f"{name}, {memory.size / GIB:g} GiB")
    wrong, copied = False, 0.0
    for found in measure(memory, options.samples):
        wrong = wrong or not found.get("right", True)
        moved = found["read_gbs"] + found["written_gbs"]
        copied = copied or moved  # the first row
        found["share"] = moved / copied
        if options.json:
            print(json.dumps({"gpu": name, "bytes": memory.size, **found}), flush=True)
            continue
        about = [f"{key} {found[key]}" for key in ("threads_a_chunk", "order", "registers", "right")
                 if key in found]  # fmt: skip
        rates = f"read {found['read_gbs']:7.0f} GB/s, written {found['written_gbs']:7.0f} GB/s"
        line = f"{found['kernel']:14} {rates}, share {found['share']:4.0%}  {', '.join(about)}"
        print(line.rstrip(), flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
