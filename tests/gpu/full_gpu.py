"""A program that holds all the device memory that the driver gives, and checks every word of it.

    python tests/gpu/full_gpu.py [options of a workload] [--go FILE]

It makes its context and says `context`; with --go it waits for FILE. Then it allocates until the
driver has no more, says `holds BYTES in N`, and prints workload lines. A line depends on all words
that it ever wrote; a word that is not what it wrote last ends it with exit code 1. --scale small
writes one word of 4 KiB, which is what an interpreter of kernels can do, and reads all bytes back.
With --take-but it only holds all but so many bytes, until its standard input ends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workloads"))

from _common import Options, Report, digest, guarded, options_of, parser, verify
from _cuda import MIX_SOURCE, CudaError, Gpu, check
from cuda.bindings import driver

MIB = 1 << 20
LARGEST = 4096 * MIB
SMALLEST = 2 * MIB

SOURCE = (
    MIX_SOURCE
    + r"""
__device__ unsigned word_of(unsigned block, unsigned long long at, unsigned step)
{
    return mix32((unsigned)at * 2654435761u + block * 40503u + step) | 1u;
}

// Checks what step - 1 wrote (step 0: nothing) and writes what step does.
extern "C" __global__ void advance(unsigned* words, unsigned long long count, unsigned stride,
                                   unsigned block, unsigned step, unsigned long long* result)
{
    unsigned long long start = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long wrong = 0, sum = 0;
    for (unsigned long long i = start * stride; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x * stride) {
        if (step > 0)
            wrong += words[i] != word_of(block, i, step - 1);
        words[i] = word_of(block, i, step);
        sum += words[i];
    }
    if (wrong)
        atomicAdd(result, wrong);
    atomicAdd(result + 1, sum);
}
"""
)


def take_all(gpu: Gpu) -> list[tuple[int, int]]:
    """(address, bytes) of allocations, large ones first, until not even a small one is left."""
    found = []
    size = LARGEST
    while size >= SMALLEST:
        try:
            found.append((gpu.alloc(size), size))
        except CudaError as error:
            if error.code != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            size //= 2
    return found


def run(options: Options, go: Path | None) -> None:
    gpu = Gpu(options.device)
    kernel = gpu.module(SOURCE).kernel("advance", "PQIIIP")
    result = gpu.upload(np.zeros(2, np.uint64))
    print("context", flush=True)
    while go is not None and not go.exists():
        time.sleep(0.01)
    held = take_all(gpu)
    print(f"holds {sum(size for _, size in held)} in {len(held)}", flush=True)
    report = Report(options)
    stride = 1 if options.big else 1024
    grid, block = (2048, 256) if options.big else (1, 32)
    for step in range(options.steps):
        gpu.write(result, np.zeros(2, np.uint64))
        for number, (address, size) in enumerate(held):
            words = size // 4
            kernel(grid, block, address, words, stride, number, step, result)
        found = gpu.read(result, np.uint64, 2)
        verify(int(found[0]) == 0, f"{found[0]} words are not what step {step} left")
        data = [] if options.big else gpu.contents()[1:]
        report.step(step, digest(found, *data))
    check(driver.cuCtxSynchronize())
    report.done()


def take_but(device: int, left: int) -> None:
    """Hold all but `left` bytes until the end of standard input."""
    Gpu(device)
    free, _ = check(driver.cuMemGetInfo())
    check(driver.cuMemAlloc(free - left))
    print("taken", flush=True)
    sys.stdin.read()


def main() -> None:
    options = parser(__doc__ or "", steps=20)
    options.add_argument("--go", type=Path)
    options.add_argument("--take-but", type=int, metavar="BYTES")
    arguments = options.parse_args()
    if arguments.take_but is not None:
        take_but(arguments.device, arguments.take_but)
    else:
        run(options_of(arguments), arguments.go)


if __name__ == "__main__":
    guarded(main)
