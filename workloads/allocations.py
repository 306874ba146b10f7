"""Hold a chosen number of allocations of a chosen size in a chosen number of processes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
from _chunks import Digests, add_option
from _common import Options, Report, digest, guarded, options_of, parser, verify
from numpy.typing import NDArray

DEFAULT_STEPS = 40
COUNT, TOTAL = 64, 256 << 10
BIG_COUNT, BIG_TOTAL = 1000, 8 << 30
WORD = 4
# Thread blocks that share an allocation: one alone reads a large one at a few GB/s.
SPLIT = 16

SOURCE = r"""
struct Entry {
    unsigned* words;
    unsigned count, id, version, unused;
};

__device__ unsigned word_of(Entry e, unsigned i)
{
    return mix32(e.id * 0x01000193u + e.version * 0x9E3779B1u + i);
}

extern "C" __global__ void fill(const Entry* table, unsigned first)
{
    Entry e = table[first + blockIdx.x];
    for (unsigned i = blockIdx.y * blockDim.x + threadIdx.x; i < e.count; i += SPLIT * blockDim.x)
        e.words[i] = word_of(e, i);
}

extern "C" __global__ void next_version(Entry* table, unsigned first)
{
    table[first + blockIdx.x].version += 1;
}

// Reads every word: how many are wrong, and a sum that depends on each and on where it lies.
extern "C" __global__ void inspect(const Entry* table, unsigned* wrong, unsigned* sums)
{
    Entry e = table[blockIdx.x];
    unsigned bad = 0, sum = 0;
    for (unsigned i = blockIdx.y * blockDim.x + threadIdx.x; i < e.count;
         i += SPLIT * blockDim.x) {
        unsigned word = e.words[i];
        bad += word != word_of(e, i);
        sum += word * (2u * i + 1u);
    }
    if (bad)
        atomicAdd(&wrong[blockIdx.x], bad);
    if (sum)
        atomicAdd(&sums[blockIdx.x], sum);
}
"""

ENTRY = np.dtype(
    [("words", "<u8"), ("count", "<u4"), ("id", "<u4"), ("version", "<u4"), ("unused", "<u4")]
)


class Heap:
    """The allocations of one process; their addresses and versions live on the device too."""

    def __init__(self, options: Options, number: int, count: int, total: int, touch: int) -> None:
        from _cuda import MIX_SOURCE, Gpu, check
        from cuda.bindings import driver

        self.gpu, self.count, self.touch = Gpu(options.device), count, touch
        module = self.gpu.module(MIX_SOURCE + SOURCE, SPLIT=SPLIT)
        self.fill = module.kernel("fill", "PI")
        self.next_version = module.kernel("next_version", "PI")
        self.inspect = module.kernel("inspect", "PPP")
        self.clear = lambda at: check(driver.cuMemsetD8(at, 0, WORD * count))
        self.table = self.gpu.alloc(ENTRY.itemsize * count)
        self.wrong, self.sums = self.gpu.alloc(WORD * count), self.gpu.alloc(WORD * count)
        words = max(total // count // WORD, 1)
        self.size = WORD * words
        table = np.zeros(count, ENTRY)
        table["words"] = [self.gpu.alloc(self.size) for _ in range(count)]
        table["count"] = words
        # Seed, process and place make the number, so that no two allocations hold the same.
        table["id"] = np.arange(count) + (options.seed * 64 + number) * 1_000_003
        self.addresses = [int(address) for address in table["words"]]
        self.gpu.write(self.table, table)
        self._each(self.fill, 0, count)

    def _each(self, kernel: object, first: int, count: int) -> None:
        assert callable(kernel)
        kernel((count, SPLIT, 1), 128, self.table, first)

    def step(self, step: int) -> str:
        """Rewrite `touch` allocations, look at every word of all, and give a digest."""
        first = step * self.touch % (self.count - self.touch + 1)
        self.next_version(self.touch, 1, self.table, first)
        self._each(self.fill, first, self.touch)
        self.clear(self.wrong)
        self.clear(self.sums)
        self.inspect((self.count, SPLIT, 1), 128, self.table, self.wrong, self.sums)
        wrong: NDArray[np.uint32] = self.gpu.read(self.wrong, np.uint32, self.count)
        for index in np.flatnonzero(wrong)[:1]:
            verify(False, f"step {step}: {wrong[index]} wrong words in allocation {index}")
        return digest(self.gpu.read(self.sums, np.uint32, self.count))

    def ranges(self) -> list[tuple[int, int]]:
        return [
            (self.table, ENTRY.itemsize * self.count),
            (self.wrong, WORD * self.count),
            (self.sums, WORD * self.count),
            *((address, self.size) for address in self.addresses),
        ]


def worker(heap: Heap) -> None:
    """Make a step for each byte that comes, and answer with its digest."""
    step = 0
    while sys.stdin.buffer.read(1):
        sys.stdout.buffer.write(heap.step(step).encode())
        sys.stdout.buffer.flush()
        step += 1
    heap.gpu.close()


class Workers:
    """Processes that each hold their part; this one has no CUDA."""

    def __init__(self, arguments: argparse.Namespace, count: int, total: int) -> None:
        shares = [count // arguments.processes] * arguments.processes
        self.processes = []
        for number, share in enumerate(shares):
            words = ["--worker", str(number), "--count", str(share), "--touch", "1"]
            words += ["--bytes", str(total // arguments.processes)]
            words += ["--seed", str(arguments.seed), "--device", str(arguments.device)]
            command = [sys.executable, __file__, *words]
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )

    def step(self, _step: int) -> str:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b".")
            process.stdin.flush()
        found = []
        for process in self.processes:
            assert process.stdout is not None
            found.append(process.stdout.read(32))
        verify(all(len(one) == 32 for one in found), "a worker ended early")
        return digest(*found)

    def finish(self) -> None:
        codes = []
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            codes.append(process.wait())
            process.stdout.close()
        verify(not any(codes), f"the workers ended with {codes}")


def main() -> None:
    options_parser = parser(__doc__ or "", steps=DEFAULT_STEPS)
    options_parser.add_argument("--count", type=int, help="allocations in all")
    options_parser.add_argument("--bytes", type=int, help="bytes in all, about")
    options_parser.add_argument("--processes", type=int, default=1, help="that share them")
    options_parser.add_argument("--touch", type=int, default=1, help="allocations changed a step")
    options_parser.add_argument("--worker", type=int, help="serve as this worker")
    add_option(options_parser)
    arguments = options_parser.parse_args()
    options = options_of(arguments)
    count = arguments.count or (BIG_COUNT if options.big else COUNT)
    total = arguments.bytes or (BIG_TOTAL if options.big else TOTAL)
    if arguments.worker is not None:
        worker(Heap(options, arguments.worker, count, total, arguments.touch))
        return
    report = Report(options)
    if arguments.processes > 1:
        workers = Workers(arguments, count, total)
        for step in range(options.steps):
            report.step(step, workers.step(step))
        workers.finish()
    else:
        heap = Heap(options, 0, count, total, arguments.touch)
        digests = Digests(arguments.chunk_digests)
        for step in range(options.steps):
            state = heap.step(step)
            digests.write(step, heap.ranges())
            report.step(step, state)
        heap.gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)
